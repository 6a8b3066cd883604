"""What `pipelab bench` measures: whole calls, medians of several, in turn within one process."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pipelab.schedule import Schedule
from pipelab.schedules import make
from pipelab.simulate import simulate


def simulate_report(repeats: int = 5, largest: int = 1_000_000) -> str:
    """Simulation and generation times, beside the tables that torch and DeepSpeed generate, as a Markdown page."""
    lines = [
        "# Simulation speed", "", machine(), "",
        f"Medians of {repeats} calls (fastest to slowest in brackets). Simulating takes a fresh table each time and includes",
        "finding the dependencies and checking the table. Unit costs, no transfer time.", "",
        "| schedule | devices | micro-batches | actions | generate (ms) | simulate (ms) | µs per action |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    sizes = [("pipedream_flush", 16, 256), ("interleaved", 16, 128), ("pipedream_flush", 16, 2048)]
    sizes += [("pipedream_flush", 64, largest // 128)]
    for name, p, m in sizes:
        v = 2 if name == "interleaved" else 1
        schedule = make(name, p, m, virtual=v)
        fresh = iter([replace(schedule) for _ in range(repeats + 1)])
        built, simulated = compare([partial(make, name, p, m, virtual=v), partial(_simulate_next, fresh)], repeats)
        count = schedule.bounds[-1]
        per_action = statistics.median(simulated) / count * 1e6
        lines.append(f"| {name} | {p} | {m} | {count:,} | {_spread(built)} | {_spread(simulated)} | {per_action:.2f} |")
    lines += [
        "",
        "## Generators side by side",
        "",
        "1F1B, 16 devices, 256 micro-batches: every device's list of actions, A B A B.",
        "",
    ]
    lines += ["| generator | ms | ratio to pipelab |", "|---|---|---|"]
    generators = {"pipelab": lambda: make("pipedream_flush", 16, 256)} | _peers(16, 256)
    times = compare(list(generators.values()), repeats)
    ours = statistics.median(times[0])
    for name, t in zip(generators, times, strict=True):
        lines.append(f"| {name} | {_spread(t)} | {statistics.median(t) / ours:.2f} |")
    return "\n".join(lines) + "\n"


def _simulate_next(schedules: Iterator[Schedule]) -> None:
    simulate(next(schedules))


def compare(calls: list[Callable[[], Any]], repeats: int) -> list[list[float]]:
    """Seconds of each call, `repeats` times in turn (A B A B), after one call of each that is not counted."""
    times: list[list[float]] = [[] for _ in calls]
    for turn in range(repeats + 1):
        for call, mine in zip(calls, times, strict=True):
            began = time.perf_counter()
            call()
            if turn:
                mine.append(time.perf_counter() - began)
    return times


def machine() -> str:
    """One line on what this was measured on."""
    packages = []
    for name in ("numpy", "torch", "deepspeed"):
        try:
            packages.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            packages.append(f"no {name}")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    python = f"Python {platform.python_version()}"
    return f"Measured {date.today()} on {platform.machine()}, {cores} cores, {python}, {', '.join(packages)}."


def _spread(times: list[float]) -> str:
    return f"{statistics.median(times) * 1e3:.2f} ({min(times) * 1e3:.2f}-{max(times) * 1e3:.2f})"


def _peers(p: int, m: int) -> dict[str, Callable[[], Any]]:
    """The generators of the peers that are installed. torch's class wants a built stage: its inner function does not."""
    found: dict[str, Callable[[], Any]] = {}
    try:
        from torch.distributed.pipelining.schedules import _get_1f1b_rank_ops
    except ImportError:
        pass
    else:

        def torch_rows() -> list:
            warm = [min(m, 2 * (p - r - 1)) for r in range(p)]
            return [
                _get_1f1b_rank_ops(1, p, w, m - w, w, r, lambda step, r=r: r, lambda step, r=r: r) for r, w in enumerate(warm)
            ]

        found["torch.distributed.pipelining"] = torch_rows
    try:
        from deepspeed.runtime.pipe.schedule import TrainSchedule

        found["DeepSpeed TrainSchedule"] = lambda: [list(TrainSchedule(m, p, r)) for r in range(p)]
    except ImportError:
        pass
    return found
