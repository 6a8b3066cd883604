"""How long it takes to build and to simulate tables: python benchmarks/simulate.py."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from measure import in_turn, machine, main, page, paragraph, spread, table, timed
from pipelab import make, simulate


def report(repeats: int = 5, actions: int = 1_000_000) -> str:
    """Times to build and simulate tables, the largest of `actions` actions, as a Markdown page."""
    sizes = [
        ("pipedream_flush", 16, 64),
        ("pipedream_flush", 16, 256),
        ("interleaved", 16, 128),
        ("pipedream_flush", 16, 4096),
        ("pipedream_flush", 64, actions // 128),
    ]
    return page(
        "# Simulation speed",
        machine("numpy", "torch", "deepspeed"),
        paragraph(
            f"Medians of {repeats} calls (fastest to slowest in brackets). Simulating takes a "
            "fresh table each time and includes finding the dependencies and checking the "
            "table. Unit costs, no transfer time."
        ),
        table(
            (
                "schedule",
                "devices",
                "micro-batches",
                "actions",
                "generate (ms)",
                "simulate (ms)",
                "µs per action",
            ),
            [_row(name, p, m, repeats) for name, p, m in sizes],
        ),
        "## Generators side by side",
        paragraph(
            "1F1B, 16 devices, 256 micro-batches, A B A B: a checked table, and each device's list "
            "of actions from the others."
        ),
        table(("generator", "ms", "ratio to pipelab"), _generators(16, 256, repeats)),
    )


def _row(name: str, p: int, m: int, repeats: int) -> tuple:
    """One table's times. A schedule keeps its dependencies, so each simulation has a new one."""
    build = partial(make, name, p, m, virtual=2 if name == "interleaved" else 1)
    schedule = build()
    fresh = iter([replace(schedule) for _ in range(repeats + 1)])
    calls = build, lambda: simulate(next(fresh))
    built, simulated = in_turn([partial(timed, call) for call in calls], repeats)
    count = schedule.bounds[-1]
    per_action = statistics.median(simulated) / count * 1e6
    return name, p, m, f"{count:,}", spread(built), spread(simulated), f"{per_action:.2f}"


def _generators(p: int, m: int, repeats: int) -> list[tuple[str, str, str]]:
    build = partial(make, "pipedream_flush", p, m)
    generators: dict[str, Callable[[], Any]] = {"pipelab": build} | _peers(p, m)
    times = in_turn([partial(timed, call) for call in generators.values()], repeats)
    ours = statistics.median(times[0])
    return [
        (name, spread(of_one), f"{statistics.median(of_one) / ours:.2f}")
        for name, of_one in zip(generators, times, strict=True)
    ]


def _peers(p: int, m: int) -> dict[str, Callable[[], Any]]:
    """The generators of the peers that are installed."""
    found: dict[str, Callable[[], Any]] = {}
    try:
        # torch's schedule class wants a built stage; this function inside it does not.
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


if __name__ == "__main__":
    main(report, "simulate.md", repeats=5, actions=1_000_000)
