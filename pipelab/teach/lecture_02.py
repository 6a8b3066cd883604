"""Lecture 2: GPipe."""

from typing import Any

import numpy as np

from pipelab import Costs, make, simulate
from pipelab.teach.feedback import (
    NOT_ATTEMPTED,
    RIGHT,
    Feedback,
    Guess,
    called,
    debug,
    is_close,
    not_yet,
    predict,
    table,
    write,
)


def uneven_gradient(answer: Any) -> Feedback:
    """(model, x, y, micro-batches) -> the gradient of the undivided mean, whatever the sizes.

    The model has a gradient from before, which does not count.
    """
    import torch  # a lecture's first cell has loaded it
    from torch.nn.functional import mse_loss

    for samples, m in ((12, 4), (10, 4), (7, 2)):
        random = torch.Generator().manual_seed(samples)
        x, y = torch.randn(2, samples, 3, generator=random)
        model = torch.nn.Linear(3, 3)
        shares = [len(part) / samples for part in x.chunk(m)]
        means = [
            torch.autograd.grad(mse_loss(model(part), target), [*model.parameters()])
            for part, target in zip(x.chunk(m), y.chunk(m), strict=True)
        ]
        by_piece = np.array([torch.cat([g.flatten() for g in mean]).numpy() for mean in means])
        truth = shares @ by_piece
        seen: list[int] = []
        model.weight.grad, model.bias.grad = (torch.ones_like(p) for p in model.parameters())
        model.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(len(given[0])))
        found = called(answer, model, x, y, m, where=f"with {samples} samples")
        if found is None:
            return NOT_ATTEMPTED
        found = np.asarray(torch.as_tensor(found).detach())
        if is_close(found, truth + 1, 1e-3):
            return not_yet("it adds to the gradient that the model has from before.")
        if is_close(found, truth, 1e-3) and max(seen, default=0) > len(x.chunk(m)[0]):
            return not_yet(f"right, but {max(seen)} samples pass at once: no micro-batches.")
        if not is_close(found, truth, 1e-3):
            return not_yet(f"{samples} samples, m = {m}: {_uneven_hint(found, by_piece)}")
    return RIGHT


def _uneven_hint(found: np.ndarray, by_piece: np.ndarray) -> str:
    if found.shape != by_piece[0].shape:
        return f"a gradient of shape {found.shape}, asked: one vector, {by_piece[0].shape}."
    if is_close(found, by_piece.sum(axis=0), 1e-3):
        return "the gradient is too large: no piece has a weight."
    if is_close(found, by_piece.mean(axis=0), 1e-3):
        return "all pieces count alike, but they have not as many samples."
    return "it is another gradient. Do the weights of the pieces add up to 1?"


def gpipe_seconds(forward: list, backward: list, m: int) -> float:
    half = [b / 2 for b in backward]
    return simulate(make("gpipe", len(forward), m), Costs(forward, half, half)).makespan


EXERCISES = {
    # Devices -> micro-batches for at most 10 % of idle time.
    "02-1": write(
        lambda p: max(1, 9 * (p - 1)),
        [(p,) for p in range(1, 9)],
        {
            lambda p: 9 * (p - 1): "A schedule has at least one micro-batch.",
            lambda p: 9 * (p - 1) + 1: "One fewer does: at most 10 % may be exactly 10 %.",
            lambda p: max(1, 10 * (p - 1)): "That is for 10 % over the ideal time.",
        },
    ),
    # Ten micro-batches that keep 30 MiB each, 4 of them the input.
    "02-2": predict(
        10 * 4 + 26,
        "What is kept of every micro-batch, what of one?",
        {
            300: "So much is kept without recomputation.",
            40: "And the micro-batch that is computed again?",
            70: "The input of the micro-batch that is computed again counts once.",
            30: "The inputs of the others stay too.",
        },
    ),
    "02-3": debug(uneven_gradient),
    # A table whose first forward is late, mended.
    "02-4": debug(table, devices=3, microbatches=4, makespan=18),
    # (forward, backward, micro-batches), times by stage -> how long GPipe takes.
    "02-5": write(
        gpipe_seconds,
        [
            ([1, 1, 1, 1], [2, 2, 2, 2], 8),
            ([1, 2, 1], [2, 4, 2], 4),
            ([1, 3, 1], [6, 2, 2], 5),
            ([3, 1], [4, 2], 1),
        ],
        {
            lambda f, b, m: (
                (m + len(f) - 1) * (max(f) + max(b))
            ): "Filling and draining take each stage's own time, not the slowest one's.",
            lambda f, b, m: (
                sum(f) + sum(b) + (m - 1) * max(map(sum, zip(f, b, strict=True)))
            ): "All forwards come first. Is the stage slowest there the slowest on the way back?",
            lambda f, b, m: (
                sum(f) + sum(b) + m * (max(f) + max(b))
            ): "The sum has the first micro-batch's time on the slowest stage already.",
            lambda f, b, m: sum(f) + sum(b): "That is one micro-batch alone.",
            lambda f, b, m: m * (sum(f) + sum(b)): "That is one micro-batch at a time.",
            lambda f, b, m: m * (max(f) + max(b)): "And until the pipeline is full, and empty?",
        },
    ),
}
GUESSES = {
    "02-a": Guess(
        lambda: simulate(make("inter_layer", 2, 8)).makespan,
        "Can rank 1 work on one micro-batch while rank 0 works on another?",
    )
}
