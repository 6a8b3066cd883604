"""The references that every run is checked against: each update rule as its paper writes it, on one device.

They share no code with the worker, the stages or the schedule's versions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}

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

    def add(self, name: str, got: Tensor, expected: Tensor, floor: float = 0.0) -> None:
        """`floor` is what rounding alone can make of a tensor that is zero in theory; it is added to max|b|."""
        if got.shape != expected.shape:
            difference = relative = math.inf
        elif not got.numel():
            return
        else:
            wide = torch.complex128 if expected.is_complex() else torch.float64
            a, b = got.detach().to("cpu", wide), expected.detach().to("cpu", wide)
            difference, scale = float((a - b).abs().max()), float(b.abs().max()) + floor
            relative = difference / scale if scale else math.inf if difference else 0.0
        if not (math.isfinite(difference) and math.isfinite(relative)):  # nan and inf are never equal
            difference = relative = math.inf
        self.max_abs = max(self.max_abs, difference)
        if relative > self.max_rel:
            self.max_rel, self.worst = relative, name

    def verdict(self, tolerance: float, rule: str) -> Check:
        return Check(self.max_rel <= tolerance, self.max_abs, self.max_rel, tolerance, rule, self.worst)


def tolerance_for(stages: Iterable[nn.Module]) -> float:
    """The stated tolerance of the lowest precision among the stages' weights."""
    found = {p.dtype for stage in stages for p in stage.parameters()}
    return max((TOLERANCE.get(dtype, 0.0) for dtype in found), default=TOLERANCE[torch.float32])


def version_read(rule: str, t: int, stage: int, stages: int) -> int:
    """The weight version that `stage` (from 0) reads for update t, as the rule's formula has it; there is none before 0."""
    n, s = stages, stage + 1  # the papers number stages from 1
    return max(0, {FLUSH: t, STASHING: t - n + s, VERTICAL: t - n + 1, DOUBLE: t - 1}[rule])


class Piece(NamedTuple):
    """What one forward and backward of the reference computes: a batch or a part of it, and the version of every stage."""

    x: Any
    y: Any
    reads: list[int]


def by_formula(rule: str, batches: Sequence[tuple[Any, Any]], updates: int, stages: int) -> list[list[Piece]]:
    """The pieces of every update under one of the papers' rules: its data, undivided."""
    data = [part for batch in batches for part in cut(batch, updates // len(batches))]
    return [[Piece(x, y, [version_read(rule, t, s, stages) for s in range(stages)])] for t, (x, y) in enumerate(data)]


def by_rows(rows: Sequence[Sequence[Any]], batches: Sequence[tuple[Any, Any]], updates: int, stages: int) -> list[list[Piece]]:
    """The pieces of every update of any table: micro-batch by micro-batch, with the updates that stand before each forward."""
    before: dict[tuple[int, int], int] = {}
    made = [0] * stages
    for row in rows:
        for stage, kind, number in row:
            made[stage] += kind.name == "U"
            if kind.name == "F":
                before[stage, number] = made[stage]
    total = 1 + max(number for _, number in before)
    data = [part for batch in batches for part in cut(batch, total // len(batches))]
    pieces = [Piece(x, y, [before[s, k] for s in range(stages)]) for k, (x, y) in enumerate(data)]
    size = total // updates
    return [pieces[t * size : (t + 1) * size] for t in range(updates)]


def cut(batch: tuple[Any, Any], count: int) -> list[tuple[Any, Any]]:
    """A batch in `count` parts along dimension 0 of every tensor."""

    def part(k: int) -> Any:
        return pytree.tree_map_only(Tensor, lambda t: t.tensor_split(count)[k] if t.ndim else t, tuple(batch))

    return [part(k) for k in range(count)] if count > 1 else [tuple(batch)]


@torch.enable_grad()
def check(
    rule: str, stages: Sequence[nn.Module], updates: Sequence[list[Piece]], loss: Callable, optimizer: Callable,
    steps: Sequence[list[tuple[dict[str, Tensor], dict[str, Tensor]]]], losses: Sequence[float], tolerance: float,
    clip: float | None = None,
) -> Check:  # fmt: skip
    """Train by the rule and compare, update by update.

    `stages` hold the initial weights and are trained. `steps[stage][t]` are the run's gradients and weights at update t,
    `losses` its losses, one per piece. Every step is checked by itself: the gradient against the reference's own, the new
    weights against the step that the optimizer takes from that same gradient. Steps that start equal and are equal stay
    equal, and an optimizer that divides by a gradient's size cannot blow up rounding where a gradient is zero in theory (a
    key's bias under Adam).
    """
    model, found, of_run = nn.Sequential(*stages), Comparison(), iter(losses)
    trained = [p for p in model.parameters() if p.requires_grad]
    stepper, *others = _as_tuple(optimizer(trained)) if trained else (None,)
    history = [{0: _weights(stage)} for stage in stages]  # per stage, the weights by version
    until = [{p.reads[s]: t for t, pieces in enumerate(updates) for p in pieces} for s in range(len(stages))]  # last use
    for t, pieces in enumerate(updates):
        for p in trained:
            p.grad = None
        total = 0.0
        for piece in pieces:
            for s, stage in enumerate(stages):
                _load(stage, history[s][piece.reads[s]])
            value = loss(model(piece.x), piece.y)
            mean, count = value if isinstance(value, tuple) else (value, _samples(piece))
            if mean.requires_grad and (count or len(pieces) == 1):
                (mean * count if len(pieces) > 1 else mean).backward()
            total += float(count)
            reported = next(of_run)
            if count:
                found.add(f"a loss of update {t}", torch.tensor(reported, dtype=torch.float64), mean)
        for s, stage in enumerate(stages):
            _load(stage, history[s][t])
        for p in trained:
            if p.grad is not None and len(pieces) > 1:
                p.grad /= total or 1.0
        if clip is not None:
            for group in [trained] if rule == FLUSH else [list(stage.parameters()) for stage in stages]:
                nn.utils.clip_grad_norm_(group, clip)
        largest = max((float(p.grad.abs().max()) for p in trained if p.grad is not None), default=0.0)
        for s, stage in enumerate(stages):
            for name, p in stage.named_parameters():
                if p.requires_grad:
                    expected = torch.zeros_like(p) if p.grad is None else p.grad
                    rounding = 16 * torch.finfo(p.dtype).eps * largest / tolerance
                    found.add(f"the gradient of {name} of stage {s} in update {t}", steps[s][t][0][name], expected, rounding)
                    if p.grad is not None:
                        p.grad = steps[s][t][0][name].to(p)
        if stepper is not None:
            stepper.step()
            for scheduler in others:
                scheduler.step()
        for s, stage in enumerate(stages):
            before, history[s][t + 1] = history[s][t], _weights(stage)
            for name, p in stage.named_parameters():
                rounding = 4 * torch.finfo(p.dtype).eps * float(p.detach().abs().max()) / tolerance
                change = steps[s][t][1][name].to(p) - before[name]
                found.add(f"weight {name} of stage {s} after update {t}", change, p - before[name], rounding)
            history[s] = {v: w for v, w in history[s].items() if v == t + 1 or until[s].get(v, -1) > t}
    return found.verdict(tolerance, rule)


def _samples(piece: Piece) -> int:
    return len(next(t for t in pytree.tree_leaves((piece.x, piece.y)) if isinstance(t, Tensor) and t.ndim))


def _as_tuple(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def _weights(stage: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in stage.named_parameters()}


def _load(stage: nn.Module, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, p in stage.named_parameters():
            p.copy_(weights[name])
