"""Lecture 7: interleaved stages."""

from collections.abc import Sequence

from pipelab import Costs, Schedule, make, simulate
from pipelab.teach.feedback import Guess, build, predict, write

DEADLOCK = """
0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
1F0 1F1 3F0 3B0 3F1 3B1 1B0 1F2 1B1 3F2 3B2 1B2
"""


def most_in_flight(p: int, v: int, m: int, d: int) -> int:
    return make("interleaved", p, m, virtual=v).peak_in_flight[d]


def too_many_moved(schedule: Schedule) -> str:
    rows = zip(Schedule.from_grid(DEADLOCK).rows, schedule.rows, strict=True)
    moved = [_one_moved(before, after) for before, after in rows if before != after]
    return "" if moved == [True] else "valid, but more than one action has moved"


def _one_moved(before: Sequence, after: Sequence) -> bool:
    """Whether two rows are the same without some action."""
    return any(
        [a for a in before if a != moved] == [a for a in after if a != moved] for moved in before
    )


EXERCISES = {
    # Two devices, four micro-batches, four chunks: saved bubble over added messages.
    "07-1": predict(
        9 / 40,
        "Bubble saved, over the messages that are added to the critical path.",
        {
            3 / 16: "That is the crossing of two micro-batches: 1F1B pays in every round.",
            0.25: "That is a chunk's forward: up to there messages hide. Those of the fill, too?",
            3 / 10: "All of the bubble is not saved: what is left of it with v = 4?",
        },
    ),
    # (p, v, m, device) -> chunks in flight.
    "07-2": write(
        most_in_flight,
        [(4, 2, 8, 0), (4, 2, 8, 3), (2, 3, 4, 1), (3, 4, 9, 1), (4, 2, 4, 0), (1, 2, 1, 0)],
        lambda p, v, m, d: {
            "There are only m v forwards in all.": (v + 1) * p - 2 * d - 1,
            "The warm-up, and then one more.": 2 * (p - d - 1) + (v - 1) * p,
            "That has no slack: the factor 2.": (p - d - 1) + (v - 1) * p + 1,
            "That is device 0. Later ones run less far ahead.": p * v + p - 1,
        },
    ),
    # Five micro-batches through four chunks in 33, where rounds of three and two hold six.
    "07-3": build(devices=2, stages=4, microbatches=5, makespan=33, in_flight=5),
    # A valid table that is DEADLOCK but for one action's place in its row.
    "07-4": build(devices=2, stages=4, microbatches=3, missing=too_many_moved),
    # Nine micro-batches through eight chunks in 63, twelve in flight.
    "07-5": build(devices=4, stages=8, microbatches=9, makespan=63, in_flight=12),
}
GUESSES = {
    "07-a": Guess(
        lambda: simulate(make("interleaved", 4, 12, virtual=2), Costs().split(2)).makespan,
        "The work stays 36. By how much are filling and draining shorter?",
    )
}
