"""Lecture 3: PipeDream, 1F1B without a flush."""

from collections.abc import Callable, Sequence
from typing import Any

from pipelab import Reads, Schedule, make, simulate
from teach.feedback import Exercise, Guess, Judged, predict, read_table, table, write

RATE = 0.001
UPDATES = "# per_update=1\n"  # the line above a grid that says: an update after every micro-batch


def row_of_device_1(answer: Any) -> Judged:
    """A row that holds two micro-batches, put between the 1F1B rows of three others."""
    if not isinstance(answer, str):
        yield f'{answer!r} is not a row in text, such as "1F0 1F1".'
    cells = " ".join(cell for cell in answer.split() if "U" not in cell)
    known = {f"1{kind}{k}" for kind in "FB" for k in range(6)} | {"."}
    strange = [cell for cell in cells.split() if cell not in known]
    if strange or not cells:
        what = f"{strange[0]} is none of these" if strange else "the row is empty"
        yield f"device 1 does 1F0 to 1F5 and 1B0 to 1B5; {what}."
    rows = [" ".join(map(str, row)) for row in make("pipedream_flush", 4, 6).rows]
    rows = [row.replace(f"{s}U0", "") for s, row in enumerate(rows)]
    grid = UPDATES + "\n".join([rows[0], cells, *rows[2:]])
    said = yield from table(grid, devices=4, microbatches=6, updates=6, makespan=39)
    held = Schedule.from_grid(grid).peak_in_flight[1]
    if held > 2:
        yield f"device 1 holds {held} micro-batches, it has room for 2. Alternate sooner."
    return said


def vertical_sync(t: int, s: int, n: int) -> tuple[int, int]:
    read, made = max(0, t - (n - 1)), max(0, t - (n - 1 - s))
    return read, made - read


def trained(row: str, samples: Sequence[tuple[float, float]], uses: Callable) -> list[float]:
    """The weights that h = b (a x) has after a row of F and B, each B with its update.

    uses  weights at a forward, and at its backward -> those that h, and the gradient, have
    """
    weights = [3.0, 5.0]
    at_forward = {}
    for action in row.split():
        k = int(action[1:])
        x, y = samples[k]
        if action[0] == "F":
            at_forward[k] = weights
        else:
            (a, b), (at_a, at_b) = uses(at_forward[k], weights)
            slope = 2 * (b * a * x - y) * x
            weights = [weights[0] - RATE * slope * at_b, weights[1] - RATE * slope * at_a]
    return weights


def two_versions(answer: Any) -> Judged:
    """Three devices, six micro-batches: as fast as 1F1B, with two versions at most."""

    def missing(schedule: Schedule) -> str:
        if schedule.reads is not Reads.LATEST:
            return f"it reads {schedule.reads.name}, another rule than weight stashing"
        kept = schedule.weight_versions
        return f"versions kept {kept}, must be at most 2" if max(kept) > 2 else ""

    schedule = read_table(answer, UPDATES)
    return table(schedule, devices=3, microbatches=6, updates=6, makespan=24, missing=missing)


SAMPLES = [(2, 10), (1, 4), (3, 8), (2, 6), (1, 9), (2, 5)]
ROWS = (
    "F0 B0 F1 B1",
    "F0 F1 F2 B0 B1 B2",
    "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
    "F0 F1 B0 F2 B1 B2",
)
EXERCISES = {
    # Weight stashing on device 1 of six, an update after every second backward.
    "03-1": predict(
        3,
        "How many micro-batches are in flight there, and which of them read the same version?",
        {
            5: "So it is with an update after every backward.",
            2: "Two older ones have readers at a time; is the newest one of them?",
            2.5: "At most: where does a pair begin?",
            6: "That many micro-batches are not in flight there, nor versions.",
        },
    ),
    "03-2": Exercise(row_of_device_1),
    # (t, s, n) -> the version that stage s reads for micro-batch t, and how stale it is there.
    "03-3": write(
        vertical_sync,
        [(t, s, n) for n in range(1, 6) for s in range(n) for t in range(8)],
        lambda t, s, n: {
            "That is what stashing reads.": (max(0, t - (n - 1 - s)), 0),
            "There is no version before 0.": (t - (n - 1), s),
            "How many has it made at the very start?": (max(0, t - (n - 1)), s),
            "Updates of its own row count, not those of the last stage.": (
                max(0, t - (n - 1)),
                min(t, n - 1),
            ),
        },
    ),
    # (row, samples) -> the weights a and b after training with stashed weights.
    "03-4": write(
        lambda row, samples: trained(row, samples, lambda then, now: (then, then)),
        [(row, SAMPLES) for row in ROWS],
        lambda row, samples: {
            "As before: the forward's h, but weights that have moved since.": trained(
                row, samples, lambda then, now: (then, now)
            ),
            "That is the gradient of the newest weights: the forward was an older one.": trained(
                row, samples, lambda then, now: (now, now)
            ),
        },
    ),
    "03-5": Exercise(two_versions),
}
GUESSES = {
    "03-a": Guess(
        lambda: simulate(make("pipedream", 4, 12)).makespan,
        "Twelve times forward and backward on the last device: what comes before, what after?",
    ),
    "03-b": Guess(
        lambda: (
            simulate(make("pipedream", 4, 4, batches=2)).makespan
            / simulate(make("gpipe", 4, 4, batches=2)).makespan
        ),
        "How often does each fill and drain while it runs two mini-batches of four micro-batches?",
        tolerance=0.05,
        slips={
            42 / 33: "That is GPipe beside stashing; as long is the inverse.",
            24 / 42: "So it is if stashing had no bubble. It fills and drains once.",
        },
    ),
}
