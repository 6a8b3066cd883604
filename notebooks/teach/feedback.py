"""Common ground of the checks: a right answer passes, a wrong one gets a hint that fits it.

A judge is a generator of what is wrong with an answer. The first thing that it yields is the
verdict, so that what follows may take for granted that this is right. Where it yields nothing the
answer passes, with the words that the judge returns, if any.
"""

import html
import operator
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from math import isfinite
from queue import Empty
from typing import Any

from pipelab import SCHEDULES, Costs, Kind, Schedule, simulate


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


Judged = Generator[str | Feedback, None, Any]  # what is wrong -> words for what is right
NO_NUMBER = TypeError, ValueError, RuntimeError, OverflowError  # of what float() may raise
NOT_ATTEMPTED = Feedback(None, "Not attempted yet: replace None above, then run this cell again.")


class NotYet(Exception):
    """Why an answer is not right, raised where nothing more can be judged."""


class Exercise:
    """An exercise of a lecture: what says whether an answer is right.

    judge      (answer, what is asked ...) -> what is wrong, see the module
    reference  what the lecture goes on with until an answer passes

    >>> Exercise(number, 4 / 5, "Idle!", {0.2: "The busy share."}).check(0.2)
    Not yet: 0.2. The busy share.
    """

    def __init__(
        self, judge: Callable[..., Judged], *asked: Any, reference: Any = None, **more: Any
    ) -> None:
        self.reference = reference
        self._judge = lambda answer: judge(answer, *asked, **more)

    def check(self, answer: Any) -> Feedback:
        try:
            wrong = next(self._judge(answer))
        except StopIteration as end:
            return Feedback(True, f"Right{end.value or '.'}")
        except NotYet as why:
            wrong = str(why)
        except Exception as error:  # nobody foresees every answer
            reason = _first_line(error)
            wrong = f"this answer cannot be checked ({type(error).__name__}: {reason})."
        return wrong if isinstance(wrong, Feedback) else not_yet(wrong)


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


def in_threads(jobs: Iterable[Callable[[], Any]]) -> tuple[list[Any], bool]:
    """The values of functions that run side by side; whether one gave up waiting for a queue.

    NotYet where one raises.
    """
    with ThreadPoolExecutor() as pool:
        futures = [pool.submit(job) for job in jobs]
    errors = [error for future in futures if (error := future.exception())]
    for error in errors:
        if isinstance(error, NotYet):
            raise error
        if not isinstance(error, Empty):
            raise NotYet(f"it raises {type(error).__name__}: {_first_line(error)}")
    return [future.exception() or future.result() for future in futures], bool(errors)


@dataclass(frozen=True)
class Guess:
    """A guess made before a run.

    truth      computes the result
    why        a question or remark for whoever was wrong
    tolerance  relative
    slips      numbers that a likely mistake gives: the remark for it, in the place of `why`
    """

    truth: Callable[[], float]
    why: str = "Where does the difference come from?"
    tolerance: float = 0.005
    slips: Mapping[float, str] = field(default_factory=dict)

    def compare(self, value: float | None) -> Feedback:
        truth = self.truth()
        if value is None:
            return Feedback(None, "Guess first: replace None above.", f"It is {truth:g}.")
        value = read_number(value)
        if is_close(value, truth, self.tolerance):
            return Feedback(True, f"Right: {truth:g}.")
        why = next((its for slip, its in self.slips.items() if is_close(value, slip)), self.why)
        return Feedback(False, f"You said {value:g}, it is {truth:g}. {why}")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


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
) -> Judged:
    """Any number as close as `is_close` has it, of whatever type.

    slips  numbers that a likely mistake gives: the hint for it, in the place of `hint`

    >>> predict(4 / 5).check(0.8)
    Right.
    """
    value = read_number(answer)
    for slip, its_hint in (slips or {}).items():
        if is_close(value, slip):
            hint = its_hint
    if not is_close(value, truth):
        yield f"{value:g}. {hint}"


def same_function(
    answer: Any,
    truth: Callable,
    cases: Iterable[tuple],
    slips: Callable[..., Mapping[str, Any]] = lambda *case: {},
) -> Judged:
    """A function that gives what `truth` gives for every case; the first difference is shown.

    It may give numbers, or arrays and nested lists of them. A function that only returns None was
    not attempted.

    slips  hints, each with what a likely mistake gives for a case: the hint for whoever gives that
           for all of them

    >>> write(lambda p: p, [(2,)], lambda p: {"That is one less.": p - 1}).check(lambda p: p - 1)
    Not yet: for (2) it gives 1, but 2 is right. That is one less.
    """
    asked, given = [*cases], []
    wrong = ""
    for case in asked:
        where, right = f"for ({', '.join(map(repr, case))})", truth(*case)
        try:
            given.append(called(answer, *deepcopy(case), where=where))  # it may use up a list
        except NotYet as raised:
            yield wrong or str(raised)
        if not wrong and not is_close(given[-1], right, 1e-6):
            wrong = f"{where} it gives {given[-1]}, but {_short(right)} is right."
    if all(value is None for value in given):
        yield NOT_ATTEMPTED
    if not wrong:
        return
    mistakes = [slips(*case) for case in asked]
    for hint in mistakes[0]:
        pairs = zip(given, mistakes, strict=True)
        if all(is_close(value, mistake[hint], 1e-6) for value, mistake in pairs):
            yield f"{wrong} {hint}"
    yield wrong


def choice(answer: Any, right: str, wrong: Mapping[str, str]) -> Judged:
    """One of several words; each wrong one has its hint.

    >>> Exercise(choice, "b", {"a": "Look at stage 1."}).check("a")
    Not yet: a. Look at stage 1.
    """
    if not isinstance(answer, str):
        yield f"{answer!r} is not a word in quotes."
    words = {word.lower(): word for word in (right, *wrong)}
    word = words.get(answer.strip().lower(), "")
    if word in wrong:
        yield f"{answer}. {wrong[word]}"
    if word != right:
        yield f"{answer!r} is not an answer: choose from {', '.join(sorted([right, *wrong]))}."


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
    by_hand: bool = False,
) -> Judged:
    """Any valid table that reaches the numbers.

    The answer is a Schedule, or a grid in text, whose updates may be left out.

    stages        default: one a device
    microbatches  in all batches
    makespan      at most this much, under `costs` (default: forward 1, backward 2)
    in_flight     at most so many micro-batches on any device
    missing       what else a table has to reach and does not, in words; "" where it does
    by_hand       whether the library's own tables are refused
    """
    schedule = read_table(answer)
    if by_hand and schedule.name in {*SCHEDULES, "search"}:
        yield f"that is the library's {schedule.name}: write the rows yourself, one line a device."
    try:
        timeline = simulate(schedule, costs)
    except ValueError as error:
        yield str(error)
    have = (schedule.devices, schedule.stages, schedule.total, schedule.updates)
    if have != (devices, stages or devices, microbatches, updates):
        text = "{} devices, {} stages, {} micro-batches and {} update(s)"
        asked = text.format(devices, stages or devices, microbatches, updates)
        yield (
            f"this table has {text.format(*have)}. The exercise asks for {asked}.\n"
            f"{schedule.grid()}"
        )
    if not any(action.kind in (Kind.B, Kind.I) for row in schedule.rows for action in row):
        yield f"there is no backward: each forward needs one.\n{schedule.grid()}"
    span, most, short = timeline.makespan, max(timeline.peak_in_flight), []
    if makespan is not None and span > makespan * (1 + 1e-9):
        short.append(f"makespan {span:g}, must be at most {makespan:g}")
    if in_flight is not None and most > in_flight:
        short.append(f"{most} micro-batches in flight, must be at most {in_flight}")
    if why := missing(schedule):
        short.append(why)
    if short:
        yield f"{'; '.join(short)}.\n{schedule.grid()}"
    held = ", ".join(map(str, timeline.peak_in_flight))
    return f": makespan {span:g}; at most in flight, by device: {held}.\n{schedule.grid()}"


def one_moved(grid: str, header: str = "") -> Callable[[Schedule], str]:
    """What a table misses that is this grid but for one action's place in its row; for `table`."""

    def missing(schedule: Schedule) -> str:
        rows = zip(Schedule.from_grid(header + grid).rows, schedule.rows, strict=True)
        moved = [_without_one(before, after) for before, after in rows if before != after]
        return "" if moved in ([], [True]) else "valid, but more than one action has moved"

    return missing


def _without_one(before: Sequence, after: Sequence) -> bool:
    """Whether two rows are the same without some action."""
    return any(
        [a for a in before if a != moved] == [a for a in after if a != moved] for moved in before
    )


def read_table(answer: Any, header: str = "") -> Schedule:
    """A Schedule as it is, or a grid in text with this line in front if it has none of its own."""
    if isinstance(answer, Schedule):
        return answer
    if not isinstance(answer, str):
        raise NotYet(
            f"{answer!r} is not a table: give a Schedule, or text with one line for each device."
        )
    try:
        return Schedule.from_grid(answer if "#" in answer else header + answer, "your table")
    except ValueError as error:
        raise NotYet(str(error)) from None


def balance(answer: Any, seconds: Sequence[float], stages: int, bottleneck: float) -> Judged:
    """Any split of layers with these `seconds` whose slowest stage takes at most `bottleneck`.

    >>> Exercise(balance, [1, 1, 1, 3], 2, 3).check([2, 2])
    Not yet: the stages take 2, 4; the slowest has to come down to 3.
    """
    with understood(f"{answer!r} is not a list of whole numbers."):
        counts = [operator.index(count) for count in answer]
    if len(counts) != stages or sum(counts) != len(seconds) or min(counts) < 1:
        yield f"{counts} does not divide {len(seconds)} layers among {stages} stages."
    times = [sum(seconds[a:b]) for a, b in pairwise(accumulate(counts, initial=0))]
    if max(times) > bottleneck * (1 + 1e-9):
        shown = ", ".join(f"{x:g}" for x in times)
        yield f"the stages take {shown}; the slowest has to come down to {bottleneck:g}."
    return f": the slowest stage takes {max(times):g}."


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


# The usual exercises.
predict, build, write = (partial(Exercise, judge) for judge in (number, table, same_function))
