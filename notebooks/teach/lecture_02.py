"""Lecture 2: GPipe."""

from copy import deepcopy
from typing import Any

from pipelab import Costs, make, simulate
from teach.feedback import (
    NOT_ATTEMPTED,
    Exercise,
    Guess,
    Judged,
    build,
    called,
    one_moved,
    predict,
    understood,
    write,
)

LATE = """
0F0 0F1 0B0 0F2 0F3 0B1 0B2 0B3
1F0 1F1 1B0 1F2 1B1 1F3 1B2 1B3
2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3
"""


def gpipe_row(answer: Any) -> Judged:
    """(rank, b, m) -> the rank's actions in batch b: tuples of a stage, a letter and a number."""
    for rank, b, m in ((0, 0, 4), (1, 0, 4), (0, 1, 4), (2, 3, 2)):
        found = called(answer, rank, b, m, where=f"with rank {rank}, b = {b}, m = {m}")
        if found is None:
            yield NOT_ATTEMPTED
        with understood('give a list of tuples such as (0, "F", 3).'):
            row = [(int(s), str(kind), int(k)) for s, kind, k in found]
        batch = range(m * b, m * b + m)
        forwards, backwards = ([(rank, kind, k) for k in batch] for kind in "FB")
        work, update = row[:-1], (rank, "U", b)
        if row in ([*forwards, *order, update] for order in (backwards, backwards[::-1])):
            continue
        likely = {
            "the update of the batch comes last.": update not in row[-1:],
            "each micro-batch of the batch has a forward and a backward.": (
                sorted(work) != sorted([*forwards, *backwards])
            ),
            "a backward comes before the last forward: that is lecture 1's order.": (
                {kind for _, kind, _ in work[:m]} != {"F"}
            ),
        }
        why = next((hint for hint, slip in likely.items() if slip), "in order, from the first.")
        shown = " ".join(f"{s}{kind}{k}" for s, kind, k in row)
        yield f"rank {rank}, b = {b}, m = {m}: {shown or 'nothing'}: {why}"
    return ": all forwards, then all backwards."


def uneven_gradient(answer: Any) -> Judged:
    """(model, x, y, micro-batches) -> the gradient of the undivided mean, whatever the sizes.

    The model has a gradient from before, which does not count.
    """
    import torch  # a lecture's first cell has loaded it
    from torch.nn.functional import mse_loss

    for samples, m in ((12, 4), (10, 4), (7, 2)):
        random = torch.Generator().manual_seed(samples)
        x, y = torch.randn(2, samples, 3, generator=random)
        model = torch.nn.Linear(3, 3)
        for weight in model.parameters():
            weight.data = torch.randn(weight.shape, generator=random)
            weight.grad = torch.ones_like(weight)
        exact = deepcopy(model).double()
        means = [
            torch.autograd.grad(mse_loss(exact(part), target), [*exact.parameters()])
            for part, target in zip(x.double().chunk(m), y.double().chunk(m), strict=True)
        ]
        by_piece = torch.stack([torch.cat([g.flatten() for g in mean]) for mean in means])
        shares = torch.tensor([len(part) / samples for part in x.chunk(m)], dtype=torch.float64)
        truth = shares @ by_piece
        seen: list[int] = []
        model.register_forward_pre_hook(
            lambda _, given, named, seen=seen: seen.append(
                [*given, *named.values()][0].shape[:-1].numel()
            ),
            with_kwargs=True,
        )
        found = called(answer, model, x, y, m, where=f"with {samples} samples")
        if found is None:
            yield NOT_ATTEMPTED
        with understood("give one vector: torch.cat of all gradients, each flattened."):
            found = torch.as_tensor(found).detach()
        where = f"{samples} samples, m = {m}:"
        if found.shape != truth.shape:
            shapes = (*found.shape,), (*truth.shape,)
            yield "{} a gradient of shape {}; it must be one vector, {}.".format(where, *shapes)
        if _same_vector(found, truth):
            if max(seen, default=0) >= samples:
                yield f"right, but all {samples} samples pass at once: no micro-batches."
            continue
        likely = {
            "it adds to the gradient that the model has from before.": truth + 1,
            "the gradient is too large: no piece has a weight.": by_piece.sum(dim=0),
            "all pieces count alike, but they do not have the same number of samples.": (
                by_piece.mean(dim=0)
            ),
        }
        for hint, slip in likely.items():
            if _same_vector(found, slip):
                yield f"{where} {hint}"
        yield f"{where} it is another gradient. Do the weights of the pieces add up to 1?"


def _same_vector(found: Any, right: Any) -> bool:
    """Whether a vector is the same up to rounding, which is coarser in types such as bfloat16.

    Errors are relative to the largest element: one that is small because large terms cancel in it
    is rounded as much as these terms.
    """
    import torch

    coarse = torch.finfo(found.dtype).eps if found.dtype.is_floating_point else 0.0
    error = (found.to(right) - right).abs().max()
    return bool(error <= max(1e-3, 2 * coarse) * right.abs().max())


def gpipe_seconds(forward: list, backward: list, m: int) -> float:
    half = [b / 2 for b in backward]
    return simulate(make("gpipe", len(forward), m), Costs(forward, half, half)).makespan


EXERCISES = {
    "02-1": Exercise(gpipe_row),
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
    "02-3": Exercise(uneven_gradient),
    # A table whose third forward is late, mended by moving one action.
    "02-4": build(devices=3, microbatches=4, makespan=18, missing=one_moved(LATE), by_hand=True),
    # (forward, backward, micro-batches), times by stage -> how long GPipe takes.
    "02-5": write(
        gpipe_seconds,
        [
            ([1, 1, 1, 1], [2, 2, 2, 2], 8),
            ([1, 2, 1], [2, 4, 2], 4),
            ([1, 3, 1], [6, 2, 2], 5),
            ([3, 1], [4, 2], 1),
        ],
        lambda f, b, m: {
            "Filling and draining take each stage's own time, not the slowest one's.": (
                (m + len(f) - 1) * (max(f) + max(b))
            ),
            "All forwards come first. Is the stage slowest there the slowest on the way back?": (
                sum(f) + sum(b) + (m - 1) * max(map(sum, zip(f, b, strict=True)))
            ),
            "The sum has the first micro-batch's time on the slowest stage already.": (
                sum(f) + sum(b) + m * (max(f) + max(b))
            ),
            "That is one micro-batch alone.": sum(f) + sum(b),
            "That is one micro-batch at a time.": m * (sum(f) + sum(b)),
            "And until the pipeline is full, and empty?": m * (max(f) + max(b)),
        },
    ),
}
GUESSES = {
    "02-a": Guess(
        lambda: simulate(make("inter_layer", 2, 8)).makespan,
        "Can rank 1 work on one micro-batch while rank 0 works on another?",
    ),
    # MiB: one micro-batch of the eight that take 21.1, and the tokens of seven, 4 x 32 each.
    "02-b": Guess(
        lambda: round(21.1 / 8 + 7 * 4 * 32 * 8 / 2**20, 2),
        "Of how many micro-batches does it hold everything, and what of the others?",
        tolerance=0.01,
        slips={
            4 * 5.28: "So it is without recomputation.",
            5.28: "That is two micro-batches. How many are recomputed at a time?",
        },
    ),
}
