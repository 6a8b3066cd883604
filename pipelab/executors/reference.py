"""The reference that every run is checked against: the update rule as the papers write it, on one device.

It shares no code with the worker, the stages or the schedule's versions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


@dataclass
class Check:
    """The verdict of a run against its reference.

    passed     max_rel <= tolerance
    max_abs    the largest difference of any loss, gradient or weight
    max_rel    the largest max|a - b| / max|b| over those tensors, b the reference
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
        if self.passed:
            return "Check passed: every loss, gradient and weight equals the reference within the tolerance."
        return (
            f"CHECK FAILED: {self.worst} differs from the reference ({self.rule}) by {self.max_rel:.2g}, "
            f"tolerance {self.tolerance:g}."
        )


class Comparison:
    """Collects the differences of many tensors."""

    def __init__(self) -> None:
        self.max_abs, self.max_rel, self.worst = 0.0, 0.0, ""

    def add(self, name: str, got: Tensor, expected: Tensor) -> None:
        if got.shape != expected.shape:
            difference = relative = float("inf")
        elif not got.numel():
            return
        else:
            a, b = got.detach().cpu().double(), expected.detach().cpu().double()
            difference, scale = float((a - b).abs().max()), float(b.abs().max())
            relative = difference / scale if scale else (float("inf") if difference else 0.0)
        if difference != difference:  # nan is never equal
            difference = relative = float("inf")
        self.max_abs = max(self.max_abs, difference)
        if relative > self.max_rel:
            self.max_rel, self.worst = relative, name

    def verdict(self, tolerance: float, rule: str) -> Check:
        return Check(self.max_rel <= tolerance, self.max_abs, self.max_rel, tolerance, rule, self.worst)


def tolerance_for(stages: Iterable[nn.Module]) -> float:
    """The stated tolerance of the lowest precision among the stages' weights."""
    found = {p.dtype for stage in stages for p in stage.parameters()}
    return max((TOLERANCE.get(dtype, 0.0) for dtype in found), default=TOLERANCE[torch.float32])


def check_flush(
    stages: Sequence[nn.Module], batches: Sequence[tuple[Any, Any]], loss: Callable, optimizer: Callable,
    losses: Sequence[float], steps: Sequence[list[tuple[dict[str, Tensor], dict[str, Tensor]]]], tolerance: float,
) -> Check:  # fmt: skip
    """w(t+1) = w(t) - step(grad f(w(t))): one forward and one backward over the undivided batch, then one step.

    `stages` hold the initial weights and are trained; `steps[stage][t]` are the run's gradients and weights at update t.
    Every step is checked by itself: the gradient against the reference's own, the new weights against the step that the
    optimizer takes from that same gradient. Steps that start equal and are equal stay equal, and an optimizer that
    divides by a gradient's size cannot blow up rounding where a gradient is zero in theory (a key's bias under Adam).
    """
    model, found = nn.Sequential(*stages), Comparison()
    trained = [p for p in model.parameters() if p.requires_grad]
    stepper = optimizer(trained) if trained else None
    for t, (x, y) in enumerate(batches):
        for p in trained:
            p.grad = None
        value = loss(model(x), y)
        mean = value[0] if isinstance(value, tuple) else value
        mean.backward()
        found.add(f"the loss of batch {t}", torch.tensor(losses[t], dtype=torch.float64), mean)
        for s, stage in enumerate(stages):
            gradients, _ = steps[s][t]
            for name, p in stage.named_parameters():
                if p.requires_grad:
                    expected = p.grad if p.grad is not None else torch.zeros_like(p)
                    found.add(f"the gradient of {name} of stage {s} in batch {t}", gradients[name], expected)
                    if p.grad is not None:
                        p.grad = gradients[name].to(p)
        if stepper is not None:
            stepper.step()
        for s, stage in enumerate(stages):
            for name, p in stage.named_parameters():
                found.add(f"weight {name} of stage {s} after batch {t}", steps[s][t][1][name], p)
    return found.verdict(tolerance, "flush: w(t+1) = w(t) - step(grad f(w(t)))")
