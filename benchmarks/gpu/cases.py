"""Runs of many kinds on a GPU or another device, for benchmarks/gpu and the suite's tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from pipelab import Recompute, Run, make, run

SGD = partial(torch.optim.SGD, lr=0.01)


def _width(device: torch.device) -> int:
    """Wide enough that a GPU still computes while the host goes on: what does not wait is seen."""
    return 1024 if device.type == "cuda" else 32


def _layer(width: int, dropout: float = 0.0) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.Dropout(dropout), nn.Tanh())


def checked(
    name: str,
    stages: Sequence[nn.Module],
    devices: Sequence[Any],
    *,
    microbatches: int = 4,
    virtual: int = 1,
    optimizer: Callable = SGD,
    **options: Any,
) -> Run:
    """Two batches of a schedule, with the check; of Linear layers as wide as the first."""
    width = next(p.shape[1] for p in stages[0].parameters() if p.ndim == 2)
    rows = len(devices)
    schedule = make(name, rows, microbatches, batches=2, virtual=virtual)
    torch.manual_seed(1)
    shape = (8 * microbatches * options.get("replicas", 1), width)
    batches = [(torch.randn(shape), torch.randn(shape)) for _ in range(schedule.batches)]
    names = list(map(str, devices))
    return run(schedule, stages, batches, F.mse_loss, optimizer, devices=names, **options)


def _layers(device: torch.device, count: int, dropout: float = 0.0) -> list[nn.Sequential]:
    torch.manual_seed(0)
    return [_layer(_width(device), dropout) for _ in range(count)]


def _tied(device: torch.device) -> list[nn.Sequential]:
    """Three stages, the first and the last with one weight."""
    first, middle, last = _layers(device, 3)
    last[0].weight = first[0].weight
    return [first, middle, last]


def four_streams(device: torch.device) -> Run:
    adam = partial(torch.optim.AdamW, lr=1e-3)
    return checked("pipedream_flush", _layers(device, 4), [device] * 4, optimizer=adam)


def autocast(device: torch.device) -> Run:
    return checked("gpipe", _layers(device, 2), [device] * 2, autocast=torch.bfloat16)


def with_the_cpu(device: torch.device) -> Run:
    return checked("pipedream_flush", _layers(device, 4), ["cpu", device, device, "cpu"])


def stashed(device: torch.device) -> Run:
    return checked("pipedream", _layers(device, 3), [device] * 3)


def interleaved(device: torch.device) -> Run:
    return checked("interleaved", _layers(device, 4), [device] * 2, virtual=2)


def tied(device: torch.device) -> Run:
    return checked("pipedream_flush", _tied(device), [device] * 3)


def tied_with_the_cpu(device: torch.device) -> Run:
    return checked("gpipe", _tied(device), [device, device, "cpu"], clip=0.01)


def replicas(device: torch.device) -> Run:
    return checked("gpipe", _layers(device, 2), [device] * 2, replicas=2)


def dropout(device: torch.device) -> Run:
    stages = _layers(device, 2, dropout=0.5)
    return checked("gpipe", stages, [device] * 2, recompute=Recompute.ALWAYS, seed=7)


def offloaded(device: torch.device) -> Run:
    return checked("pipeoffload", _layers(device, 4), [device] * 4, microbatches=6)


def processes(devices: Sequence[Any]) -> Run:
    """A process for each device."""
    stages = _layers(torch.device(devices[0]), len(devices))
    return checked("pipedream_flush", stages, devices, backend="processes")


class Case(NamedTuple):
    """A run on a device, by so many workers."""

    workers: int
    run: Callable[[torch.device], Run]


CASES: dict[str, Case] = {
    "1F1B on four streams, AdamW": Case(4, four_streams),
    "bfloat16 autocast": Case(2, autocast),
    "CPU, GPU, GPU, CPU": Case(4, with_the_cpu),
    "stashed weights (PipeDream)": Case(3, stashed),
    "interleaved": Case(2, interleaved),
    "tied weights": Case(3, tied),
    "tied weights on GPU and CPU, clipped": Case(3, tied_with_the_cpu),
    "two replicas": Case(4, replicas),
    "dropout, recomputed": Case(2, dropout),
    "offloaded": Case(4, offloaded),
}
