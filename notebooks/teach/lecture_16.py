"""Lecture 16: overlapped pairs, two copies of the model, slices of sequences, offload."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import sqrt

from pipelab import Costs, Schedule, make, simulate
from teach.feedback import Guess, build, predict, write

Slices = Sequence[Sequence[float]]


def of_running_sum(slices: Slices) -> list[list[float]]:
    """The gradient of a running sum's inputs, slice by slice: all that comes later, added up."""
    owed, found = 0.0, []
    for gradients in reversed(slices):
        mine = []
        for dy in reversed(gradients):
            owed += dy
            mine.append(owed)
        found.append(mine[::-1])
    return found[::-1]


def cut_off(slices: Slices) -> list[list[float]]:
    """The same where each slice forgets what later ones owe it."""
    return [of_running_sum([gradients])[0] for gradients in slices]


def from_the_first(slices: Slices) -> list[list[float]]:
    """The sums in the forward's direction."""
    turned = of_running_sum([gradients[::-1] for gradients in slices[::-1]])
    return [gradients[::-1] for gradients in turned[::-1]]


def equal_slices(k: int, a: float) -> list[float]:
    """Lengths that take equally long where the first x take (1 - a) x + a x^2."""
    ends = [(a - 1 + sqrt((1 - a) ** 2 + 4 * a * j / k)) / (2 * a) for j in range(k + 1)]
    return [end - begin for begin, end in pairwise(ends)]


def in_seconds(k: int, a: float) -> list[float]:
    """The shares of time that equally long slices take."""
    return [(1 - a) / k + a * (2 * j + 1) / k**2 for j in range(k)]


def beside(table: Schedule) -> str:
    """What a table misses in which nothing overlaps: a split backward gains as much."""
    return "" if table.overlapped else "no cell has two actions"


paired = partial(build, missing=beside, by_hand=True)
EXERCISES = {
    # Gradients of a running sum's outputs, by slice -> those of its inputs.
    "16-1": write(
        of_running_sum,
        [([[1, 2], [3, 4]],), ([[1.0], [0.5, -2.0], [4.0, 3.0, 1.0]],), ([[5]],)],
        lambda slices: {
            "Each slice forgets what the later ones owe to its last sum.": cut_off(slices),
            "An input is in the outputs after it, not in those before it.": from_the_first(slices),
        },
    ),
    # DualPipe on 8 devices: F = I = 2, W = 1, F&B = 4.5.
    "16-2": predict(
        (8 / 2 - 1) * (4.5 + 3 - 3 * 1),
        "Follow a middle device: what does it wait for at first, in the drain, at the end?",
        {
            (8 - 1) * 4.5: "Micro-batches come from both ends: how far is the middle?",
            8 / 2 * 4.5: "The middle device itself does not wait for itself: one step less.",
            3 * (5 + 3 - 3): "That is a pair that saves nothing. What does it take here?",
            3 * (4.5 + 2 - 3): "B is I and W together. Or is the wait at the end missing?",
            4.5: "That is one step's. How many steps are there to the middle?",
        },
    ),
    "16-3": paired(devices=2, microbatches=4, makespan=13, in_flight=3, costs=Costs(together=2)),
    # A copy takes 1, on three devices.
    "16-4": paired(
        devices=3, microbatches=4, makespan=18, in_flight=2, costs=Costs(activations=1, host=1)
    ),
    # (k, a) -> the lengths of k slices that take equally long.
    "16-5": write(
        equal_slices,
        [(4, 0.5), (4, 1.0), (2, 0.25), (3, 0.8)],
        lambda k, a: {
            "Those are equally long. A later one attends to more.": [1 / k] * k,
            "That balances attention alone. The rest grows with the length.": equal_slices(k, 1),
            "Those are the times of slices of one length. Asked are lengths.": in_seconds(k, a),
            "The longest slice comes first: it attends to least.": equal_slices(k, a)[::-1],
        },
    ),
}
GUESSES = {
    "16-a": Guess(
        lambda: simulate(make("seq1f1b", 4, 4, slices=4)).makespan,
        "How long is one step of the fill and the drain, if a slice takes a quarter?",
        slips={
            21 / 4: "The work stays: only the bubble is divided.",
            12: "A slice still has to reach the last device first.",
        },
    ),
    # Two passes that each compute 5 ms, wait 10 and compute 5, on one core, over one by one.
    "16-b": Guess(
        lambda: 25 / 40,
        "Draw both passes on a line of time. When is the core busy?",
        slips={
            0.5: "While both messages are on their way, the core has nothing to do.",
            0.75: "Both messages may be on their way at the same time.",
            40 / 25: "That is how many times as fast it is.",
        },
    ),
}
