"""Lecture 14: in practice."""

from typing import Any

from pipelab import Costs, Kind, Schedule, make, simulate
from teach.feedback import (
    NOT_ATTEMPTED,
    Exercise,
    Guess,
    Judged,
    build,
    called,
    is_close,
    predict,
    write,
)


def exchanged(answer: Any) -> Judged:
    """(first, last) -> both copies' .grad are the sum of the two."""
    import torch  # a lecture's first cell has loaded it

    first, last = (torch.nn.Parameter(torch.zeros(2, 3)) for _ in range(2))
    parts = torch.tensor([[1.0, 2, 3], [4, 5, 6]]), torch.full((2, 3), 10.0)
    first.grad, last.grad = (part.clone() for part in parts)
    if called(answer, first, last) is not None:
        yield "it returns something, which nobody reads: the optimizer reads both .grad."
    found, whole = (first.grad, last.grad), parts[0] + parts[1]
    if all(map(is_close, found, parts)):
        yield NOT_ATTEMPTED
    if all(is_close(grad, whole / 2) for grad in found):
        yield "both have half of it: a weight that is used twice has the sum, not a mean."
    for name, grad, part in zip(("first", "last"), found, parts, strict=True):
        if is_close(grad, whole + part):
            yield f"{name}.grad has its own part twice."
        if not is_close(grad, whole):
            yield f"{name}.grad is not the sum of the two parts."
    return ": both have the whole gradient."


def in_halves(schedule: Schedule) -> str:
    kinds = {action.kind for row in schedule.rows for action in row}
    return "a backward is one action here, B" if kinds & {Kind.I, Kind.W} else ""


def fastest(samples: int, p: int, fixed: float, each: float, divide: bool = True) -> int:
    def seconds(m: int) -> float:
        return (m + p - 1) * (fixed + samples / m * each)

    return min((m for m in range(1, samples + 1) if not divide or samples % m == 0), key=seconds)


EXERCISES = {
    # GB that a device sends: 4 replicas of 4 stages, 9.6 GB of gradients.
    "14-1": predict(
        2 * 3 / 4 * 9.6 / 4,
        "Whose gradients are added up?",
        {
            14.4: "A device holds the gradients of one stage.",
            2.4: "In a ring the sum goes round, and then once more to reach everybody.",
            1.8: "In a ring the sum goes round, and then once more to reach everybody.",
            4.5: "The devices that add up their gradients are those of one stage.",
            4.8: "Its own share need not be sent.",
        },
    ),
    "14-2": Exercise(exchanged),
    # Stages of 3, 3, 6 and 3 s, eight micro-batches: balanced, over as they are.
    "14-3": predict(
        (15 + 7 * 6) / (11 * 15 / 4),
        "How long does it take as it is, and with either cure?",
        {
            2 * 57 / 105: "That is twice the micro-batches. And balance?",
            6 / 3.75: "That is the pace alone: it fills and drains, by each stage's own time.",
            41.25 / 57: "The other way round: samples a second.",
        },
    ),
    # Six micro-batches on three devices in 29, with messages that take 1.
    "14-4": build(
        devices=3,
        microbatches=6,
        makespan=29,
        in_flight=4,
        costs=Costs(transfer=1),
        missing=in_halves,
        by_hand=True,
    ),
    # (samples, devices, seconds an action, seconds a sample) -> micro-batches.
    "14-5": write(
        fastest,
        [
            (64, 4, 1, 1),
            (64, 4, 0.01, 1),
            (64, 8, 4, 0.5),
            (60, 3, 3, 1),
            (7, 4, 1, 1),
            (60, 2, 3, 2),
        ],
        lambda samples, p, fixed, each: {
            "Every micro-batch has its fixed cost.": samples,
            "And the bubble?": fastest(samples, 1, fixed, each),
            "Do the micro-batches divide the samples?": fastest(samples, p, fixed, each, False),
            "That would be best if m could be any number; it has to divide the samples.": (
                ((p - 1) * samples * each / fixed) ** 0.5
            ),
        },
    ),
}
GUESSES = {
    "14-a": Guess(
        lambda: (
            simulate(make("pipedream_flush", 2, 2).with_transfers(), Costs(transfer=1)).makespan
        ),
        "Write both rows down: a transfer occupies both devices at once.",
    ),
    # GPipe, m = 8, on two devices, over one device: what the run measures, but for its overheads.
    "14-b": Guess(
        lambda: 2 * 8 / (8 + 1),
        "Each device works for 8 of how many turns?",
        tolerance=0.06,
        slips={
            2: "That is without a bubble. Which device waits at the start, and which at the end?",
            9 / 16: "That is how many times as long it takes.",
        },
    ),
}
