"""Simulation speed: `pipelab bench simulate`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from pipelab.bench.measure import compare, machine, spread, table
from pipelab.schedule import Schedule
from pipelab.schedules import make
from pipelab.simulate import simulate


def report(repeats: int = 5, largest: int = 1_000_000) -> str:
    """Simulation and generation times, beside the tables that torch and DeepSpeed generate, as a Markdown page."""
    sizes, rows = (
        [("pipedream_flush", 16, 256), ("interleaved", 16, 128), ("pipedream_flush", 16, 2048)],
        [],
    )
    sizes += [("pipedream_flush", 64, largest // 128)]
    for name, p, m in sizes:
        v = 2 if name == "interleaved" else 1
        schedule = make(name, p, m, virtual=v)
        fresh = iter([replace(schedule) for _ in range(repeats + 1)])
        built, simulated = compare(
            [partial(make, name, p, m, virtual=v), partial(_simulate_next, fresh)], repeats
        )
        count = schedule.bounds[-1]
        per_action = statistics.median(simulated) / count * 1e6
        rows.append(
            (name, p, m, f"{count:,}", spread(built), spread(simulated), f"{per_action:.2f}")
        )
    generators = {"pipelab": lambda: make("pipedream_flush", 16, 256)} | _peers(16, 256)
    times = compare(list(generators.values()), repeats)
    ours = statistics.median(times[0])
    ratios = [
        (name, spread(t), f"{statistics.median(t) / ours:.2f}")
        for name, t in zip(generators, times, strict=True)
    ]
    lines = [
        "# Simulation speed",
        "",
        machine("numpy", "torch", "deepspeed"),
        "",
        f"Medians of {repeats} calls (fastest to slowest in brackets). Simulating takes a fresh table each time and includes",
        "finding the dependencies and checking the table. Unit costs, no transfer time.",
        "",
        *table(
            (
                "schedule",
                "devices",
                "micro-batches",
                "actions",
                "generate (ms)",
                "simulate (ms)",
                "µs per action",
            ),
            rows,
        ),
        "",
        "## Generators side by side",
        "",
        "1F1B, 16 devices, 256 micro-batches: every device's list of actions, A B A B.",
        "",
        *table(("generator", "ms", "ratio to pipelab"), ratios),
    ]
    return "\n".join(lines) + "\n"


def _simulate_next(schedules: Iterator[Schedule]) -> None:
    simulate(next(schedules))


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
                _get_1f1b_rank_ops(1, p, w, m - w, w, r, lambda step, r=r: r, lambda step, r=r: r)
                for r, w in enumerate(warm)
            ]

        found["torch.distributed.pipelining"] = torch_rows
    try:
        from deepspeed.runtime.pipe.schedule import TrainSchedule

        found["DeepSpeed TrainSchedule"] = lambda: [list(TrainSchedule(m, p, r)) for r in range(p)]
    except ImportError:
        pass
    return found
