"""Batches on ranks that torchrun has started: pipelab's beside torch's own runtime."""

import signal
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from harness.group import PeerJob
from harness.torch_pipelining import train_rank
from measure import in_turn
from peers import SGD, Case
from pipelab import Schedule, Trainer, make, run
from pipelab.runtime.torch.ledger import TorchLedger
from pipelab.table.placement import loop_placement

Run = tuple[Case, str, int, int]  # model, schedule, devices, micro-batches


def on_ranks(runs: Sequence[Run], count: int, repeats: int) -> list[list[list[float]]]:
    """Seconds per batch of each run, in turns: ours, torch's, ours again, uncounted, a Trainer's.

    One start of torchrun for each number of devices; all turns are inside the same ranks.
    """
    found: dict[int, Any] = {}
    for devices in dict.fromkeys(one[2] for one in runs):
        config = LaunchConfig(
            1,
            1,
            devices,
            run_id="wire",
            rdzv_backend="c10d",
            rdzv_endpoint="127.0.0.1:0",
            max_restarts=0,
        )
        mine = [one for one in runs if one[2] == devices]
        with _signals_put_back():
            outcomes = elastic_launch(config, _on_this_rank)(mine, count, repeats)
        found[devices] = iter(outcomes[0])
    return [next(found[one[2]]) for one in runs]


@contextmanager
def _signals_put_back() -> Iterator[None]:
    """The launcher handles signals itself, and leaves it so."""
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)


def _on_this_rank(runs: Sequence[Run], count: int, repeats: int) -> list[list[list[float]]]:
    torch.set_num_threads(1)
    found = []
    for one in runs:
        calls = [partial(call, *one, count) for call in (_ours, _theirs, _uncounted, _trained)]
        found.append(in_turn([*calls[:2], calls[0], *calls[2:]], repeats, warm_up=0))
    return found


def _ours(case: Case, name: str, devices: int, microbatches: int, count: int) -> float:
    schedule = _table(name, devices, microbatches, batches=count)
    given = (case.stages(schedule.stages), case.batches(count, microbatches), case.loss, SGD)
    done = run(schedule, *given, check=False)
    return statistics.median(done.timeline.batch_seconds()) if dist.get_rank() == 0 else 0.0


def _uncounted(*sizes: Any) -> float:
    """Ours, but what a forward keeps is not counted: a run always counts it, a Trainer does not."""
    never = property(lambda _: False, lambda *_: None)
    with patch.object(TorchLedger, "counting", never, create=True):
        return _ours(*sizes)


def _trained(case: Case, name: str, devices: int, microbatches: int, count: int) -> float:
    schedule = _table(name, devices, microbatches)
    stages = case.stages(schedule.stages)
    with Trainer(schedule, stages, case.loss, SGD, check=False) as trainer:
        steps = list(trainer.fit(case.batches(count, microbatches)))
        return statistics.median(step.seconds for step in steps[1:])


def _table(name: str, devices: int, microbatches: int, batches: int = 1) -> Schedule:
    virtual = 2 if name == "interleaved" else 1
    return make(name, devices, microbatches, virtual=virtual, batches=batches)


def _theirs(case: Case, name: str, devices: int, microbatches: int, count: int) -> float:
    placement = loop_placement(devices, 2 if name == "interleaved" else 1)
    stages, batches = case.stages(len(placement)), case.batches(count, microbatches)
    options, rank = (name, None, placement), dist.get_rank()
    job = PeerJob("torch", stages, batches, case.loss, SGD, microbatches, False, options, rank)
    every: list[Any] = [None] * devices
    dist.all_gather_object(every, train_rank(job, lambda batch: None).ends)
    ends = map(max, zip(*every, strict=True))
    return statistics.median([b - a for a, b in pairwise(ends)][1:])
