"""Launching runs for real: python benchmarks/run.py."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F

from measure import cores, machine, main, one_thread, page, paragraph, spread, table
from pipelab import make, run

SGD = partial(torch.optim.SGD, lr=0.01)


def report(repeats: int = 3, devices: Sequence[int] = (2, 4)) -> str:
    """Launch, as a Markdown page."""
    with one_thread():
        return page(
            "# Runs",
            machine("numpy", "torch"),
            paragraph(
                "Every rank computes with one thread (torch.set_num_threads(1)), and there are "
                f"{cores()} cores: more ranks than cores share them, which shows what "
                "contention does, not what a pipeline gains. Messages between processes go "
                "by pipes. Nothing is checked while it is "
                "timed, unless said otherwise."
            ),
            *_launch(repeats, devices),
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


def _launch(repeats: int, devices: Sequence[int]) -> list[str]:
    rows = []
    for p in devices:
        first, *later = launches_afresh(p, 1 + repeats)
        rows.append((p, f"{first:.2f}", spread(later, unit=1)))
    return [
        "## Launch",
        paragraph(
            'Seconds of `run(backend="processes")` that are not its makespan: starting the '
            "ranks, connecting them, sending stages and results, ending. The first run of a "
            "process also starts the server, with torch loaded, that ranks are forked from; "
            f"then the median (fastest to slowest) of the {repeats} following ones."
        ),
        table(("ranks", "first run (s)", "following runs (s)"), rows),
    ]


if __name__ == "__main__":
    main(report, "run.md", repeats=3)
