"""Lecture 12: zero bubbles."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pipelab import Schedule, make, simulate
from pipelab.teach.feedback import (
    NOT_ATTEMPTED,
    RIGHT,
    Exercise,
    Feedback,
    Guess,
    Skill,
    build,
    called,
    debug,
    is_close,
    not_yet,
    number,
    write,
)

if TYPE_CHECKING:
    import torch

IN_A_V = (0, 1, 1, 0)  # stage -> device


def last_device(answer: Any) -> Feedback:
    """In M_B: what the last of eight devices holds under H1, for a block of GPT-3."""
    s, h, a = 2048, 12288, 96
    before, after = 34 * h + 5 * a * s, 32 * h  # M_B and M_W over s b
    slips = {
        8: "A micro-batch that waits for W keeps less than one that waits for I.",
        8 * after / before: "One of them is before its I: that one is whole.",
        1: "That is 1F1B. Which W wait here, besides?",
        7 * after / before: "Those wait for W. And the one that is before its I?",
        1 + 7 * before / after: "Which is larger: what is kept until I, or from I to W?",
        1 + 8 * after / before: "Eight in flight in all, as on device 0.",
    }
    hint = "One before its I, and how many that wait for W? Each of those keeps M_W / M_B."
    return number(answer, 1 + 7 * after / before, hint, slips)


def truth(w, buffer, gradient, lr, mu):
    return w + lr * buffer, (buffer - gradient) / mu


class LinearLayer:
    """A linear layer with lists of what waits, on which the mended W works."""

    def __init__(self) -> None:
        import torch  # a lecture's first cell has loaded it

        self.weight, self.grad = torch.zeros(2, 2, 3, dtype=torch.float64)
        self.inputs: list[torch.Tensor] = []
        self.output_grads: list[torch.Tensor] = []


def late_weight_gradient(answer: Any) -> Feedback:
    """W(layer), which has to work in any order in which it may come."""
    orders = ("F I W F I W", "F F F I W I W I W", "F F I F I W I W F I W W")
    for order in orders:
        layer = LinearLayer()
        right = _played(order, layer, answer)
        if not is_close(layer.grad, right, 1e-6):
            if not layer.grad.any():
                waits = len(layer.inputs) + len(layer.output_grads)
                unused = waits == 2 * order.count("F")
                return NOT_ATTEMPTED if unused else not_yet("layer.grad is as before: add to it.")
            return not_yet(
                f"after {order} the gradient is wrong. Which input does each W take, and which "
                "output gradient?"
            )
        if layer.inputs or layer.output_grads:
            return not_yet(
                f"after {order} the gradient is right, but something is kept for ever: "
                f"{len(layer.inputs)} inputs, {len(layer.output_grads)} output gradients."
            )
    return RIGHT


def _played(
    order: str, layer: LinearLayer, weight_gradient: Callable[[LinearLayer], None]
) -> torch.Tensor:
    """Carry out F, I and W in this order; the sum of dy^T x over all micro-batches."""
    import torch

    random = torch.Generator().manual_seed(0)
    both = torch.randn(order.count("F"), 5, 5, generator=random, dtype=torch.float64)
    x, dy = both[..., :3], both[..., 3:]
    forwards, backwards = iter(x), iter(dy)
    for kind in order.split():
        if kind == "F":
            layer.inputs.append(next(forwards))
        elif kind == "I":
            layer.output_grads.append(next(backwards))
        else:
            called(weight_gradient, layer)
    return torch.einsum("mbo,mbi->oi", dy, x)


def missing(schedule: Schedule) -> str:
    home = schedule.placement
    return "" if home == IN_A_V else f"stages are on devices {home}; the V is {IN_A_V}"


EXERCISES = {
    # Three devices, five micro-batches, backwards in two halves.
    "12-1": build(devices=3, microbatches=5, makespan=17, in_flight=3),
    "12-2": Exercise(Skill.PREDICT, last_device),
    # (w, buffer, gradient, lr, mu) after a step with momentum -> w and buffer before it.
    "12-3": write(
        truth,
        [(1.0, 2.0, 0.5, 0.1, 0.9), (-3.0, 0.5, 4.0, 0.01, 0.5), (0.0, -1.0, 1.0, 1.0, 0.99)],
        {
            lambda w, buffer, gradient, lr, mu: (
                w + lr * gradient,
                (buffer - gradient) / mu,
            ): "The step subtracted lr times the buffer, not the gradient alone.",
            lambda w, buffer, gradient, lr, mu: (
                w + lr * (buffer - gradient) / mu,
                (buffer - gradient) / mu,
            ): "w was changed by the buffer as it is now: undo that first.",
            lambda w, buffer, gradient, lr, mu: (
                w + lr * buffer,
                buffer - gradient,
            ): "The old buffer was multiplied by mu before the gradient came.",
            lambda w, buffer, gradient, lr, mu: (
                w - lr * (mu * buffer + gradient),
                mu * buffer + gradient,
            ): "That is one more step forwards.",
        },
    ),
    "12-4": debug(late_weight_gradient),
    # Two micro-batches through four chunks in a V.
    "12-5": build(devices=2, stages=4, microbatches=2, makespan=13, missing=missing),
}
GUESSES = {
    "12-a": Guess(
        lambda: simulate(make("zb_h1", 6, 12)).makespan,
        "How many W does the last device have left when its last I is done?",
    )
}
