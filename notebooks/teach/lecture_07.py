"""Lecture 7: interleaved stages."""

from functools import partial

from pipelab import Costs, Kind, Schedule, make, simulate
from teach.feedback import Guess, build, one_moved, predict, write

DEADLOCK = """
0F0 0F1 0F2 2F0 2F1 2F2 2B0 2B1 2B2 0B0 0B1 0B2
1F0 1F1 3F0 3B0 3F1 3B1 1B0 1F2 1B1 3F2 3B2 1B2
"""


def most_in_flight(p: int, v: int, m: int, d: int) -> int:
    return make("interleaved", p, m, virtual=v).peak_in_flight[d]


def beside_1f1b(p: int, m: int) -> float:
    """How many times as long as 1F1B a table with two chunks a device takes."""
    tables = make("interleaved", p, m, virtual=2), make("pipedream_flush", p, m)
    ours, theirs = (simulate(t, Costs().over(t.placement)).makespan for t in tables)
    return ours / theirs


def another_kind(schedule: Schedule) -> str:
    """What of a table is not chunks in turn, with backwards in one piece; "" if it is that."""
    if any(action.kind is Kind.W for row in schedule.rows for action in row):
        return "a backward is one action here (lecture 12 divides it)"
    for stage, device in enumerate(schedule.placement):
        if device != stage % schedule.devices:
            return f"stage {stage} is on device {device}, must be on {stage % schedule.devices}"
    return ""


# Two chunks a device, half of its layers each.
chunks = partial(build, costs=Costs().split(2), missing=another_kind)

EXERCISES = {
    # Four devices, four micro-batches, four chunks, F = B: saved bubble over added messages.
    "07-1": predict(
        4.5 / (30 - 10),
        "Bubble saved, over the messages that are added to the critical path.",
        {
            4.5 / 30: "1F1B has messages on its path, too.",
            4.5 / 24: "1F1B has one trip more: that of the filling and draining left to it.",
            4.5
            / 18: "Up to 0.25 messages hide; and 1F1B's last trip is among devices 1 to 3 alone.",
            6 / 20: "Some of the bubble is left with v = 4.",
            6.75 / 20: "Here a backward takes 1, not 2.",
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
    # Five micro-batches through four chunks in 16.5, where rounds of three and two hold six.
    "07-3": chunks(devices=2, stages=4, microbatches=5, makespan=16.5, in_flight=5),
    # A valid table that is DEADLOCK but for one action's place in its row.
    "07-4": build(devices=2, stages=4, microbatches=3, missing=one_moved(DEADLOCK)),
    # Nine micro-batches through eight chunks in 31.5, twelve in flight.
    "07-5": chunks(devices=4, stages=8, microbatches=9, makespan=31.5, in_flight=12),
}
GUESSES = {
    "07-a": Guess(
        lambda: simulate(make("interleaved", 4, 12, virtual=2), Costs().split(2)).makespan,
        "The work stays 36. By how much are filling and draining shorter?",
    ),
    "07-b": Guess(
        lambda: beside_1f1b(2, 2),
        "The work takes 6. How long are filling and draining, with and without chunks?",
        tolerance=0.02,
        slips={1 / 2: "The bubble is halved, not the work."},
    ),
}
