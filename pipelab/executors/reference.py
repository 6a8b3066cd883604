"""The references that every run is checked against: each update rule as its paper writes it, on one device.

They share no code with the worker, the stages or the schedule's versions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.executors.rules import FLUSH, Check, Comparison, Reading


class Piece(NamedTuple):
    """What one forward and backward of the reference computes: a batch or a part of it.

    reads  the weight version of every stage
    seeds  the random numbers that every stage's forward draws from; None if they draw none
    """

    x: Any
    y: Any
    reads: Sequence[int]
    seeds: Sequence[int] | None = None


def pieces_of(
    batches: Sequence[tuple[Any, Any]],
    reading: Reading,
    seeds: Sequence[Sequence[int]] | None = None,
) -> list[list[Piece]]:
    """The pieces of every update: the batches' data in their order, cut into as many parts; `seeds` are [stage][piece]."""
    parts = sum(map(len, reading)) // len(batches)
    data = iter([part for batch in batches for part in cut(batch, parts)])
    drawn = iter(zip(*seeds, strict=True)) if seeds is not None else None
    return [
        [Piece(*next(data), reads, next(drawn) if drawn else None) for reads in of_update]
        for of_update in reading
    ]


def cut(batch: tuple[Any, Any], count: int) -> list[tuple[Any, Any]]:
    """A batch in `count` parts along dimension 0 of every tensor."""

    def part(k: int) -> Any:
        return pytree.tree_map_only(
            Tensor, lambda t: t.tensor_split(count)[k] if t.ndim else t, tuple(batch)
        )

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
        self,
        rule: str,
        stages: Sequence[nn.Module],
        loss: Callable,
        optimizer: Callable,
        clip: float | None = None,
        autocast: torch.dtype | None = None,
        first: int = 0,
        start: Start | None = None,
    ) -> None:
        self.rule, self.stages, self.loss, self.clip, self.autocast = (
            rule,
            stages,
            loss,
            clip,
            autocast,
        )
        self.trained = [
            p for p in nn.Sequential(*stages).parameters() if p.requires_grad
        ]  # a tied one once
        self.stepper, *self.schedulers = (
            _as_tuple(optimizer(self.trained)) if self.trained else (None,)
        )
        self.history = [
            {first: _weights(stage)} for stage in stages
        ]  # per stage, the weights by version
        if start:
            self._resume(start)

    def _resume(self, start: Start) -> None:
        for s, stage in enumerate(self.stages):
            of = dict(stage.named_parameters())
            self.history[s] = {
                v: {n: t.to(of[n], copy=True) for n, t in w.items()}
                for v, w in start.weights[s].items()
            }
            for name, state in start.optimizer[s].items():
                self.stepper.state[of[name]] = {
                    k: v.to("cpu" if k == "step" else of[name].device, copy=True)
                    if isinstance(v, Tensor)
                    else v
                    for k, v in state.items()
                }
        for group, saved in zip(
            self.stepper.param_groups if self.stepper else (), start.groups, strict=True
        ):
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
            for group in (
                [self.trained]
                if self.rule == FLUSH
                else [list(stage.parameters()) for stage in self.stages]
            ):
                nn.utils.clip_grad_norm_(group, self.clip)
        return values

    def _loss(self, piece: Piece) -> tuple[Tensor, float]:
        x, device = piece.x, next((p.device for p in self.trained), torch.device("cpu"))
        with (
            torch.random.fork_rng(
                [device] if device.type == "cuda" else [], enabled=piece.seeds is not None
            ),
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
        self.history = [
            {v: w for v, w in of.items() if v in keep}
            for of, keep in zip(self.history, needed, strict=True)
        ]


def check(
    trainer: Trainer,
    updates: Sequence[list[Piece]],
    steps: Sequence[list[tuple[dict[str, Tensor], dict[str, Tensor]]]],
    losses: Sequence[float],
    tolerance: float,
    first: int = 0,
) -> Check:
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
                found.add(f"a loss of update {t}", np.array(reported, float), wide(mean))
        largest = max(
            (float(p.grad.abs().max()) for p in trainer.trained if p.grad is not None), default=0.0
        )
        for s, stage in enumerate(stages):
            for name, p in stage.named_parameters():
                if p.requires_grad:
                    expected = torch.zeros_like(p) if p.grad is None else p.grad
                    rounding = 16 * torch.finfo(p.dtype).eps * largest / tolerance
                    found.add(
                        f"the gradient of {name} of stage {s} in update {t}",
                        wide(steps[s][i][0][name]),
                        wide(expected),
                        rounding,
                    )
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
                found.add(
                    f"weight {name} of stage {s} after update {t}",
                    wide(change),
                    wide(p - before),
                    rounding,
                )
        ahead = [piece.reads for later in updates[i + 1 :] for piece in later]
        trainer.forget([{t + 1, *(reads[s] for reads in ahead)} for s in range(len(stages))])
    return found.verdict(tolerance, trainer.rule)


def wide(tensor: Tensor) -> np.ndarray:
    """As an array of float64 or complex128 on the CPU, for `Comparison`."""
    return (
        tensor.detach()
        .to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)
        .numpy()
    )


def _samples(piece: Piece) -> int:
    return len(
        next(t for t in pytree.tree_leaves((piece.x, piece.y)) if isinstance(t, Tensor) and t.ndim)
    )


def _as_tuple(value: Any) -> tuple:
    return value if isinstance(value, tuple) else (value,)


def _weights(stage: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in stage.named_parameters()}


def _load(stage: nn.Module, weights: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, p in stage.named_parameters():
            p.copy_(weights[name])
