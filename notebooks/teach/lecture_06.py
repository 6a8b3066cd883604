"""Lecture 6: PipeDream-Flush, and what activation memory is."""

from typing import Any

from pipelab import Schedule, make, simulate
from teach.feedback import Exercise, Guess, Judged, build, called, predict, table, write


def without_a_cycle(answer: Any) -> Judged:
    """(p, m) -> a valid table in GPipe's time, each device but the last a forward further ahead."""
    for p, m in ((3, 4), (4, 8), (4, 2), (1, 3), (2, 1)):
        made = called(answer, p, m, where=f"for ({p}, {m})")
        if not isinstance(made, Schedule):
            yield f"for ({p}, {m}) it gives {made!r}, not a table."
        for fault in table(made, devices=p, microbatches=m, makespan=(m + p - 1) * 3):
            yield f"{fault}\nThis is for p = {p}, m = {m}."
        asked = [*(min(m, p - s + 1) for s in range(p - 1)), 1]
        if made.peak_in_flight != asked:
            yield f"for ({p}, {m}) the devices hold {made.peak_in_flight}; they must hold {asked}."


def beside_gpipe() -> float:
    """How many times as long as GPipe 1F1B takes, in the simulator."""
    flush, gpipe = (simulate(make(name, 4, 8)).makespan for name in ("pipedream_flush", "gpipe"))
    return flush / gpipe


EXERCISES = {
    # Three devices, five micro-batches: GPipe's time with three in flight.
    "06-1": build(devices=3, microbatches=5, makespan=21, in_flight=3, by_hand=True),
    # (stage, p, m, bytes of a micro-batch in all stages) -> bytes held under 1F1B with a flush.
    "06-2": write(
        lambda s, p, m, a: min(m, p - s) * a / p,
        [(0, 4, 8, 100), (3, 4, 8, 90), (1, 4, 2, 60), (0, 1, 5, 7), (2, 8, 3, 16), (0, 3, 2, 10)],
        lambda s, p, m, a: {
            "There are not more micro-batches than m.": (p - s) * a / p,
            "a counts all stages; this is one of p.": min(m, p - s) * a,
            "That is GPipe.": m * a / p,
            "And the one that it works on?": min(m, p - s - 1) * a / p,
        },
    ),
    # Sixteen samples on four devices with room for eight: GPipe's time over that of 1F1B.
    "06-3": predict(
        2 * (8 + 3) / (16 + 3),
        "How often does each fill and drain?",
        {
            1: "GPipe has room for eight: it fills and drains twice.",
            2: "Only if 1F1B filled and drained in no time; and it holds four samples at the most.",
            19 / 22: "The other way round: GPipe's time over 1F1B's.",
        },
    ),
    # Numbers a sample that x + W2 relu(W1 norm(x)) has to keep: x, and the ReLU's output.
    "06-4": predict(
        8 + 32,
        "What do the gradients of W1 and W2 need, and the backwards of relu and norm?",
        {
            39: "A tensor is kept whole: all of the ReLU's output.",
            48: "norm(x) follows from x.",
            72: "The ReLU's input is kept for nothing: its output says where it passed.",
            80: "norm(x) follows from x, and the ReLU's output says where it passed.",
            32: "The gradient of W1 needs its input.",
            8: "A matrix product lies between x and what W2's gradient needs.",
        },
    ),
    "06-5": Exercise(without_a_cycle),
}
GUESSES = {
    "06-a": Guess(
        lambda: sum(simulate(make("pipedream_flush", 6, 100)).peak_in_flight),
        "How many does the last device hold, and the one before it?",
    ),
    "06-b": Guess(
        lambda: make("pipedream_flush", 4, 8).peak_in_flight[3] / 8,
        "How many of the eight micro-batches are in flight there?",
        slips={4 / 8: "That is device 0."},
    ),
    "06-c": Guess(
        beside_gpipe,
        "Each fills and drains once: does the order in between change that?",
        tolerance=0.02,
        slips={1 / 2: "That is the memory. Is less time idle, too?"},
    ),
}
