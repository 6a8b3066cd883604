"""Guesses and exercises for the lectures: any right answer passes, a wrong one is drawn."""

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from pipelab.costs import Costs
from pipelab.schedule import Schedule
from pipelab.simulate import simulate


@dataclass(frozen=True)
class Feedback:
    """What a check says, displayed as its text; passed is None where nothing was tried."""

    passed: bool | None
    text: str

    def __repr__(self) -> str:
        return self.text


NOT_ATTEMPTED = Feedback(None, "Not attempted yet: replace None above, then run both cells again.")


def guess(value: float | None, truth: float, tolerance: float = 0.005) -> Feedback:
    """Compare a guess made before the run with the result; `tolerance` is relative.

    >>> guess(30, 33)
    You said 30, it is 33. Where does the difference come from?
    """
    if value is None:
        return Feedback(None, f"No guess made. It is {truth:g}.")
    if _close(value, truth, tolerance):
        return Feedback(True, f"Right: {truth:g}.")
    return Feedback(
        False, f"You said {value:g}, it is {truth:g}. Where does the difference come from?"
    )


def check_number(answer: Any, truth: float, tolerance: float = 0.005, hint: str = "") -> Feedback:
    """Any number within `tolerance` (relative) of the truth, of whatever type.

    >>> check_number(0.8, 4 / 5)
    Right.
    """
    if answer is None:
        return NOT_ATTEMPTED
    try:
        value = float(answer)
    except (TypeError, ValueError):
        return Feedback(False, f"Not yet: {answer!r} is not a number.")
    if _close(value, truth, tolerance):
        return Feedback(True, "Right.")
    return Feedback(False, f"Not yet: {value:g}. {hint}".rstrip())


def check_function(function: Callable | None, truth: Callable, cases: Iterable[tuple]) -> Feedback:
    """A function that gives what `truth` gives for every case; the first difference is shown.

    >>> check_function(lambda p: p - 1, lambda p: p, [(2,)])
    Not yet: for (2) it gives 1, right is 2.
    """
    if function is None:
        return NOT_ATTEMPTED
    answers = []
    for case in cases:
        shown, right = ", ".join(map(repr, case)), truth(*case)
        try:
            answers.append(function(*case))
            wrong = answers[-1] is not None and not _close(float(answers[-1]), right, 1e-6)
        except Exception as error:
            return Feedback(
                False, f"Not yet: for ({shown}) it raises {type(error).__name__}: {error}"
            )
        if wrong or (answers[-1] is None and any(a is not None for a in answers)):
            return Feedback(
                False, f"Not yet: for ({shown}) it gives {answers[-1]}, right is {right:g}."
            )
    return NOT_ATTEMPTED if all(a is None for a in answers) else Feedback(True, "Right.")


def check_schedule(
    answer: Schedule | str | None,
    *,
    devices: int,
    microbatches: int,
    makespan: float | None = None,
    in_flight: int | None = None,
    costs: Costs | None = None,
) -> Feedback:
    """Any valid table that reaches the numbers: one batch, a stage on each device, one update.

    The answer is a Schedule, or a grid in text, whose updates may be left out.

    makespan   at most this much, under `costs` (default: forward 1, backward 2)
    in_flight  at most so many micro-batches on any device
    """
    if answer is None:
        return NOT_ATTEMPTED
    try:
        schedule = Schedule.from_grid(answer, "your table") if isinstance(answer, str) else answer
        timeline = simulate(schedule, costs)
    except (ValueError, AttributeError) as error:
        return Feedback(False, f"Not yet. {error}")
    have = (schedule.devices, schedule.stages, schedule.total, schedule.updates)
    want = (devices, devices, microbatches, 1)
    if have != want:
        text = "{} devices, {} stages, {} micro-batches and {} update(s)"
        return Feedback(
            False,
            f"Not yet: a table with {text.format(*have)}, asked were {text.format(*want)}.\n"
            f"{schedule.grid()}",
        )
    span, most, short = timeline.makespan, max(timeline.peak_in_flight), []
    if makespan is not None and span > makespan * (1 + 1e-9):
        short.append(f"makespan {span:g}, to reach: {makespan:g}")
    if in_flight is not None and most > in_flight:
        short.append(f"{most} micro-batches in flight, to reach: {in_flight}")
    verdict = f"Right: makespan {span:g}, at most {most} in flight"
    if short:
        verdict = f"Not yet: {'; '.join(short)}"
    return Feedback(not short, f"{verdict}.\n{schedule.grid()}")


def check_balance(
    answer: Sequence[int] | None, seconds: Sequence[float], stages: int, bottleneck: float
) -> Feedback:
    """Any split of layers with these `seconds` whose slowest stage takes at most `bottleneck`.

    >>> check_balance([2, 2], [1, 1, 1, 3], 2, 3)
    Not yet: the stages take 2, 4; the slowest has to come down to 3.
    """
    if answer is None:
        return NOT_ATTEMPTED
    try:
        counts = [operator.index(count) for count in answer]
    except TypeError:
        return Feedback(False, f"Not yet: {answer!r} is not a list of whole numbers.")
    if len(counts) != stages or sum(counts) != len(seconds) or min(counts) < 1:
        return Feedback(
            False, f"Not yet: {counts} does not share {len(seconds)} layers among {stages} stages."
        )
    times = [sum(seconds[a:b]) for a, b in pairwise(accumulate(counts, initial=0))]
    if max(times) > bottleneck * (1 + 1e-9):
        shown = ", ".join(f"{x:g}" for x in times)
        return Feedback(
            False,
            f"Not yet: the stages take {shown}; the slowest has to come down to {bottleneck:g}.",
        )
    return Feedback(True, f"Right: the slowest stage takes {max(times):g}.")


def _close(value: float, truth: float, tolerance: float) -> bool:
    return abs(value - truth) <= tolerance * abs(truth) + 1e-12
