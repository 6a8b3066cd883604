"""Common ground of the checks: a right answer passes, a wrong one gets a hint that fits it."""

import html
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from enum import Enum
from functools import partial
from itertools import accumulate, pairwise
from math import isfinite
from typing import Any

from pipelab import Costs, Kind, Schedule, simulate


class Skill(Enum):
    """The skill that an exercise trains."""

    PREDICT = "predict a number"
    BUILD = "build a table"
    WRITE = "write a function"
    DEBUG = "find what is wrong"


@dataclass(frozen=True)
class Feedback:
    """The verdict of a check, displayed as its text; passed is None where nothing was tried.

    folded  what a click shows
    """

    passed: bool | None
    text: str
    folded: str = ""

    def __repr__(self) -> str:
        return self.text

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        shown = {"text/plain": self.text}
        if self.folded:
            fold = f"<summary>Show it</summary>{html.escape(self.folded)}"
            shown["text/html"] = f"{html.escape(self.text)}<details>{fold}</details>"
        return shown


NO_NUMBER = TypeError, ValueError, RuntimeError, OverflowError  # of what float() may raise
RIGHT = Feedback(True, "Right.")
NOT_ATTEMPTED = Feedback(None, "Not attempted yet: replace None above, then run this cell again.")


class NotYet(Exception):
    """Why an answer is not right, raised where nothing more can be judged."""


class Exercise:
    """An exercise of a lecture: what kind it is, and what says whether an answer is right.

    judge      (answer, what is asked ...) -> Feedback
    reference  what the lecture goes on with until an answer passes

    >>> Exercise(Skill.PREDICT, number, 4 / 5, "Idle!", {0.2: "The busy share."}).check(0.2)
    Not yet: 0.2. The busy share.
    """

    def __init__(
        self,
        skill: Skill,
        judge: Callable[..., Feedback],
        *asked: Any,
        reference: Any = None,
        **more: Any,
    ) -> None:
        self.skill, self.reference = skill, reference
        self._judge, self._asked, self._more = judge, asked, more

    def check(self, answer: Any) -> Feedback:
        try:
            return self._judge(answer, *self._asked, **self._more)
        except NotYet as why:
            return not_yet(str(why))
        except Exception as error:  # nobody foresees every answer
            reason = str(error).partition("\n")[0]
            return not_yet(f"this answer cannot be judged ({type(error).__name__}: {reason}).")


@contextmanager
def understood(otherwise: str) -> Iterator[None]:
    """A context that reads an answer; NotYet where it is of another kind."""
    try:
        yield
    except NO_NUMBER:
        raise NotYet(otherwise) from None


def called(answer: Any, *arguments: Any, where: str = "here") -> Any:
    """The value of the learner's function; NotYet where it is no function, or raises."""
    if not callable(answer):
        raise NotYet(f"{answer!r} is not a function.")
    try:
        return answer(*arguments)
    except Exception as error:
        raise NotYet(f"{where} it raises {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Guess:
    """A guess made before a run.

    truth      computes the result
    why        a question or remark for whoever was wrong
    tolerance  relative
    """

    truth: Callable[[], float]
    why: str = "Where does the difference come from?"
    tolerance: float = 0.005

    def compare(self, value: float | None) -> Feedback:
        truth = self.truth()
        if value is None:
            return Feedback(None, "Guess first: replace None above.", f"It is {truth:g}.")
        value = read_number(value)
        if is_close(value, truth, self.tolerance):
            return Feedback(True, f"Right: {truth:g}.")
        return Feedback(False, f"You said {value:g}, it is {truth:g}. {self.why}")


def not_yet(why: str) -> Feedback:
    return Feedback(False, f"Not yet: {why}".rstrip())


def read_number(answer: Any) -> float:
    with understood(f"{answer!r} is not a number."):
        return float(_detached(answer))


def number(
    answer: Any,
    truth: float,
    hint: str = "",
    slips: Mapping[Any, str] | None = None,
    tolerance: float = 0.005,
) -> Feedback:
    """Any number within `tolerance` (relative) of the truth, of whatever type.

    slips  numbers that a likely mistake gives: the hint for it, in the place of `hint`

    >>> number(0.8, 4 / 5)
    Right.
    """
    value = read_number(answer)
    if is_close(value, truth, tolerance):
        return RIGHT
    for slip, its_hint in (slips or {}).items():
        if is_close(value, slip, tolerance):
            hint = its_hint
    return not_yet(f"{value:g}. {hint}")


def same_function(
    answer: Any,
    truth: Callable,
    cases: Iterable[tuple],
    slips: Mapping[Callable, str] | None = None,
) -> Feedback:
    """A function that gives what `truth` gives for every case; the first difference is shown.

    It may give numbers, or arrays and nested lists of them. A function that only returns None was
    not attempted.

    slips  functions with a likely mistake, each with the hint for whoever gives all that it gives

    >>> same_function(lambda p: p - 1, lambda p: p, [(2,)])
    Not yet: for (2) it gives 1, right is 2.
    """
    asked, given = [*cases], []
    wrong = ""
    for case in asked:
        where, right = f"for ({', '.join(map(repr, case))})", truth(*case)
        try:
            given.append(called(answer, *deepcopy(case), where=where))  # it may use up a list
        except NotYet as raised:
            return not_yet(wrong or str(raised))
        if not wrong and not is_close(given[-1], right, 1e-6):
            wrong = f"{where} it gives {given[-1]}, right is {_short(right)}."
    if all(value is None for value in given):
        return NOT_ATTEMPTED
    if not wrong:
        return RIGHT
    for slip, hint in (slips or {}).items():
        same = zip(given, asked, strict=True)
        if all(is_close(value, slip(*case), 1e-6) for value, case in same):
            return not_yet(f"{wrong} {hint}")
    return not_yet(wrong)


def choice(answer: Any, right: str, wrong: Mapping[str, str]) -> Feedback:
    """One of several words; each wrong one has its hint.

    >>> choice("a", "b", {"a": "Look at stage 1."})
    Not yet: a. Look at stage 1.
    """
    if not isinstance(answer, str):
        return not_yet(f"{answer!r} is not a word in quotes.")
    if answer == right:
        return RIGHT
    if answer in wrong:
        return not_yet(f"{answer}. {wrong[answer]}")
    return not_yet(f"{answer!r} is none of {', '.join(sorted([right, *wrong]))}.")


def table(
    answer: Schedule | str,
    *,
    devices: int,
    microbatches: int,
    stages: int | None = None,
    updates: int = 1,
    makespan: float | None = None,
    in_flight: int | None = None,
    costs: Costs | None = None,
    missing: Callable[[Schedule], str] = lambda schedule: "",
) -> Feedback:
    """Any valid table that reaches the numbers.

    The answer is a Schedule, or a grid in text, whose updates may be left out.

    stages        default: one a device
    microbatches  in all batches
    makespan      at most this much, under `costs` (default: forward 1, backward 2)
    in_flight     at most so many micro-batches on any device
    missing       what else a table has to reach and does not, in words; "" where it does
    """
    if not isinstance(answer, (str, Schedule)):
        return not_yet(f"{answer!r} is not a table: give a Schedule, or a text, a line a device.")
    try:
        schedule = Schedule.from_grid(answer, "your table") if isinstance(answer, str) else answer
        timeline = simulate(schedule, costs)
    except ValueError as error:
        return Feedback(False, f"Not yet. {error}")
    have = (schedule.devices, schedule.stages, schedule.total, schedule.updates)
    if have != (devices, stages or devices, microbatches, updates):
        text = "{} devices, {} stages, {} micro-batches and {} update(s)"
        asked = text.format(devices, stages or devices, microbatches, updates)
        return not_yet(f"a table with {text.format(*have)}, asked: {asked}.\n{schedule.grid()}")
    if not any(action.kind in (Kind.B, Kind.I) for row in schedule.rows for action in row):
        return not_yet(f"nothing goes back: a backward belongs to each forward.\n{schedule.grid()}")
    span, most, short = timeline.makespan, max(timeline.peak_in_flight), []
    if makespan is not None and span > makespan * (1 + 1e-9):
        short.append(f"makespan {span:g}, to reach: {makespan:g}")
    if in_flight is not None and most > in_flight:
        short.append(f"{most} micro-batches in flight, to reach: {in_flight}")
    if why := missing(schedule):
        short.append(why)
    if short:
        return not_yet(f"{'; '.join(short)}.\n{schedule.grid()}")
    return Feedback(True, f"Right: makespan {span:g}, at most {most} in flight.\n{schedule.grid()}")


def balance(answer: Any, seconds: Sequence[float], stages: int, bottleneck: float) -> Feedback:
    """Any split of layers with these `seconds` whose slowest stage takes at most `bottleneck`.

    >>> balance([2, 2], [1, 1, 1, 3], 2, 3)
    Not yet: the stages take 2, 4; the slowest has to come down to 3.
    """
    with understood(f"{answer!r} is not a list of whole numbers."):
        counts = [operator.index(count) for count in answer]
    if len(counts) != stages or sum(counts) != len(seconds) or min(counts) < 1:
        return not_yet(f"{counts} does not share {len(seconds)} layers among {stages} stages.")
    times = [sum(seconds[a:b]) for a, b in pairwise(accumulate(counts, initial=0))]
    if max(times) > bottleneck * (1 + 1e-9):
        shown = ", ".join(f"{x:g}" for x in times)
        return not_yet(f"the stages take {shown}; the slowest has to come down to {bottleneck:g}.")
    return Feedback(True, f"Right: the slowest stage takes {max(times):g}.")


def is_close(value: Any, truth: Any, tolerance: float = 0.005) -> bool:
    """Whether numbers, or arrays of them, are the same within a relative tolerance."""
    value, truth = _plain(value), _plain(truth)
    if isinstance(truth, list):
        of_one_length = isinstance(value, list) and len(value) == len(truth)
        return of_one_length and all(map(partial(is_close, tolerance=tolerance), value, truth))
    try:
        value, truth = float(value), float(truth)
    except NO_NUMBER:
        return False
    near = abs(value - truth) <= 1e-12 + tolerance * abs(truth)
    return value == truth or (near and isfinite(truth))


def _plain(value: Any) -> Any:
    """An array, a tensor or a sequence as a list, whose items may be such again."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return [*value] if isinstance(value, (tuple, range)) else value


def _detached(value: Any) -> Any:
    """A tensor under autograd without it: no number can be read from it otherwise."""
    return value.detach() if hasattr(value, "detach") else value


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


# The usual exercises of every kind; `debug` takes a judge first.
predict = partial(Exercise, Skill.PREDICT, number)
build = partial(Exercise, Skill.BUILD, table)
write = partial(Exercise, Skill.WRITE, same_function)
debug = partial(Exercise, Skill.DEBUG)
