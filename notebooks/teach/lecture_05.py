"""Lecture 5: PipeDream-2BW, double-buffered weights."""

from dataclasses import replace
from typing import Any

from pipelab import Reads, make, simulate
from teach.feedback import (
    Exercise,
    Guess,
    Judged,
    one_moved,
    read_table,
    table,
    understood,
    write,
)

RULE = "# microbatches=2 batches=3 reads=PREVIOUS\n"  # the line above a grid of exercises 3 and 5
ROWS = """
0F0 0F1 0F2 0F3 0B0 0F4 0B1 0U0 0F5 0B2 0B3 0U1 0B4 0B5 0U2
1F0 1B0 1F1 1B1 1U0 1F2 1B2 1F3 1B3 1U1 1F4 1B4 1F5 1B5 1U2
"""


def double_buffered(answer: Any, devices: int, makespan: float, **more: Any) -> Judged:
    """Three mini-batches of two in a valid table under Reads.PREVIOUS.

    Rows in text are given the line that says so; updates may be left out.
    """
    schedule = read_table(answer, RULE)
    said = yield from table(
        schedule, devices=devices, microbatches=6, updates=3, makespan=makespan, **more
    )
    if schedule.reads is not Reads.PREVIOUS:
        kept = replace(schedule, reads=Reads.PREVIOUS).weight_versions
        kind = f"it reads {schedule.reads.name}, another rule than 2BW's."
        yield f"{kind} It keeps versions {kept} under PREVIOUS."
    return said


def first_wrong(answer: Any) -> Judged:
    """(stage, micro-batch) of the first forward that reads the latest version in place of 2BW's."""
    with understood(f"{answer!r} is not a pair (stage, micro-batch)."):
        stage, microbatch = answer = tuple(map(float, answer))
    right = make("pipedream_2bw", 3, 4, batches=3)
    latest = replace(right, reads=Reads.LATEST)
    if (stage, microbatch) == (4, 2):
        hint = "The stage comes first."
    elif stage not in range(3) or microbatch not in range(12):
        hint = "There are stages 0 to 2 and micro-batches 0 to 11."
    elif microbatch < 4:
        hint = "Nothing has been updated by then: everybody reads version 0."
    elif latest.versions[answer] != right.versions[answer]:
        hint = "That one is wrong, but an earlier micro-batch is wrong already, on some stage."
    else:
        hint = "That one reads what 2BW reads. Compare the versions, column by column."
    if (stage, microbatch) != (2, 4):
        yield f"({stage:g}, {microbatch:g}). {hint}"


def reads(k: int, m: int) -> int:
    """The version that micro-batch k reads, of mini-batches of m."""
    return max(k // m - 1, 0)


def beside_gpipe(devices: int, microbatches: int, batches: int) -> float:
    """How many times as long as GPipe 2BW takes."""
    names = "pipedream_2bw", "gpipe"
    tables = (make(name, devices, microbatches, batches=batches) for name in names)
    ours, theirs = (simulate(table).makespan for table in tables)
    return ours / theirs


EXERCISES = {
    # (micro-batch, micro-batches of a mini-batch) -> the version that it reads under 2BW.
    "05-1": write(
        reads,
        [(k, m) for m in (1, 2, 3, 5) for k in range(4 * m)],
        lambda k, m: {
            "So it is with a flush. Is that version made when k starts?": k // m,
            "There is no version before 0.": k // m - 1,
            "An update comes once a mini-batch.": max(k - 1, 0),
            "Micro-batches are counted from 0 here.": max((k - 1) // m - 1, 0),
            "That is one update later than need be.": max(k // m - 2, 0),
        },
        reference=reads,
    ),
    # (devices, weights, activations of a micro-batch) -> the m from which GPipe holds more.
    "05-2": write(
        lambda p, w, kept: p + w // kept + 1,
        [(4, 4, 1), (4, 10, 4), (2, 0.5, 1), (8, 24, 8), (3, 100, 3), (3, 11, 4)],
        lambda p, w, kept: {
            "With this m both hold the same.": p + -(-w // kept),
            "2BW has activations, too: p micro-batches in flight.": w // kept + 1,
            "GPipe has weights, too: one version.": p + 2 * w // kept + 1,
            "Micro-batches are whole, and there both hold the same.": p + w / kept,
        },
    ),
    # Two devices, three mini-batches of two, by 2BW in 21: `ROWS` but for one action's place.
    "05-3": Exercise(double_buffered, devices=2, makespan=21, missing=one_moved(ROWS, RULE)),
    "05-4": Exercise(first_wrong),
    # Four devices, three mini-batches of two, by 2BW in 36.
    "05-5": Exercise(double_buffered, devices=4, makespan=36),
}
GUESSES = {
    "05-a": Guess(
        lambda: simulate(make("pipedream_2bw", 4, 8, batches=5)).makespan,
        "How often does it fill and drain?",
    ),
    "05-b": Guess(
        lambda: beside_gpipe(4, 4, 6),
        "Count in forward-backward pairs: how many for micro-batches, how many to fill and drain?",
        tolerance=0.02,
        slips={4 / 7: "So it would be with endlessly many mini-batches."},
    ),
}
