"""Runs for real: launch, faults: python benchmarks/run.py."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from measure import cores, machine, main, one_thread, page, paragraph, spread, table
from pipelab import RunError, make, run

SGD = partial(torch.optim.SGD, lr=0.01)


@dataclass(frozen=True)
class Sizes:
    """How much is measured; the default takes some minutes."""

    devices: tuple[int, ...] = (2, 4)
    launches: int = 4
    parcel: int = 50_000_000  # floats of the transfer in which a rank is killed
    timeout: float = 2.0


def report(repeats: int = 3, sizes: Sizes = Sizes()) -> str:
    """Launch and faults, as a Markdown page."""
    with one_thread():
        return page(
            "# Runs",
            machine("numpy", "torch"),
            paragraph(
                "Every rank computes with one thread (torch.set_num_threads(1)), and there are "
                f"{cores()} cores: more ranks than cores share them, which shows what "
                "contention does, not what a pipeline gains. Messages between processes go "
                "by pipes. Nothing is checked against the reference while it is "
                "timed, unless said otherwise."
            ),
            *_launch(sizes),
            *_faults(repeats, sizes),
        )


# ---- launch


def launches(devices: int, count: int) -> list[float]:
    """Seconds that each of `count` runs on processes takes beyond its makespan."""
    schedule, batch = make("gpipe", devices, 2), (torch.randn(2, 1), torch.randn(2, 1))
    # torch's own layers: `launches_afresh` calls this where the script's classes cannot be pickled.
    stages = [nn.Linear(1, 1) for _ in range(devices)]
    found = []
    for _ in range(count):
        began = time.perf_counter()
        done = run(schedule, stages, [batch], F.mse_loss, SGD, backend="processes", check=False)
        found.append(time.perf_counter() - began - done.timeline.makespan)
    return found


def launches_afresh(devices: int, count: int) -> list[float]:
    """`launches` in a new process: its first run also starts the server that forks the ranks."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(launches, devices, count).result()


def _launch(sizes: Sizes) -> list[str]:
    rows = []
    for p in sizes.devices:
        first, *later = launches_afresh(p, sizes.launches)
        rows.append((p, f"{first:.2f}", spread(later, unit=1)))
    return [
        "## Launch",
        paragraph(
            'Seconds of `run(backend="processes")` that are not its makespan: starting the '
            "ranks, connecting them, sending stages and results, ending. The first run of a "
            "process also starts the server, with torch loaded, that ranks are forked from; "
            f"then the median (fastest to slowest) of the {sizes.launches - 1} following ones."
        ),
        table(("ranks", "first run (s)", "following runs (s)"), rows),
    ]


# ---- faults


class Faulty(nn.Module):
    """A layer that in its second forward writes the time into a file and does `fault`."""

    def __init__(self, clock: str, fault: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.clock = clock
        self.fault = fault
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls != 2:
            return x * self.weight
        note(self.clock)
        result = self.fault(x)
        return result if isinstance(result, Tensor) else x * self.weight


class Large(nn.Module):
    """Outputs `count` floats; its second forward ends its process while the first are under way."""

    def __init__(self, clock: str, count: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.clock = clock
        self.count = count
        self.calls = 0

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


class Fault(NamedTuple):
    """What happens in a second forward; `in_threads` unless it would end the caller's process."""

    happens: Callable[[Tensor], Any]
    in_threads: bool = True


IN_TRANSFER, HANG = "a rank is killed in a transfer", "a rank hangs"
WRONG_SHAPE = "a stage outputs a wrong shape"
FAULTS = {
    "a stage raises": Fault(_raise),
    "a rank is killed in a forward": Fault(_kill, in_threads=False),
    IN_TRANSFER: Fault(_kill, in_threads=False),
    HANG: Fault(lambda x: time.sleep(1000), in_threads=False),
    "a loss is nan": Fault(lambda x: x * math.nan),
    WRONG_SHAPE: Fault(lambda x: x.repeat(1, 2)),
}


def _faulty_stages(name: str, clock: str, sizes: Sizes) -> list[nn.Module]:
    """Two stages. The fault is on the second one, or where its output goes wrong, on the first."""
    if name == IN_TRANSFER:
        return [Large(clock, sizes.parcel), nn.AdaptiveAvgPool1d(4)]
    faulty = Faulty(clock, FAULTS[name].happens)
    if name == WRONG_SHAPE:
        return [nn.Sequential(nn.Linear(4, 4), faulty), nn.Linear(4, 4)]
    return [nn.Linear(4, 4), nn.Sequential(faulty, nn.Linear(4, 4))]


def fault(name: str, backend: str, sizes: Sizes) -> tuple[float, str]:
    """Seconds from a fault to the RunError in the caller, and the error's first line.

    Of a hang they count from the end of its timeout.
    """
    with tempfile.TemporaryDirectory() as folder:
        clock = f"{folder}/clock"
        batch = (torch.ones(8, 4), torch.ones(8, 4))
        try:
            run(
                make("gpipe", 2, 4),
                _faulty_stages(name, clock, sizes),
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
    return late - (sizes.timeout if name == HANG else 0), message


def _faults(repeats: int, sizes: Sizes) -> list[str]:
    rows = []
    for name, each in FAULTS.items():
        for backend in ("processes", "threads") if each.in_threads else ("processes",):
            times, messages = zip(
                *(fault(name, backend, sizes) for _ in range(repeats)), strict=True
            )
            # Without what the stage was given: its shape and type are no part of this.
            message = messages[-1].partition(" (it was given")[0].replace("|", "\\|")
            rows.append((name, backend, spread(times, ".3f", unit=1), message))
    return [
        "## Faults",
        paragraph(
            "Two ranks. Seconds from the fault, which writes its time into a file, to the "
            "RunError in the caller, when all ranks have ended: the median (fastest to "
            f"slowest) of {repeats}. Of a hang: those beyond `timeout={sizes.timeout:g}`. The "
            f"transfer is of {4 * sizes.parcel / 1e6:.0f} MB."
        ),
        table(("fault", "backend", "seconds", "the error"), rows),
    ]


if __name__ == "__main__":
    main(report, "run.md", repeats=3)
