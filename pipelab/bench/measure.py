"""What the reports share: calls in turn, the machine in one line, tables."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np

from pipelab.action import Kind
from pipelab.timeline import Timeline


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


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine(*packages: str) -> str:
    """One line on what this was measured on, with its load in the minute before."""
    found = []
    for name in packages:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            found.append(f"no {name}")
    if hasattr(os, "getloadavg"):
        found.append(f"load before {os.getloadavg()[0]:.1f}")
    python = f"Python {platform.python_version()}"
    return f"Measured {date.today()} on {platform.machine()}, {cores()} cores, {python}, {', '.join(found)}."


def seconds_per_batch(timeline: Timeline) -> list[float]:
    """Between the ends of consecutive batches' last updates, without the first batch: it warms up."""
    s = timeline.schedule
    updates = timeline.kind == Kind.U
    ends = [timeline.end[updates & (timeline.microbatch == b)].max() for b in range(s.batches)]
    return np.diff(ends).tolist()


def spread(times: Sequence[float]) -> str:
    """Milliseconds: the median, then the fastest and the slowest in brackets."""
    return f"{statistics.median(times) * 1e3:.2f} ({min(times) * 1e3:.2f}-{max(times) * 1e3:.2f})"


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """The lines of a Markdown table."""
    return [
        "| " + " | ".join(map(str, row)) + " |" for row in (header, ["---"] * len(header), *rows)
    ]
