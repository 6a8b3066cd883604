"""What a run needs to know of its table, whichever library computes it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pipelab.action import Kind
from pipelab.costs import Costs, Recompute
from pipelab.executors.worker import Pace
from pipelab.schedule import Schedule
from pipelab.simulate import delays, durations


def check_table(schedule: Schedule, stages: int, batches: int, training: bool) -> None:
    """ValueError if the table cannot be run with so many stages and batches."""
    if schedule.has_transfers:
        raise ValueError(
            f"{schedule.name} has its transfers written out; run the table without them: executors post their own"
        )
    if stages != schedule.stages:
        raise ValueError(
            f"{stages} modules for the {schedule.stages} stages of {schedule.name}: give one per stage"
        )
    if batches != schedule.batches:
        raise ValueError(
            f"{batches} batches for a table of {schedule.batches}: build the schedule with batches={batches}"
        )
    if training and not schedule.training:
        raise ValueError(f"{schedule.name} has only forwards: use pipelab.evaluate")


def find_partners(
    schedule: Schedule, ties: Sequence[set[int]], clip: float | None
) -> list[list[int]]:
    """Per stage, the stages whose news its updates wait for: all for a common norm, else those with the same tied weights."""
    every = list(range(schedule.stages))
    if clip is not None and not schedule.asynchronous:
        partners = [every for _ in every]
    else:
        partners = [[o for o in every if ties[s] & ties[o]] for s in every]
    for d, row in enumerate(schedule.rows):
        for i, action in enumerate(row):
            later = (
                a
                for a in row[i + 1 :]
                if a.kind in (Kind.B, Kind.W) and a.stage in partners[action.stage]
            )
            if action.kind is Kind.U and any(
                a.microbatch // schedule.per_update == action.microbatch for a in later
            ):
                raise ValueError(
                    f"{'clip' if clip is not None else 'tied weights'}: {action} on device {d} would wait for a stage whose "
                    "backward comes later in its row: put updates after the last backward of the row"
                )
    return partners


def seeds_for(seed: int, stages: int, first: int, last: int) -> np.ndarray:
    """A seed for the forward of every stage and of every piece of data from `first` to `last` - 1: (stages, pieces)."""
    numbers = [
        [np.random.SeedSequence([seed, s, k]).generate_state(1)[0] for k in range(first, last)]
        for s in range(stages)
    ]
    return np.array(numbers, np.int64)


def pace_of(
    schedule: Schedule, unit: float | None, costs: Costs | None, recompute: Recompute
) -> Pace | None:
    if unit is None:
        return None
    if not (isinstance(unit, (int, float)) and 0 < unit < math.inf):
        raise ValueError(f"pace={unit!r}: give the seconds of one cost unit, such as 0.005")
    costs = costs or Costs(recompute=recompute)
    return Pace(durations(schedule, costs) * unit, delays(schedule, costs) * unit)


def later_versions(schedule: Schedule, last: int, begun: int) -> list[list[int]]:
    """Per stage, the versions made before batch `last` that later batches read, numbered from update `begun`."""
    read, made = (
        schedule.versions[:, last * schedule.microbatches :],
        last * schedule.microbatches // schedule.per_update,
    )
    return [sorted({int(v) - begun for v in of_stage if v <= made}) for of_stage in read]
