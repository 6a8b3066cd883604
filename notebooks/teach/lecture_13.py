"""Lecture 13: how good a schedule can be."""

import math
from typing import Any

from pipelab import Costs, Schedule
from pipelab.optimize.order import bound, memory_used
from teach.feedback import (
    NOT_ATTEMPTED,
    Exercise,
    Guess,
    Judged,
    build,
    called,
    choice,
    is_close,
    predict,
    write,
)

SLOW_MIDDLE = Costs(forward=[1, 2, 1], input_grad=[1, 2, 1], weight_grad=1)
CLAIMED = """
0F0 0F1 0I0 0F2 0I1 0F3 0W0 0W1 0I2 0F4 0I3 0F5 0W2 0W3 0I4 0W4 0I5 0W5
1F0 1F1 1I0 1W0 1I1 1F2 1W1 1F3 1I2 1W2 1I3 1F4 1W3 1F5 1I4 1W4 1I5 1W5
2F0 2I0 2F1 2I1 2W0 2W1 2F2 2I2 2F3 2I3 2W2 2W3 2F4 2I4 2F5 2I5 2W4 2W5
"""


def claimed() -> Schedule:
    """Three devices, six micro-batches: two at a time between F and I, more until their W."""
    return Schedule.from_grid(CLAIMED, "claimed")


def trip(p, f, i, w, c):
    return p * (f + i) + 2 * (p - 1) * c + w


def sound_bound(answer: Any) -> Judged:
    """(f, i, w, m) -> a number that no order beats, and as large as reason 1.

    Any that is at least as large as with `sum(I before) + W of stage 0` for the way back passes.
    """
    cases = [
        ([1] * 4, [1] * 4, [1] * 4, 8),
        ([1] * 4, [1] * 4, [1] * 4, 2),
        ([1, 2, 1], [1, 2, 1], [1, 2, 1], 6),
        ([2, 1, 1], [3, 1, 1], [1, 1, 2], 3),
        ([1, 1, 1], [1, 1, 1], [1, 1, 5], 1),
        ([1, 1], [1, 1], [1, 5], 1),
        ([1, 1], [1, 1], [5, 1], 1),
        ([1, 1, 1], [4, 1, 1], [1, 1, 1], 1),
        ([1, 2, 3], [3, 1, 2], [4, 1, 2], 2),
        ([2, 1, 1], [1, 2, 1], [3, 2, 1], 3),
        ([4, 3, 6], [5, 5, 6], [1, 4, 6], 3),
        ([2, 1, 4, 1], [4, 4, 5, 1], [6, 4, 3, 6], 4),
        ([5, 1], [6, 4], [1, 5], 4),
    ]
    for f, i, w, m in cases:
        where = f"for {f}, {i}, {w}, {m}"
        value = called(answer, f, i, w, m, where=where)
        if value is None:
            yield NOT_ATTEMPTED
        p, found = len(f), f"{where} it gives {value}"
        if not is_close(value, value) or value > bound(Costs(f, i, w), p, m).makespan + 1e-9:
            hint = "Which W comes after the way back, and what can a device do in the meantime?"
            yield f"{found}: not sound, because some order is faster. {hint}"
        each = (sum(f[:s]) + m * (f[s] + i[s]) + max(sum(i[:s]) + w[0], m * w[s]) for s in range(p))
        if value < (least := max(each)) - 1e-9:
            yield f"{found}: sound, but too small: reason 1 already gives {least}."
    return ": no order beats it, and it is at least as large as reason 1."


EXERCISES = {
    "13-1": build(
        devices=3, microbatches=4, costs=SLOW_MIDDLE, makespan=21, in_flight=2, by_hand=True
    ),
    # Eight devices, two micro-batches, slow links.
    "13-2": predict(
        bound(Costs(transfer=0.5), 8, 2).makespan,
        "Add three times: the first micro-batch's way down and back, what the second one adds, and "
        "the work that is left at the end.",
        {
            6.0: "That is the work alone. When does the last device get an input?",
            19.0: "That leaves out the time of the messages.",
            22.5: "Messages also take time on the way back.",
            25.0: "The last W is missing.",
            24.0: "The second micro-batch cannot start before the first one has left device 0.",
            27.0: "Device 0 can do its first W before the last gradient arrives.",
            28.0: "The last device can do its two W during the way back.",
        },
    ),
    # (p, m, room, f, i, w, c) -> what room on device 0 allows, of equal stages.
    "13-3": write(
        lambda p, m, room, *times: m * trip(p, *times) / room,
        [
            (4, 8, 1, 1, 1, 1, 0),
            (4, 8, 2, 1, 1, 1, 0),
            (3, 5, 2, 2, 1, 3, 0.5),
            (5, 6, 2, 1, 2, 1, 1),
        ],
        lambda p, m, room, f, i, w, c: {
            "A place becomes free after W, not after I.": m * trip(p, f, i, 0, c) / room,
            "Count the messages in both directions.": m * trip(p, f, i, w, c / 2) / room,
            "Device 0 does not wait for the other devices' W.": (
                m * trip(p, f, i + w, 0, c) / room
            ),
            "Messages take time in both directions.": m * trip(p, f, i, w, 0) / room,
            "That is device 0's own work. A micro-batch keeps its place for the whole trip.": m
            * (f + i + w),
            "Do not round up: in the last turn some places may stay empty.": (
                math.ceil(m / room) * trip(p, f, i, w, c)
            ),
            "`bound` gives that: it counts whole turns. Here, count places times seconds.": (
                bound(Costs(f, i, w, transfer=c), p, m, room).by["memory turnover"]
            ),
            "That is for one place. How many places are there?": m * trip(p, f, i, w, c),
            "That is one micro-batch's share. How many micro-batches are there?": trip(
                p, f, i, w, c
            )
            / room,
        },
    ),
    "13-4": Exercise(sound_bound),
    # What the claimed table holds.
    "13-5": predict(
        max(memory_used(claimed(), Costs())),
        "A micro-batch is in flight from its F to its W.",
        {
            2: "The claim says so, but counts only F to I. What is kept until W?",
            3: "Go along row 0: add one at each F, and subtract one at each W.",
            6: "Some micro-batches are done before the last one starts.",
        },
    ),
    # 198, of which the proof says: none is faster than 189.
    "13-6": Exercise(
        choice,
        "between",
        {
            "better": "The line does not say that a better one exists: 198 may be the best.",
            "best": "It may be, but there is no proof: only times below 189 are ruled out.",
            "broken": "Nothing is broken. There need not be a schedule that reaches a bound.",
        },
    ),
}
GUESSES = {
    "13-a": Guess(
        lambda: bound(Costs([1, 2, 1], [1, 2, 1], [1, 2, 1]), 3, 6).makespan,
        "Which device is the busiest? When can it start? Can W fill the way back?",
    )
}
