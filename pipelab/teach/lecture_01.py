"""Lecture 1: inter-layer parallelism."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from pipelab import make, simulate
from pipelab.teach.feedback import (
    RIGHT,
    Feedback,
    Guess,
    build,
    choice,
    debug,
    not_yet,
    predict,
    understood,
    write,
)


def ends(outputs: Sequence[int], balance: Sequence[int]) -> list[int]:
    """The output of the last layer of each stage."""
    return [outputs[last - 1] for last in accumulate(balance)]


def gradients_over_a_cut(answer: Any) -> Feedback:
    """(stage a, stage b, batches) -> the gradients of both weights for every batch."""
    import torch

    a, b = torch.nn.Linear(128, 128), torch.nn.Linear(128, 128)
    batches = [(torch.randn(32, 128), torch.randn(32, 128)) for _ in range(3)]
    truth, mixed = _over_a_cut(a, b, batches)
    try:
        found = [tuple(pair) for pair in answer(a, b, batches)]
    except Exception as error:
        hint = ""
        if "second time" in str(error):
            hint = "The loss's backward went through stage a as well: its graph ends at a detach."
        elif "implicitly created" in str(error):
            hint = "What came back is None: only a leaf that requires a gradient gets one."
        return not_yet(f"it raises {type(error).__name__}: {str(error).split('.')[0]}. {hint}")
    if [len(pair) for pair in found] != [2, 2, 2]:
        return not_yet("give a pair of gradients, of a's and of b's weight, for every batch.")

    def same(one: Any, other: Any) -> bool:
        alike = torch.is_tensor(one) and one.shape == other.shape
        return alike and torch.allclose(one.to(other), other, atol=1e-6)

    for k, (pair, right) in enumerate(zip(found, truth, strict=True)):
        for s, name in enumerate("ab"):
            if same(pair[s], right[s]):
                continue
            hint = "Compare with the five lines by hand at the top of the lecture."
            if same(pair[s], sum(gradients[s] for gradients in truth[: k + 1])):
                hint = "It is the sum over all batches until now: clear it after each."
            elif s == 0 and same(pair[s], mixed[k]):
                hint = "What came back over the cut is the sum over all batches until now."
            return not_yet(f"batch {k}: the gradient of {name} is wrong. {hint}")
    return RIGHT


def _over_a_cut(a: Any, b: Any, batches: Any) -> tuple[list, list]:
    """The weights' gradients for every batch; and a's where those at the cut add up."""
    from torch.autograd import grad
    from torch.nn.functional import mse_loss

    right = []
    mixed: list[Any] = []
    at_cut: Any = 0
    for x, target in batches:
        h = a(x)
        back, of_b = grad(mse_loss(b(h), target), [h, b.weight])
        at_cut = at_cut + back
        (of_a,) = grad(h, [a.weight], back, retain_graph=True)
        right.append((of_a, of_b))
        mixed += grad(h, [a.weight], at_cut)
    return right, mixed


def never_ends(answer: Any) -> Feedback:
    """Which of three sets of orders deadlocks, and the devices of its cycle."""
    with understood(f'{answer!r} is not like ("A", [1, 2]).'):
        name, devices = answer
        devices = sorted(devices)
    wrong = {
        "A": "There 0 meets 1, then 1 meets 2, then 2 meets 0: all are done.",
        "B": "Device 2 receives first, so device 1 can go on, and then device 0.",
    }
    if name != "C" or devices == [0, 1]:
        return choice(name, "C", wrong)
    if 2 in devices:
        return not_yet("C, but who takes what device 2 sends? Is it still waiting then?")
    return not_yet("C, but a cycle has at least two devices.")


EXERCISES = {
    # Five stages that take 2, 3, 4, 5 and 16.
    "01-1": predict(
        4 / 5,
        "A share between 0 and 1: how many devices compute at any moment?",
        {
            0.2: "That is the share that is busy.",
            20: "That is the share that is busy, in per cent.",
            80: "That is per cent; asked is a share between 0 and 1.",
            50 / 80: "That holds where devices work side by side and the slowest sets the pace.",
        },
    ),
    # (bytes that each layer gives, layers of each stage) -> bytes over all cuts.
    "01-2": write(
        lambda o, b: 2 * sum(ends(o, b)[:-1]),
        [
            ([10, 20, 30, 40], [1, 3]),
            ([10, 20, 30, 40], [2, 2]),
            ([10, 20, 30, 40], [1, 1, 1, 1]),
            ([7, 5, 3, 9, 11], [2, 1, 2]),
            ([10, 20], [2]),
        ],
        {
            lambda o, b: sum(ends(o, b)[:-1]): "The gradient comes back and is as large.",
            lambda o, b: 2 * sum(ends(o, b)): "What the last stage gives crosses no cut.",
            lambda o, b: 2 * sum(o): "Layers inside a stage send nothing.",
            lambda o, b: 2 * sum(o[:-1]): "Layers inside a stage send nothing.",
            lambda o, b: (
                2 * sum(o[: len(b) - 1])
            ): "Those are the first layers. Which layer is the last one of each stage?",
            lambda o, b: (
                2 * sum(o[n] for n in [*accumulate(b)][:-1])
            ): "That is what the layer behind the cut gives; across it goes what is before it.",
        },
    ),
    # Two micro-batches through three devices in 12.
    "01-3": build(devices=3, microbatches=2, makespan=12),
    "01-4": debug(gradients_over_a_cut),
    "01-5": debug(never_ends),
}
GUESSES = {
    "01-a": Guess(
        lambda: 100 * simulate(make("inter_layer", 6, 1)).bubble.of_total,
        "How many of the six compute at any moment?",
    ),
    "01-b": Guess(
        lambda: (3 + 2) * 32 * 128 * 4 / 1024,
        "Linear, ELU, Linear: a tensor each; and two of the loss.",
    ),
}
