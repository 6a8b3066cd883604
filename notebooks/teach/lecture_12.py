"""Lecture 12: zero bubbles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from pipelab import make, simulate
from teach.feedback import (
    NOT_ATTEMPTED,
    Exercise,
    Guess,
    Judged,
    called,
    is_close,
    predict,
    write,
)

if TYPE_CHECKING:
    import torch


class Stage:
    """Linear layers with ReLU, and what waits for I and for W, by micro-batch."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self.weights = weights
        self.for_I: dict[int, list] = {}
        self.for_W: dict[int, list] = {}

    def F(self, k: int, x: torch.Tensor) -> torch.Tensor:
        self.for_I[k] = []
        for w in self.weights:
            y = (x @ w.T).relu()
            self.for_I[k].append((x, y > 0))
            x = y
        return x


def input_gradient(self: Stage, k: int, dy: torch.Tensor) -> torch.Tensor:
    """The gradient of the stage's input; leaves in self.for_W[k] a (dy, x) for each layer."""
    self.for_W[k] = []
    for w, (x, positive) in zip(self.weights[::-1], self.for_I.pop(k)[::-1], strict=True):
        dy = dy * positive
        self.for_W[k].append((dy, x))
        dy = dy @ w
    return dy


def first_half(answer: Any) -> Judged:
    """I(stage, k, dy): the input's gradient, and in stage.for_W[k] what W takes."""
    import torch  # a lecture's first cell has loaded it

    random = torch.Generator().manual_seed(0)
    weights = torch.randn(3, 4, 4, generator=random)
    inputs, grads = torch.randn(2, 2, 5, 4, generator=random)
    mine, right = Stage([*weights]), Stage([*weights])
    for k, x in enumerate(inputs):
        mine.F(k, x), right.F(k, x)
    for k in (1, 0):  # not in the order of the forwards
        dx, asked = called(answer, mine, k, grads[k]), input_gradient(right, k, grads[k])
        if dx is None and not mine.for_W and len(mine.for_I) == 2:
            yield NOT_ATTEMPTED
        if not is_close(dx, asked, 1e-4):
            slip = grads[k] @ weights[2] @ weights[1] @ weights[0]
            hint = "A ReLU that gave 0 passes no gradient back." if is_close(dx, slip, 1e-4) else ""
            yield f"the input's gradient of micro-batch {k} is wrong. {hint}"
        if k in mine.for_I:
            yield f"self.for_I[{k}] is still there: remove it (pop), or its memory is never freed."
        left = [dy.T @ x for dy, x in mine.for_W.get(k, [])]
        asked_of_W = [dy.T @ x for dy, x in right.for_W[k]]
        if not is_close(torch.stack(left) if left else 0, torch.stack(asked_of_W), 1e-4):
            yield (
                f"self.for_W[{k}] is wrong. It must hold a pair (dy, x) for each layer, the last "
                "layer first, and each dy must already have the ReLU's zeros."
            )
    return ": dx goes to the stage before, and W can run at any later time."


# For a block of GPT-3 of length 2048, 96 heads: M_B and M_W over samples x length.
BEFORE, AFTER = 34 * 12288 + 5 * 96 * 2048, 32 * 12288


class LinearLayer:
    """A linear layer with lists of what waits, on which the mended W works."""

    def __init__(self) -> None:
        import torch  # a lecture's first cell has loaded it

        self.weight, self.grad = torch.zeros(2, 2, 3, dtype=torch.float64)
        self.inputs: list[torch.Tensor] = []
        self.output_grads: list[torch.Tensor] = []


def late_weight_gradient(answer: Any) -> Judged:
    """W(layer), which has to work in any order in which it may come."""
    orders = ("F I W F I W", "F F F I W I W I W", "F F I F I W I W F I W W")
    for order in orders:
        layer = LinearLayer()
        right = _played(order, layer, answer)
        if not is_close(layer.grad, right, 1e-6):
            if not layer.grad.any():
                waits = len(layer.inputs) + len(layer.output_grads)
                unused = waits == 2 * order.count("F")
                yield NOT_ATTEMPTED if unused else "layer.grad did not change: W must add to it."
            yield (
                f"after {order} the gradient is wrong. Which input does each W use, and which "
                "output gradient?"
            )
        if layer.inputs or layer.output_grads:
            yield (
                f"after {order} the gradient is right, but the layer still holds "
                f"{len(layer.inputs)} inputs and {len(layer.output_grads)} output gradients. "
                "W must remove the ones that it used."
            )


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


EXERCISES = {
    "12-1": Exercise(first_half, reference=input_gradient),
    # In M_B: what the last of eight devices holds under H1.
    "12-2": predict(
        1 + 7 * AFTER / BEFORE,
        "One micro-batch has not had its I. How many others wait for W? Each of those keeps "
        "M_W / M_B.",
        {
            8: "A micro-batch that waits for W keeps less than one that waits for I.",
            8 * AFTER / BEFORE: "One of them has not had its I: it keeps everything.",
            1: "That is 1F1B. Here some W wait as well. Which ones?",
            7 * AFTER / BEFORE: "Those wait for W. One more has not had its I.",
            1 + 7 * BEFORE / AFTER: "Which is larger: M_B, kept until I, or M_W, until W?",
            1 + 8 * AFTER / BEFORE: "That is nine micro-batches, but eight are in flight.",
        },
    ),
    # (w, buffer, gradient, lr, mu) after a step with momentum -> w and buffer before it.
    "12-3": write(
        lambda w, buffer, gradient, lr, mu: (w + lr * buffer, (buffer - gradient) / mu),
        [(1.0, 2.0, 0.5, 0.1, 0.9), (-3.0, 0.5, 4.0, 0.01, 0.5), (0.0, -1.0, 1.0, 1.0, 0.99)],
        lambda w, buffer, gradient, lr, mu: {
            "The step subtracted lr times the buffer, not lr times the gradient.": (
                w + lr * gradient,
                (buffer - gradient) / mu,
            ),
            "The step used the buffer as it is now. Undo w with it, and then undo the buffer.": (
                w + lr * (buffer - gradient) / mu,
                (buffer - gradient) / mu,
            ),
            "The step multiplied the old buffer by mu before it added the gradient.": (
                w + lr * buffer,
                buffer - gradient,
            ),
            "That takes another step, instead of undoing the last one.": (
                w - lr * (mu * buffer + gradient),
                mu * buffer + gradient,
            ),
        },
    ),
    "12-4": Exercise(late_weight_gradient),
}
GUESSES = {
    "12-a": Guess(
        lambda: simulate(make("zb_h1", 6, 12)).makespan,
        "How many W are still left on the last device when its last I is done?",
    ),
    # Two devices, four micro-batches, F = I = W: H1's time over 1F1B's.
    "12-b": Guess(
        lambda: (
            simulate(make("zb_h1", 2, 4)).makespan
            / simulate(make("pipedream_flush", 2, 4)).makespan
        ),
        "Add each schedule's bubble to the work, m (F + I + W).",
        tolerance=0.03,
        slips={
            15 / 13: "That is how many times as fast H1 is.",
            1 / 3: "That is H1's bubble over 1F1B's. The work comes on top of both.",
            27 / 33: "That is for four devices and eight micro-batches.",
            12 / 15: "That would be without a bubble.",
        },
    ),
}
