"""What a run is compared with, whichever library computes it: the papers' rules, and the differences that are found.

They share no code with the worker, the stages or the schedule's versions; `rule_of` alone looks at those, to choose a rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelab.action import Reads
from pipelab.schedule import Schedule

TOLERANCE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 3e-2, "float16": 1e-2}

FLUSH = "flush: w(t+1) = w(t) - step(grad f(w(t)))"
STASHING = "weight stashing: w(t+1) = w(t) - step(grad f(w_1(t-n+1), ..., w_n(t)))"
VERTICAL = "vertical sync: w(t+1) = w(t) - step(grad f(w_1(t-n+1), ..., w_n(t-n+1)))"
TABLE = "as its rows say: a forward reads the updates before it in its row"
DOUBLE = "2BW: W(t+1) = W(t) - step(grad f(W(t-1)))"


@dataclass
class Check:
    """The verdict of a run against its reference.

    passed     max_rel <= tolerance
    max_abs    the largest difference of any loss, gradient or weight
    max_rel    the largest max|a - b| / max|b| over those tensors, b the reference; of weights, the change by the update is
               compared. What rounding can do to a tensor that is zero in theory is added to max|b|
    tolerance  by the lowest precision among the weights, unless the caller set it
    rule       the update rule that the reference followed
    worst      the name of the tensor with the largest relative difference
    """

    passed: bool
    max_abs: float
    max_rel: float
    tolerance: float
    rule: str
    worst: str = ""

    def __str__(self) -> str:
        name = self.rule.partition(":")[0]
        if self.passed:
            return f"Check passed: every loss, gradient and weight equals the reference within the tolerance (rule: {name})."
        return (
            f"CHECK FAILED: {self.worst} differs from the reference (rule: {name}) by {self.max_rel:.2g}, "
            f"tolerance {self.tolerance:g}."
        )


class Comparison:
    """Collects the differences of many tensors."""

    def __init__(self) -> None:
        self.max_abs, self.max_rel, self.worst = 0.0, 0.0, ""

    def add(self, name: str, got: np.ndarray, expected: np.ndarray, floor: float = 0.0) -> None:
        """Two arrays of float64 or complex128. `floor` is what rounding alone can make of one that is zero in theory; it is
        added to max|b|."""
        if got.shape != expected.shape:
            difference = relative = math.inf
        elif not got.size:
            return
        else:
            with np.errstate(invalid="ignore"):
                difference = float(np.abs(got - expected).max())
            scale = float(np.abs(expected).max()) + floor
            relative = difference / scale if scale else math.inf if difference else 0.0
        if not (
            math.isfinite(difference) and math.isfinite(relative)
        ):  # nan and inf are never equal
            difference = relative = math.inf
        self.max_abs = max(self.max_abs, difference)
        if relative > self.max_rel:
            self.max_rel, self.worst = relative, name

    def verdict(self, tolerance: float, rule: str) -> Check:
        return Check(
            self.max_rel <= tolerance, self.max_abs, self.max_rel, tolerance, rule, self.worst
        )


def tolerance_for(types: Sequence[str]) -> float:
    """The stated tolerance of the lowest precision among the types of weights and of what is computed in."""
    return max(
        (TOLERANCE[name] for name in types if name in TOLERANCE), default=TOLERANCE["float32"]
    )


def version_read(rule: str, t: int, stage: int, stages: int) -> int:
    """The weight version that `stage` (from 0) reads for update t, as the rule's formula has it; there is none before 0."""
    n, s = stages, stage + 1  # the papers number stages from 1
    return max(0, {FLUSH: t, STASHING: t - n + s, VERTICAL: t - n + 1, DOUBLE: t - 1}[rule])


Reading = list[list[list[int]]]  # [update][piece][stage] -> version


def by_formula(rule: str, updates: int, pieces: int, stages: int) -> Reading:
    """The versions that every update's `pieces` read under one of the papers' rules."""
    return [
        [[version_read(rule, t, s, stages) for s in range(stages)]] * pieces for t in range(updates)
    ]


def by_rows(rows: Sequence[Sequence[Any]], updates: int, stages: int) -> Reading:
    """The same of any table, by micro-batches: the updates that stand before each forward in its row."""
    before: dict[tuple[int, int], int] = {}
    made = [0] * stages
    for row in rows:
        for stage, kind, number in row:
            made[stage] += kind.name == "U"
            if kind.name == "F":
                before[stage, number] = made[stage]
    size = (1 + max(number for _, number in before)) // updates
    return [
        [[before[s, k] for s in range(stages)] for k in range(t * size, (t + 1) * size)]
        for t in range(updates)
    ]


def rule_of(schedule: Schedule) -> str:
    """The paper's rule whose versions are the table's; else the rule that reads them off the rows."""
    updates, n = schedule.updates, schedule.stages
    if not schedule.asynchronous:
        return FLUSH if schedule.per_update == schedule.microbatches else TABLE
    if schedule.per_update in (1, schedule.microbatches):
        meant = {Reads.LATEST: STASHING, Reads.FIRST: VERTICAL, Reads.PREVIOUS: DOUBLE}[
            schedule.reads
        ]
        for rule in (meant, STASHING, VERTICAL, DOUBLE):  # short trainings look alike under several
            formula = [[version_read(rule, t, s, n) for t in range(updates)] for s in range(n)]
            if np.array_equal(np.repeat(formula, schedule.per_update, axis=1), schedule.versions):
                return rule
    if schedule.reads is not Reads.LATEST:
        raise ValueError(
            f"no reference for reads={schedule.reads.name} on this table: run it with check=False"
        )
    return TABLE
