"""Runs for real: beside torch's runtime, an action's overhead, launch, faults, predictions: `pipelab bench run`."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipelab.bench.measure import cores, machine, seconds_per_batch, spread, table
from pipelab.executors.run import run
from pipelab.executors.worker import RunError
from pipelab.explain import CAUSES, explain
from pipelab.fit import fit
from pipelab.models import mlp, split
from pipelab.partition import uniform
from pipelab.peers.torch_pipelining import run_torch_pipelining
from pipelab.schedule import Schedule
from pipelab.schedules import make
from pipelab.simulate import simulate
from pipelab.timeline import Timeline

SGD = partial(torch.optim.SGD, lr=0.01)
SCHEDULES = ("gpipe", "pipedream_flush", "interleaved")


class Model(NamedTuple):
    """An MLP of `layers` layers of `width`, and the samples of one micro-batch."""

    name: str
    width: int
    samples: int
    layers: int = 8

    def stages(self, count: int) -> list[nn.Sequential]:
        torch.manual_seed(0)
        return split(mlp(self.layers, self.width), uniform(self.layers, count))

    def batches(self, count: int, microbatches: int) -> list[tuple[Tensor, Tensor]]:
        torch.manual_seed(1)
        shape = (self.samples * microbatches, self.width)
        return [(torch.randn(shape), torch.randn(shape)) for _ in range(count)]


@dataclass(frozen=True)
class Sizes:
    """How much is measured; the default takes some minutes."""

    models: tuple[Model, ...] = (Model("large", 512, 64), Model("small", 32, 8))
    devices: tuple[int, ...] = (2, 4)
    microbatches: int = 8
    batches: int = 6
    empty: int = 64  # micro-batches of empty actions
    launches: int = 4
    parcel: int = 50_000_000  # floats of the transfer in which a rank is killed
    timeout: float = 2.0


def report(repeats: int = 3, sizes: Sizes = Sizes()) -> str:
    """All sections as a Markdown page."""
    with _one_thread():
        lines = [
            "# Runs",
            "",
            machine("numpy", "torch"),
            "",
            f"Every rank computes with one thread (torch.set_num_threads(1)), and there are {cores()} cores: more ranks",
            "than cores share them, which shows what contention does, not what a pipeline gains. Messages between processes go",
            "over gloo and loopback. Nothing is checked against the reference while it is timed, unless said otherwise.",
            "",
            *_beside_torch(repeats, sizes),
            *_empty_actions(repeats, sizes),
            *_launch(sizes),
            *_faults(repeats, sizes),
            *_predictions(repeats, sizes),
        ]
    return "\n".join(lines).rstrip() + "\n"


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---- beside torch.distributed.pipelining


class Beside(NamedTuple):
    """Seconds per batch of pipelab's processes and threads, and of torch's processes."""

    name: str
    devices: int
    model: str
    processes: list[float]
    threads: list[float]
    torch: list[float]


def beside_torch(name: str, devices: int, model: Model, sizes: Sizes, repeats: int) -> Beside:
    """The same model, split, schedule and batches, `repeats` times in turn."""
    v, m = 2 if name == "interleaved" else 1, sizes.microbatches
    stages, batches = model.stages(devices * v), model.batches(sizes.batches, m)
    schedule = make(name, devices, m, virtual=v, batches=sizes.batches)
    found = Beside(name, devices, model.name, [], [], [])
    for _ in range(repeats):
        for backend, times in (("processes", found.processes), ("threads", found.threads)):
            ours = run(schedule, stages, batches, F.mse_loss, SGD, backend=backend, check=False)
            times += seconds_per_batch(ours.timeline)
        theirs = run_torch_pipelining(
            name, stages, batches, F.mse_loss, SGD, devices=devices, microbatches=m
        )
        found.torch.extend(theirs.seconds[1:])
    return found


def _ratio(ours: list[float], theirs: list[float]) -> str:
    return (
        f"{statistics.median(ours) / statistics.median(theirs):.2f} ({min(ours) / min(theirs):.2f})"
    )


def _beside_torch(repeats: int, sizes: Sizes) -> list[str]:
    rows = []
    for model in sizes.models:
        for p in sizes.devices:
            for name in SCHEDULES:
                x = beside_torch(name, p, model, sizes, repeats)
                ratios = [_ratio(t, x.torch) for t in (x.processes, x.threads)]
                rows.append(
                    (model.name, p, name, *map(spread, (x.processes, x.threads, x.torch)), *ratios)
                )
    shapes = "; ".join(
        f"{x.name}: {x.layers} layers of {x.width}, {x.samples} samples a micro-batch"
        for x in sizes.models
    )
    return [
        "## Beside torch.distributed.pipelining",
        "",
        f"An MLP ({shapes}),",
        f"float32, {sizes.microbatches} micro-batches, MSE, SGD; interleaved has 2 stages a rank. Milliseconds per batch, by",
        "one rule for all: from the end of one batch's last update to the end of the next one's, without the first batch.",
        f"The median (fastest to slowest) of {repeats} runs of {sizes.batches} batches each, in turn A B C A B C. Ratios",
        "are of medians (of the fastest batches): below 1, pipelab is faster.",
        "",
        *table(
            (
                "model",
                "ranks",
                "schedule",
                "processes (ms)",
                "threads (ms)",
                "torch, processes (ms)",
                "processes / torch",
                "threads / torch",
            ),
            rows,
        ),
        "",
    ]


# ---- overhead of an empty action


class Scale(nn.Module):
    """Next to nothing: one multiplication by one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def empty_actions(devices: int, microbatches: int, how: str, check: bool = False) -> float:
    """Seconds per action of a device when actions do nothing: makespan / actions of a row. `how`: a backend, or torch."""
    stages, count = [Scale() for _ in range(devices)], 4
    batches = [(torch.randn(microbatches, 1), torch.randn(microbatches, 1)) for _ in range(count)]
    row = 2 * microbatches + 1
    if how == "torch":
        arguments = ("pipedream_flush", stages, batches, F.mse_loss, SGD)
        seconds = run_torch_pipelining(
            *arguments, devices=devices, microbatches=microbatches
        ).seconds
        return statistics.median(seconds[1:]) / row
    if how == "loop":
        return _plain_loop(batches, microbatches) / row
    schedule = make("pipedream_flush", devices, microbatches, batches=count)
    done = run(schedule, stages, batches, F.mse_loss, SGD, backend=how, check=check)
    return statistics.median(seconds_per_batch(done.timeline)) / row


def _plain_loop(batches: Sequence[tuple[Tensor, Tensor]], microbatches: int) -> float:
    """Seconds per batch of the same actions in a bare loop, without a pipeline."""
    model, seconds = Scale(), []
    step = SGD(model.parameters())
    for x, y in batches:
        began = time.perf_counter()
        for a, b in zip(x.chunk(microbatches), y.chunk(microbatches), strict=True):
            (F.mse_loss(model(a), b) / microbatches).backward()
        step.step()
        step.zero_grad()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def _empty_actions(repeats: int, sizes: Sizes) -> list[str]:
    cases: list[tuple[str, str, bool, int]] = [
        ("a bare loop without a pipeline", "loop", False, 1),
        ("threads", "threads", False, 1),
        ("threads", "threads", False, 2),
        ("threads, kept for the check", "threads", True, 2),
        ("processes", "processes", False, 2),
        ("processes, kept for the check", "processes", True, 2),
        ("torch.distributed.pipelining", "torch", False, 2),
    ]
    times: list[list[float]] = [[] for _ in cases]
    for _ in range(repeats):
        for (_, how, check, devices), mine in zip(cases, times, strict=True):
            mine.append(empty_actions(devices, sizes.empty, how, check) * 1e6)
    rows = [
        (title, devices, f"{statistics.median(mine):.0f} ({min(mine):.0f}-{max(mine):.0f})")
        for (title, _, _, devices), mine in zip(cases, times, strict=True)
    ]
    return [
        "## Overhead of an empty action",
        "",
        f"Stages that multiply one number by one weight; 1F1B, {sizes.empty} micro-batches. Microseconds per action of a rank,",
        "a batch's time / (2 m + 1), so with the waiting for the other rank's messages: the median over a run's batches but",
        f"the first, then the median (fastest to slowest) of {repeats} runs in turn.",
        "",
        *table(("runtime", "ranks", "µs per action"), rows),
        "",
    ]


# ---- launch


def launches(devices: int, count: int) -> list[float]:
    """Seconds of each of `count` runs on processes that are not the run itself: starting, connecting, bringing results."""
    schedule, batch = make("gpipe", devices, 2), (torch.randn(2, 1), torch.randn(2, 1))
    found = []
    for _ in range(count):
        began = time.perf_counter()
        done = run(
            schedule,
            [Scale() for _ in range(devices)],
            [batch],
            F.mse_loss,
            SGD,
            backend="processes",
            check=False,
        )
        found.append(time.perf_counter() - began - done.timeline.makespan)
    return found


def launches_afresh(devices: int, count: int) -> list[float]:
    """`launches` in a new process, so that the first one also starts the server that later ranks are forked from."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(launches, devices, count).result()


def _launch(sizes: Sizes) -> list[str]:
    rows = []
    for p in sizes.devices:
        first, *later = launches_afresh(p, sizes.launches)
        rows.append(
            (
                p,
                f"{first:.2f}",
                f"{statistics.median(later):.2f} ({min(later):.2f}-{max(later):.2f})",
            )
        )
    return [
        "## Launch",
        "",
        'Seconds of `run(backend="processes")` that are not its makespan: starting the ranks, connecting them, sending stages',
        "and results, ending. The first run of a process also starts the server, with torch loaded, that ranks are forked",
        f"from; then the median (fastest to slowest) of the {sizes.launches - 1} following ones.",
        "",
        *table(("ranks", "first run (s)", "following runs (s)"), rows),
        "",
    ]


# ---- faults


class Faulty(nn.Module):
    """A layer that does `fault` in its second forward, after it has written the time into a file."""

    def __init__(self, clock: str, fault: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.clock, self.fault, self.calls = (
            nn.Parameter(torch.ones(1)),
            clock,
            fault,
            0,
        )

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls != 2:
            return x * self.weight
        note(self.clock)
        made = self.fault(x)
        return made if isinstance(made, Tensor) else x * self.weight


class Large(nn.Module):
    """Puts out `count` floats; in its second forward, while the first output is on its way, it kills its process."""

    def __init__(self, clock: str, count: int) -> None:
        super().__init__()
        self.weight, self.clock, self.count, self.calls = (
            nn.Parameter(torch.ones(1)),
            clock,
            count,
            0,
        )

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 2:
            time.sleep(0.02)
            note(self.clock)
            _kill(x)
        return self.weight.expand(len(x), self.count // len(x))


def note(clock: str) -> None:
    """Write the time into a file."""
    Path(clock).write_text(repr(time.time()))


def _raise(x: Tensor) -> None:
    raise ZeroDivisionError("by design")


def _kill(x: Tensor) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS: dict[str, Callable[[Tensor], Any]] = {
    "a stage raises": _raise,
    "a rank is killed in a forward": _kill,
    "a rank is killed in a transfer": _kill,  # by Large
    "a rank hangs": lambda x: time.sleep(1000),
    "a loss is nan": lambda x: x * math.nan,
    "a stage puts out a wrong shape": lambda x: x.repeat(1, 2),
}


def fault(name: str, backend: str, sizes: Sizes) -> tuple[float, str]:
    """Seconds from a fault (of a hang: from the end of its timeout) to the RunError in the caller, and what that says."""
    with tempfile.TemporaryDirectory() as folder:
        clock = f"{folder}/clock"
        sick: nn.Module = Faulty(clock, FAULTS[name])
        sane: list[nn.Module] = [nn.Linear(4, 4), nn.Linear(4, 4)]
        stages = (
            [sane[0], nn.Sequential(sick, sane[1])]
            if "shape" not in name
            else [nn.Sequential(sane[0], sick), sane[1]]
        )
        if "transfer" in name:
            stages = [Large(clock, sizes.parcel), nn.AdaptiveAvgPool1d(4)]
        batch = (torch.ones(8, 4), torch.ones(8, 4))
        try:
            run(
                make("gpipe", 2, 4),
                stages,
                [batch],
                F.mse_loss,
                SGD,
                backend=backend,
                check=False,
                timeout=sizes.timeout,
            )
        except RunError as error:
            caught, message = time.time(), str(error).splitlines()[0]
        else:
            raise AssertionError(f"{name}: the run ended as if nothing had happened")
        late = caught - float(Path(clock).read_text())
    return late - (sizes.timeout if "hangs" in name else 0), message


def _faults(repeats: int, sizes: Sizes) -> list[str]:
    rows = []
    for name in FAULTS:
        for backend in ("processes", "threads"):
            if backend == "threads" and ("killed" in name or "hangs" in name):
                continue  # it would be the caller's own process
            found = [fault(name, backend, sizes) for _ in range(repeats)]
            times = [seconds for seconds, _ in found]
            message = found[-1][1].partition(" (it was given")[0].replace("|", "\\|")
            rows.append(
                (
                    name,
                    backend,
                    f"{statistics.median(times):.3f} ({min(times):.3f}-{max(times):.3f})",
                    message,
                )
            )
    return [
        "## Faults",
        "",
        "Two ranks. Seconds from the fault, which writes its time into a file, to the RunError in the caller, when all ranks",
        f"have ended: the median (fastest to slowest) of {repeats}. Of a hang: those beyond `timeout={sizes.timeout:g}`. The",
        f"transfer is of {4 * sizes.parcel / 1e6:.0f} MB.",
        "",
        *table(("fault", "backend", "seconds", "the error"), rows),
        "",
    ]


# ---- predictions


class Prediction(NamedTuple):
    """Makespans, and what `explain` says of the gap: seconds by cause."""

    predicted: float
    measured: float
    causes: dict[str, float]

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def predict(
    backend: str, devices: int, model: Model, sizes: Sizes
) -> dict[tuple[str, int], Prediction]:
    """Costs fitted on one run of GPipe predict the runs of other tables."""
    m, k = sizes.microbatches, sizes.batches

    def measure(schedule: Schedule) -> Timeline:
        stages, batches = model.stages(schedule.stages), model.batches(k, schedule.microbatches)
        return run(
            schedule, stages, batches, F.mse_loss, SGD, backend=backend, check=False
        ).timeline

    costs, found = fit(measure(make("gpipe", devices, m, batches=k))), {}
    for name, count in (
        ("gpipe", m),
        ("gpipe", 2 * m),
        ("pipedream_flush", m),
        ("pipedream_flush", 2 * m),
        ("interleaved", m),
    ):
        v = 2 if name == "interleaved" else 1
        schedule = make(name, devices, count, virtual=v, batches=k)
        predicted, measured = simulate(schedule, costs.split(v)), measure(schedule)
        explained = explain(predicted, measured)
        found[name, count] = Prediction(predicted.makespan, measured.makespan, explained.causes)
    return found


def _predictions(repeats: int, sizes: Sizes) -> list[str]:
    model, rows = sizes.models[0], []
    cases = [(sizes.devices[0], "threads"), *((p, "processes") for p in sizes.devices)]
    for devices, backend in cases:
        turns = [predict(backend, devices, model, sizes) for _ in range(repeats)]
        for name, m in turns[0]:
            found = [turn[name, m] for turn in turns]
            errors = [100 * x.error for x in found]
            causes = [
                f"{statistics.median(100 * x.causes[c] / x.measured for x in found):+.1f}"
                for c in CAUSES
            ]
            middle = [
                f"{statistics.median(x) * 1e3:.0f}"
                for x in zip(*((x.predicted, x.measured) for x in found), strict=True)
            ]
            error = f"{statistics.median(errors):+.1f} ({min(errors):+.1f} to {max(errors):+.1f})"
            rows.append((devices, backend, name, m, *middle, error, *causes))
    return [
        "## Predictions",
        "",
        f"Costs fitted (`pipelab.fit`) on one run of GPipe, {sizes.batches} batches of {sizes.microbatches} micro-batches of",
        f"the {model.name} model, predict others; interleaved: split in two (`Costs.split`). Medians of {repeats} fits and",
        "runs: makespans in ms, with the first batch, which warms up; the error in percent of the measured makespan, with its",
        "range (below 0: the run took longer); then `pipelab.explain`'s causes of the gap, in percent of the same.",
        "",
        *table(
            ("ranks", "backend", "schedule", "m", "predicted", "measured", "error (%)", *CAUSES),
            rows,
        ),
        "",
    ]
