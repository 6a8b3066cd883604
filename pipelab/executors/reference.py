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


def tolerance_for(stages: Iterable[nn.Module], autocast: torch.dtype | None = None) -> float:
    """The stated tolerance of the lowest precision among the stages' weights and what is computed in."""
    found = {p.dtype for stage in stages for p in stage.parameters()} | {autocast}
    return max((TOLERANCE[dtype] for dtype in found if dtype in TOLERANCE), default=TOLERANCE[torch.float32])


def version_read(rule: str, t: int, stage: int, stages: int) -> int:
    """The weight version that `stage` (from 0) reads for update t, as the rule's formula has it; there is none before 0."""
    n, s = stages, stage + 1  # the papers number stages from 1
    return max(0, {FLUSH: t, STASHING: t - n + s, VERTICAL: t - n + 1, DOUBLE: t - 1}[rule])


class Piece(NamedTuple):
    """What one forward and backward of the reference computes: a batch or a part of it.

    reads  the weight version of every stage
    seeds  the random numbers that every stage's forward draws from; None if they draw none
    """

    x: Any
    y: Any
    reads: Sequence[int]
    seeds: Sequence[int] | None = None


Reading = list[list[list[int]]]  # [update][piece][stage] -> version


def by_formula(rule: str, updates: int, pieces: int, stages: int) -> Reading:
    """The versions that every update's `pieces` read under one of the papers' rules."""
    return [[[version_read(rule, t, s, stages) for s in range(stages)]] * pieces for t in range(updates)]


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
    return [[[before[s, k] for s in range(stages)] for k in range(t * size, (t + 1) * size)] for t in range(updates)]


def pieces_of(
    batches: Sequence[tuple[Any, Any]], reading: Reading, seeds: Sequence[Sequence[int]] | None = None
) -> list[list[Piece]]:
    """The pieces of every update: the batches' data in their order, cut into as many parts; `seeds` are [stage][piece]."""
    parts = sum(map(len, reading)) // len(batches)
    data = iter([part for batch in batches for part in cut(batch, parts)])
    drawn = iter(zip(*seeds, strict=True)) if seeds is not None else None
    return [[Piece(*next(data), reads, next(drawn) if drawn else None) for reads in of_update] for of_update in reading]


def cut(batch: tuple[Any, Any], count: int) -> list[tuple[Any, Any]]:
    """A batch in `count` parts along dimension 0 of every tensor."""

    def part(k: int) -> Any:
        return pytree.tree_map_only(Tensor, lambda t: t.tensor_split(count)[k] if t.ndim else t, tuple(batch))

    return [part(k) for k in range(count)] if count > 1 else [tuple(batch)]


class Start(NamedTuple):
    """Where training goes on, per stage: weights by version, optimizer state by name; then hyperparameters and schedulers."""

    weights: Sequence[dict[int, dict[str, Tensor]]]
    optimizer: Sequence[dict[str, dict[str, Any]]]
    groups: list[dict[str, Any]]
    schedulers: list[dict[str, Any]]


class Trainer:
    """Trains stages by a rule on one device, one update at a time."""

    def __init__(
        self, rule: str, stages: Sequence[nn.Module], loss: Callable, optimizer: Callable, clip: float | None = None,
        autocast: torch.dtype | None = None, first: int = 0, start: Start | None = None,
    ) -> None:  # fmt: skip
        self.rule, self.stages, self.loss, self.clip, self.autocast = rule, stages, loss, clip, autocast
        self.trained = [p for p in nn.Sequential(*stages).parameters() if p.requires_grad]  # a tied one once
        self.stepper, *self.schedulers = _as_tuple(optimizer(self.trained)) if self.trained else (None,)
        self.history = [{first: _weights(stage)} for stage in stages]  # per stage, the weights by version
        if start:
            self._resume(start)

    def _resume(self, start: Start) -> None:
        for s, stage in enumerate(self.stages):
            of = dict(stage.named_parameters())
            self.history[s] = {v: {n: t.to(of[n], copy=True) for n, t in w.items()} for v, w in start.weights[s].items()}
            for name, state in start.optimizer[s].items():
                self.stepper.state[of[name]] = {
                    k: v.to("cpu" if k == "step" else of[name].device, copy=True) if isinstance(v, Tensor) else v
                    for k, v in state.items()
                }  # fmt: skip
        for group, saved in zip(self.stepper.param_groups if self.stepper else (), start.groups, strict=True):
            group.update(saved)
        for scheduler, saved in zip(self.schedulers, start.schedulers, strict=True):
            scheduler.load_state_dict(saved)

    @torch.enable_grad()
    def gradients(self, t: int, pieces: Sequence[Piece]) -> list[tuple[Tensor, float]]:
        """Leave the gradient of update t in the weights, which are those of version t; returns (loss, count) per piece."""
        for p in self.trained:
            p.grad = None
        values = []
        for piece in pieces:
            for s, stage in enumerate(self.stages):
                _load(stage, self.history[s][piece.reads[s]])
            mean, count = self._loss(piece)
            if mean.requires_grad and (count or len(pieces) == 1):
                (mean * count if len(pieces) > 1 else mean).backward()
            values.append((mean.detach(), float(count)))
        for s, stage in enumerate(self.stages):
            _load(stage, self.history[s][t])
        total = sum(count for _, count in values) or 1.0
        for p in self.trained:
            if p.grad is not None and len(pieces) > 1:
                p.grad /= total
        if self.clip is not None:
            for group in [self.trained] if self.rule == FLUSH else [list(stage.parameters()) for stage in self.stages]:
                nn.utils.clip_grad_norm_(group, self.clip)
        return values

    def _loss(self, piece: Piece) -> tuple[Tensor, float]:
        x, device = piece.x, next((p.device for p in self.trained), torch.device("cpu"))
        with (
            torch.random.fork_rng([device] if device.type == "cuda" else [], enabled=piece.seeds is not None),
            torch.autocast(device.type, self.autocast, enabled=self.autocast is not None),
        ):
            for s, stage in enumerate(self.stages):
                if piece.seeds is not None:
                    torch.manual_seed(piece.seeds[s])
                x = stage(x)
            value = self.loss(x, piece.y)
        return value if isinstance(value, tuple) else (value, _samples(piece))

    def step(self, t: int) -> None:
        """Make version t + 1."""
        if self.stepper is not None:
            self.stepper.step()
            for scheduler in self.schedulers:
                scheduler.step()
        for s, stage in enumerate(self.stages):
            self.history[s][t + 1] = _weights(stage)

    def forget(self, needed: Sequence[set[int]]) -> None:
        """Drop the versions that are not among the needed ones of their stage."""
        self.history = [{v: w for v, w in of.items() if v in keep} for of, keep in zip(self.history, needed, strict=True)]


def check(
    trainer: Trainer, updates: Sequence[list[Piece]], steps: Sequence[list[tuple[dict[str, Tensor], dict[str, Tensor]]]],
    losses: Sequence[float], tolerance: float, first: int = 0,
) -> Check:  # fmt: skip
    """Train by the rule and compare, update by update, from update `first` on.

    `steps[stage][i]` are the run's gradients and weights at update first + i, `losses` its losses, one per piece. Every step
    is checked by itself: the gradient against the reference's own, the new weights against the step that the optimizer takes
    from that same gradient. Steps that start equal and are equal stay equal, and an optimizer that divides by a gradient's
    size cannot blow up rounding where a gradient is zero in theory (a key's bias under Adam).
    """
    found, of_run, stages = Comparison(), iter(losses), trainer.stages
    for i, pieces in enumerate(updates):
        t = first + i
        for mean, count in trainer.gradients(t, pieces):
            reported = next(of_run)
            if count:
                found.add(f"a loss of update {t}", torch.tensor(reported, dtype=torch.float64), mean)
        largest = max((float(p.grad.abs().max()) for p in trainer.trained if p.grad is not None), default=0.0)
        for s, stage in enumerate(stages):
            for name, p in stage.named_parameters():
                if p.requires_grad:
                    expected = torch.zeros_like(p) if p.grad is None else p.grad
                    rounding = 16 * torch.finfo(p.dtype).eps * largest / tolerance
                    found.add(f"the gradient of {name} of stage {s} in update {t}", steps[s][i][0][name], expected, rounding)
        for s, stage in enumerate(stages):  # after all are compared: tied weights have one gradient
            for name, p in stage.named_parameters():
                if p.requires_grad and p.grad is not None:
                    p.grad = steps[s][i][0][name].to(p)
        trainer.step(t)
        for s, stage in enumerate(stages):
            for name, p in stage.named_parameters():
                before = trainer.history[s][t][name]
                rounding = 4 * torch.finfo(p.dtype).eps * float(p.detach().abs().max()) / tolerance
                change = steps[s][i][1][name].to(p) - before
                found.add(f"weight {name} of stage {s} after update {t}", change, p - before, rounding)
        ahead = [piece.reads for later in updates[i + 1 :] for piece in later]
        trainer.forget([{t + 1, *(reads[s] for reads in ahead)} for s in range(len(stages))])
    return found.verdict(tolerance, trainer.rule)


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
