"""What messages between processes cost, torch's runtime beside: python benchmarks/wire.py."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from harness.torch_pipelining import run_torch_pipelining
from measure import (
    cores,
    in_turn,
    machine,
    main,
    one_thread,
    page,
    paragraph,
    spread,
    table,
)
from peers import DEFAULT as PEERS
from peers import SGD, Case, vectors
from pipelab import Trainer, make, run
from ranks import Run, on_ranks


class Sizes(NamedTuple):
    """How much is measured; the default takes some ten minutes."""

    cases: Sequence[Case] = PEERS.cases[:2]
    devices: Sequence[int] = (2, 4)
    schedules: Sequence[str] = ("pipedream_flush", "interleaved")
    microbatches: int = 8
    batches: int = 24
    empty: int = 64  # micro-batches of empty actions
    weights: int = 150  # of a stage with many


DEFAULT = Sizes()


def report(repeats: int = 5, sizes: Sizes = DEFAULT) -> str:
    """Empty actions, and batches beside torch's runtime, as a Markdown page."""
    runs, here = _runs(sizes), machine("torch")
    with one_thread():
        turns = {
            "pipelab": [beside(*one, sizes.batches, repeats) for one in runs],
            "torchrun": on_ranks(runs, sizes.batches, repeats),
        }
        return page(
            "# Messages between processes",
            here,
            paragraph(
                "Every rank computes with one thread. Ranks are processes that pipelab or torchrun "
                "starts; all messages, ours and torch's, go over gloo on loopback. "
                f"There are {cores()} cores: more ranks than cores share them, which shows what "
                "contention does, not what a pipeline gains. A run's time is the median of its "
                f"batches but the first; figures are the median (least-most) of {repeats} runs in "
                "turn."
            ),
            *_empty_actions(repeats, sizes, turns["torchrun"][0]),
            *_beside_torch(runs, turns),
        )


# ---- overhead of an empty action


class Scale(nn.Module):
    """Almost no work: one multiplication by one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class ScaleByMean(nn.Module):
    """The same with the mean of many weights, as many as a stage of a large model has."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(1) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.stack([*self.weights]).mean()


def empty(devices: int, weights: int = 1) -> Case:
    """A model of one such layer a device."""
    layers = partial(_scales, devices, weights)
    return Case(f"empty, {devices} stages", layers, partial(vectors, 1), F.mse_loss, samples=1)


def _scales(count: int, weights: int) -> list[nn.Module]:
    return [Scale() if weights == 1 else ScaleByMean(weights) for _ in range(count)]


def batch_in_a_loop(case: Case, microbatches: int, count: int) -> float:
    """Seconds per batch of the same work in a bare loop, without a pipeline."""
    (model,) = case.stages(1)
    step, seconds = SGD(model.parameters()), []
    for x, y in case.batches(count, microbatches):
        began = time.perf_counter()
        for a, b in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            (case.loss(model(a), b) / microbatches).backward()
        step.step()
        step.zero_grad()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def on_one_core(call: Callable[[], float]) -> Callable[[], float]:
    """The call, whose threads share a core; on Linux."""

    def pinned() -> float:
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(before)})
        try:
            return call()
        finally:
            os.sched_setaffinity(0, before)

    return pinned


def _empty_actions(repeats: int, sizes: Sizes, on_two: Sequence[list[float]]) -> list[str]:
    m, count, name = sizes.empty, sizes.batches, "pipedream_flush"

    def ours(
        devices: int, backend: str, check: bool = False, weights: int = 1
    ) -> Callable[[], float]:
        case = empty(devices, weights)
        return lambda: batch_of_ours(case, name, devices, m, count, backend, check)

    many, of_many = sizes.weights, f", {sizes.weights} weights a stage"
    calls: dict[tuple[str, int], Callable[[], float]] = {
        ("a bare loop without a pipeline", 1): lambda: batch_in_a_loop(empty(1), m, count),
        (f"a bare loop{of_many}", 1): lambda: batch_in_a_loop(empty(1, many), m, count),
        ("a Trainer's threads", 1): lambda: batch_of_trainer(empty(1), name, m, count),
        (f"a Trainer's threads{of_many}", 1): lambda: batch_of_trainer(
            empty(1, many), name, m, count
        ),
        ("threads", 1): ours(1, "threads"),
        (f"threads{of_many}", 1): ours(1, "threads", weights=many),
        ("threads", 2): ours(2, "threads"),
        ("threads, kept for the check", 2): ours(2, "threads", check=True),
        ("threads, all on one core", 2): on_one_core(ours(2, "threads")),
        ("processes", 2): ours(2, "processes"),
        ("processes, kept for the check", 2): ours(2, "processes", check=True),
        ("torch.distributed.pipelining", 2): lambda: batch_of_torch(empty(2), name, 2, m, count),
    }
    found = dict(zip(calls, in_turn(list(calls.values()), repeats, warm_up=0), strict=True))
    ours_on_two, theirs_on_two, again, _, trainers_on_two = on_two
    found["torchrun", 2] = ours_on_two + again
    found["torchrun, a Trainer", 2] = trainers_on_two
    found["torch.distributed.pipelining, torchrun", 2] = theirs_on_two
    actions = 2 * m + 1  # of a row
    return [
        "## Overhead of an empty action",
        paragraph(
            f"Stages that multiply one number by one weight; 1F1B, {m} micro-batches. Microseconds "
            "per action of a rank, a batch's time / (2 m + 1), so with the waiting for the other "
            "rank's messages. `run` counts the memory of every action; a Trainer does not. On one "
            "core the interpreter's lock passes from thread to thread without a wait for another "
            "core to wake."
        ),
        table(
            ("runtime", "ranks", "µs per action"),
            [(*call, spread(s, ".0f", 1e-6 * actions)) for call, s in found.items()],
        ),
    ]


# ---- beside torch's runtime


def batch_of_ours(
    case: Case,
    name: str,
    devices: int,
    microbatches: int,
    count: int,
    backend: str = "processes",
    check: bool = False,
) -> float:
    """Seconds per batch: the median of a run's batches but the first."""
    virtual = 2 if name == "interleaved" else 1
    schedule = make(name, devices, microbatches, virtual=virtual, batches=count)
    given = (case.stages(schedule.stages), case.batches(count, microbatches), case.loss, SGD)
    done = run(schedule, *given, backend=backend, check=check)
    return statistics.median(done.timeline.batch_seconds())


def batch_of_trainer(case: Case, name: str, microbatches: int, count: int) -> float:
    """The same of a Trainer with one device."""
    given = (case.stages(1), case.loss, SGD)
    with Trainer(make(name, 1, microbatches), *given, backend="threads", check=False) as trainer:
        steps = list(trainer.fit(case.batches(count, microbatches)))
        return statistics.median(step.seconds for step in steps[1:])


def batch_of_torch(case: Case, name: str, devices: int, microbatches: int, count: int) -> float:
    """The same of torch.distributed.pipelining."""
    stages = case.stages(devices * (2 if name == "interleaved" else 1))
    given = (stages, case.batches(count, microbatches), case.loss, SGD)
    sizes: dict[str, Any] = {"devices": devices, "microbatches": microbatches}
    done = run_torch_pipelining(name, *given, **sizes, trace=False)
    return statistics.median(done.seconds[1:])


def beside(
    case: Case, name: str, devices: int, microbatches: int, count: int, repeats: int
) -> list[list[float]]:
    """Seconds per batch, in turns of A B A: ours, torch's, and ours again."""
    sizes = (case, name, devices, microbatches, count)

    def ours() -> float:
        return batch_of_ours(*sizes)

    return in_turn([ours, lambda: batch_of_torch(*sizes), ours], repeats, warm_up=0)


def _runs(sizes: Sizes) -> list[Run]:
    runs: list[Run] = [(empty(p), "pipedream_flush", p, sizes.empty) for p in sizes.devices]
    for case in sizes.cases:
        runs += [(case, n, p, sizes.microbatches) for p in sizes.devices for n in sizes.schedules]
    return runs


def _beside_torch(runs: Sequence[Run], started: Mapping[str, Sequence[Any]]) -> list[str]:
    rows = []
    for number, (case, name, devices, m) in enumerate(runs):
        for by, found in started.items():
            ours, theirs, again, *more = found[number]
            turns = list(zip(ours, theirs, again, strict=True))
            ratios = [(a + c) / 2 / b for a, b, c in turns]
            same = [c / a for a, _, c in turns]
            others = [[a / b for a, b in zip(of, theirs, strict=True)] for of in more]
            judged = [spread(of, unit=1) for of in (same, ratios, *others)]
            judged += ["-"] * (4 - len(judged))
            times = spread(ours + again), spread(theirs)
            rows.append((case.name, by, devices, name, m, *times, *judged))
    header = ("model", "started by", "ranks", "schedule", "m", "pipelab (ms)", "torch (ms)")
    return [
        "## Beside torch.distributed.pipelining",
        paragraph(
            "The same layers, cut alike, the same batches, loss and SGD; interleaved has 2 stages "
            "a rank. Milliseconds per batch, in turns of A B A: ours, torch's, ours again. A ratio "
            "is that of one turn, the mean of ours over torch's: below 1, pipelab is faster. A/A "
            "is our second run of a turn over the first: what is noise. Nothing is checked while "
            "it is timed, and torch's runs without hooks. A run counts the memory that every "
            "forward keeps, by hooks; so under torchrun each turn has two more of ours, without "
            "them: the same run, and a Trainer, which also tells all ranks each batch's loss. "
            "Started by pipelab, each run has new processes; by torchrun, all runs are in the same "
            "ones."
        ),
        table((*header, "A/A", "ratio", "uncounted", "a Trainer"), rows),
    ]


if __name__ == "__main__":
    main(report, "wire.md", repeats=5)
