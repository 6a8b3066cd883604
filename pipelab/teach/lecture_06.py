"""Lecture 6: PipeDream-Flush, and what activation memory is."""

from typing import Any

from pipelab import Schedule, make, simulate
from pipelab.teach.feedback import (
    RIGHT,
    Exercise,
    Feedback,
    Guess,
    Task,
    not_a_function,
    not_yet,
    number,
    same_function,
    table,
)


def backward_first(answer: Any) -> Feedback:
    """Three devices, five micro-batches: GPipe's time with three in flight."""
    return table(answer, devices=3, microbatches=5, makespan=21, in_flight=3)


def bytes_of_stage(answer: Any) -> Feedback:
    """(stage, p, m, bytes of a micro-batch in all stages) -> bytes held under 1F1B with a flush."""
    cases = [(0, 4, 8, 100), (3, 4, 8, 100), (1, 4, 2, 60), (0, 1, 5, 7), (2, 8, 3, 16)]
    slips = (
        (lambda s, p, m, a: (p - s) * a / p, "There are not more micro-batches than m."),
        (lambda s, p, m, a: min(m, p - s) * a, "a counts all stages; this is one of p."),
        (lambda s, p, m, a: m * a / p, "That is GPipe."),
        (lambda s, p, m, a: min(m, p - s - 1) * a / p, "And the one that it works on?"),
    )
    return same_function(answer, lambda s, p, m, a: min(m, p - s) * a / p, cases, slips)


def how_often_filled(answer: Any) -> Feedback:
    """Sixteen samples on four devices with room for eight: GPipe's time over that of 1F1B."""
    slips = {
        1: "GPipe has room for eight: it fills and drains twice.",
        2: "Only if 1F1B filled and drained in no time; and it holds four samples at the most.",
        19 / 22: "The other way round: GPipe's time over 1F1B's.",
    }
    return number(answer, 2 * (8 + 3) / (16 + 3), "How often does each fill and drain?", slips)


def tensors_kept(answer: Any) -> Feedback:
    """Tensors that x sigmoid(x) has to keep."""
    slips = {
        2: "The sigmoid can be computed again.",
        3: "What can be computed again from x?",
        0: "Then the backward would not know where it is.",
    }
    return number(answer, 1, slips=slips)


def without_a_cycle(answer: Any) -> Feedback:
    """(p, m) -> a valid table in GPipe's time with min(m, p - s) micro-batches in flight."""
    if not callable(answer):
        return not_a_function(answer)
    for p, m in ((3, 4), (4, 8), (4, 2), (1, 3), (2, 1)):
        try:
            made = answer(p, m)
        except Exception as error:
            return not_yet(f"for ({p}, {m}) it raises {type(error).__name__}: {error}")
        if not isinstance(made, Schedule):
            return not_yet(f"for ({p}, {m}) it gives {made!r}, not a table.")
        feedback = table(made, devices=p, microbatches=m, makespan=(m + p - 1) * 3)
        if not feedback.passed:
            return Feedback(False, f"{feedback.text}\nThis is for p = {p}, m = {m}.")
        held, least = made.peak_in_flight, [min(m, p - s) for s in range(p)]
        if any(a > b for a, b in zip(held, least, strict=True)):
            return not_yet(f"for ({p}, {m}) the devices hold {held}, enough are {least}.")
    return RIGHT


EXERCISES = {
    "06-1": Exercise(Task.BUILD, backward_first),
    "06-2": Exercise(Task.WRITE, bytes_of_stage),
    "06-3": Exercise(Task.PREDICT, how_often_filled),
    "06-4": Exercise(Task.PREDICT, tensors_kept),
    "06-5": Exercise(Task.DEBUG, without_a_cycle),
}
GUESSES = {
    "06-a": Guess(
        lambda: sum(simulate(make("pipedream_flush", 6, 100)).peak_in_flight),
        "How many does the last device hold, and the one before it?",
    )
}
