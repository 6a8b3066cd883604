"""What messages between processes cost, torch's runtime beside: python benchmarks/wire.py."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
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
from pipelab import make, run
from pipelab.runtime.torch.pipes import Pipe
from ranks import Run, on_ranks

KIB = 1024


class Sizes(NamedTuple):
    """How much is measured; the default takes some ten minutes."""

    cases: Sequence[Case] = PEERS.cases[:2]
    devices: Sequence[int] = (2, 4)
    schedules: Sequence[str] = ("pipedream_flush", "interleaved")
    microbatches: int = 8
    batches: int = 24
    empty: int = 64  # micro-batches of empty actions
    messages: Sequence[int] = (1, 64, 1024, 8192)  # KiB, beside those of the cases
    rounds: int = 100


DEFAULT = Sizes()


def report(repeats: int = 5, sizes: Sizes = DEFAULT) -> str:
    """Empty actions, batches beside torch's runtime, and shared memory, as a Markdown page."""
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
                "Every rank computes with one thread. Ranks are processes that pipelab starts, "
                "whose messages go by pipes and torch's over gloo, on loopback; or torchrun's, "
                "where both go over gloo. "
                f"There are {cores()} cores: more ranks than cores share them, which shows what "
                "contention does, not what a pipeline gains. A run's time is the median of its "
                f"batches but the first; figures are the median (least-most) of {repeats} runs in "
                "turn."
            ),
            *_empty_actions(repeats, sizes, turns["torchrun"][0]),
            *_beside_torch(runs, turns),
            *_shared_memory(repeats, sizes),
        )


# ---- overhead of an empty action


class Scale(nn.Module):
    """Almost no work: one multiplication by one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def empty(devices: int) -> Case:
    """A model of one such layer a device."""
    layers = partial(_scales, devices)
    return Case(f"empty, {devices} stages", layers, partial(vectors, 1), F.mse_loss, samples=1)


def _scales(count: int) -> list[nn.Module]:
    return [Scale() for _ in range(count)]


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


def _empty_actions(repeats: int, sizes: Sizes, on_two: Sequence[list[float]]) -> list[str]:
    m, count, name = sizes.empty, sizes.batches, "pipedream_flush"

    def ours(devices: int, backend: str, check: bool = False) -> Callable[[], float]:
        return lambda: batch_of_ours(empty(devices), name, devices, m, count, backend, check)

    calls: dict[tuple[str, int], Callable[[], float]] = {
        ("a bare loop without a pipeline", 1): lambda: batch_in_a_loop(empty(1), m, count),
        ("threads", 1): ours(1, "threads"),
        ("threads", 2): ours(2, "threads"),
        ("threads, kept for the check", 2): ours(2, "threads", check=True),
        ("processes", 2): ours(2, "processes"),
        ("processes, kept for the check", 2): ours(2, "processes", check=True),
        ("torch.distributed.pipelining", 2): lambda: batch_of_torch(empty(2), name, 2, m, count),
    }
    found = dict(zip(calls, in_turn(list(calls.values()), repeats, warm_up=0), strict=True))
    ours_on_two, theirs_on_two, again = on_two
    found["torchrun", 2] = ours_on_two + again
    found["torch.distributed.pipelining, torchrun", 2] = theirs_on_two
    actions = 2 * m + 1  # of a row
    return [
        "## Overhead of an empty action",
        paragraph(
            f"Stages that multiply one number by one weight; 1F1B, {m} micro-batches. Microseconds "
            "per action of a rank, a batch's time / (2 m + 1), so with the waiting for the other "
            "rank's messages."
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
            ours, theirs, again = found[number]
            turns = list(zip(ours, theirs, again, strict=True))
            ratios = [(a + c) / 2 / b for a, b, c in turns]
            same = [c / a for a, _, c in turns]
            times = spread(ours + again), spread(theirs)
            judged = spread(ratios, unit=1), spread(same, unit=1)
            rows.append((case.name, by, devices, name, m, *times, *judged))
    header = ("model", "started by", "ranks", "schedule", "m", "pipelab (ms)", "torch (ms)")
    return [
        "## Beside torch.distributed.pipelining",
        paragraph(
            "The same layers, cut alike, the same batches, loss and SGD; interleaved has 2 stages "
            "a rank. Milliseconds per batch, in turns of A B A: ours, torch's, ours again. A ratio "
            "is that of one turn, the mean of ours over torch's: below 1, pipelab is faster. A/A "
            "is our second run of a turn over the first: what is noise. Nothing is checked while "
            "it is timed, and torch's runs without hooks. Started by pipelab, each run has new "
            "processes; by torchrun, all runs are in the same ones, and pipelab's messages go over "
            "gloo too."
        ),
        table((*header, "ratio", "A/A"), rows),
    ]


# ---- shared memory


class Shared:
    """An end of two buffers in shared memory, one each way; a byte by pipes says: it is full.

    copied  whether a reader takes a copy, so that the next message may come while it is used
    """

    def __init__(
        self, reader: Connection, writer: Connection, mine: Tensor, others: Tensor, copied: bool
    ) -> None:
        self.reader, self.writer = reader, writer
        self.mine, self.others, self.copied = mine, others, copied

    def write(self, message: Tensor) -> None:
        self.mine.copy_(message)
        self.writer.send_bytes(b"!")

    def read(self) -> Tensor:
        self.reader.recv_bytes()
        return self.others.clone() if self.copied else self.others


def seconds_one_way(how: str, size: int, rounds: int) -> float:
    """Half of a round trip between two processes, for a tensor of `size` bytes: the median."""
    message, there, back = (torch.zeros(size // 4).share_memory_() for _ in range(3))
    (at_near, from_far), (at_far, from_near) = (multiprocessing.Pipe(False) for _ in range(2))
    of_near, of_far = (at_near, from_near), (at_far, from_far)
    far: Callable[[], Any]
    if how == "pipe":
        far = partial(Pipe, *of_far)
    else:
        copied = how == "shared memory, copied out"
        far = partial(Shared, *of_far, back, there, copied)
    other = multiprocessing.get_context("fork").Process(target=_echo, args=(far, rounds))
    other.start()
    # A pipe has a thread, which a process that is forked later would not have.
    near: Any
    near = Pipe(*of_near) if how == "pipe" else Shared(*of_near, there, back, copied)
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        near.write(message)
        near.read()
        seconds.append((time.perf_counter() - began) / 2)
    other.join()
    for end in (*of_near, *of_far):
        end.close()
    return statistics.median(seconds)


def _echo(make_end: Callable[[], Any], rounds: int) -> None:
    end = make_end()
    for _ in range(rounds):
        end.write(end.read())


WAYS = ("pipe", "shared memory, copied out", "shared memory, used in place")


def _shared_memory(repeats: int, sizes: Sizes) -> list[str]:
    m, count = sizes.microbatches, sizes.batches
    messages = {case.batch(case.samples)[0].nbytes: case for case in sizes.cases}
    rows = []
    for size in sorted({*messages, *(kib * KIB for kib in sizes.messages)}):
        calls = [partial(seconds_one_way, how, size, sizes.rounds) for how in WAYS]
        case = messages.get(size)
        if case:
            calls.append(partial(batch_of_ours, case, "pipedream_flush", 2, m, count))
        found = in_turn(calls, repeats, warm_up=0)
        by_pipe, copied = found[:2]
        saved = [a - b for a, b in zip(by_pipe, copied, strict=True)]
        share = f"{2 * m * statistics.median(saved) / statistics.median(found[-1]):.1%}"
        rows.append(
            (
                f"{size / KIB:g} KiB",
                *(spread(seconds, ".0f", 1e-6) for seconds in found[: len(WAYS)]),
                f"{size / statistics.median(by_pipe) / 1e9:.2f}",
                spread(saved, ".0f", 1e-6),
                f"{share} ({case.name})" if case else "",
            )
        )
    ways = [f"{how} (µs)" for how in WAYS]
    return [
        "## Shared memory",
        paragraph(
            "What would it give between processes of one machine? Half of a round trip of a "
            f"tensor, the median of {sizes.rounds}: by our pipe, pickle and all; through a "
            "buffer in shared memory, of which a byte by another pipe says that it is full, and "
            "which the reader copies out; and without that copy, where the sender must not write "
            "again before the reader is done with it. Saved: copied out against the pipe. Its "
            f"share of a batch is the most that it can be: 2 m messages of 1F1B on two ranks, m = "
            f"{m}, as if every one was waited for."
        ),
        table(("message", *ways, "pipe (GB/s)", "saved (µs)", "share of a batch"), rows),
        paragraph(DECISION),
    ]


DECISION = (
    "Not adopted. The share is a bound: messages that come before they are waited for cost a rank "
    "no time but their reading. The byte that wakes the reader stays, and part of what is saved on "
    "a small message is its pickle, which a fixed header would save in a pipe too. Buffers in "
    "shared memory would need an owner, a count of their readers and somebody who removes them "
    "when a rank is killed."
)


if __name__ == "__main__":
    main(report, "wire.md", repeats=5)
