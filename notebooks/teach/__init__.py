"""Guesses and exercises of the lectures: what is right is known here, not in the notebooks.

Also what a lecture goes on with (`yours`), what it runs on (`machine`, `jax_devices`, `one_core`),
whether two runs differ (`in_turns`, `told_apart`), and the program that grows (`difference`,
`torchrun`).
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from math import exp, inf, log
from statistics import fmean, stdev
from typing import Any

from teach.feedback import NOT_ATTEMPTED, Exercise, Feedback, Guess, NotYet, not_yet
from teach.machines import HURRY, jax_devices, machine, one_core
from teach.programs import difference, torchrun

__all__ = [
    "NOT_ATTEMPTED",
    "Exercise",
    "Feedback",
    "Guess",
    "check",
    "difference",
    "guess",
    "in_turns",
    "interval",
    "jax_devices",
    "machine",
    "one_core",
    "rounds",
    "told_apart",
    "torchrun",
    "yours",
]

SAME = "not distinguishable from the same run twice"
# Student's t for 95 %: of 2, 3, ... values; beyond the last it hardly changes.
STUDENT = 12.7, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13


def check(name: str, answer: Any) -> Feedback:
    """Whether an exercise is solved: any right answer passes, a wrong one gets a hint.

    name    lecture and exercise, such as "02-1"
    answer  a number, a function, a table, ... as the exercise asks; None: not attempted

    >>> check("04-2", 9)
    Right.
    """
    if answer is None:
        return NOT_ATTEMPTED
    return _entry("EXERCISES", name).check(answer)


def yours(name: str, answer: Any) -> Any:
    """What a lecture goes on with: the answer if it passes its check, else the library's.

    name    an exercise that has one (`Exercise.reference`), such as "05-1"
    answer  as for `check`
    """
    reference = _entry("EXERCISES", name).reference
    if reference is None:
        raise ValueError(f"{name!r} has nothing to go on with: use check")
    return answer if check(name, answer).passed else reference


def guess(name: str, value: float | None) -> Feedback:
    """Compare a guess, made before the run, with the result.

    name   lecture and guess, such as "01-a"
    value  None: no guess yet, so the result stays folded away
    """
    try:
        return _entry("GUESSES", name).compare(value)
    except NotYet as why:
        return not_yet(str(why))


def rounds(count: int) -> range:
    """So many turns of a comparison, or one where the lectures are tests."""
    return range(1 if HURRY else count)


def in_turns(
    first: Callable[[], float], second: Callable[[], float], turns: int = 5, tries: int = 3
) -> str:
    """How long a second run takes beside a first one, which runs twice in every turn (A/A).

    first, second  run something and return its seconds
    tries          runs in a row, the fastest of which counts: others were disturbed more

    >>> in_turns(lambda: 2.0, lambda: 1.0)
    'faster: 0.50 (0.50 to 0.50) times as long; the same run twice 1.00 (1.00 to 1.00)'
    """
    trials = [
        [min(run() for _ in range(tries)) for run in (first, second, first)] for _ in rounds(turns)
    ]
    return told_apart([b / a for a, b, _ in trials], [again / a for a, _, again in trials])


def told_apart(ratios: Sequence[float], itself: Sequence[float]) -> str:
    """How many times as long a run takes as another, and whether chance explains the difference.

    ratios  turn by turn, the run's time over the other one's
    itself  likewise the other one's, run again afterwards, over its own

    Each turn runs A, B and A again, so B is compared with both: log(B / sqrt(A A')), in which what
    changes from turn to turn, and slowly within one, cancels. The run is "slower" or "faster" if
    the mean's 95 % interval (Student's t), here in brackets, leaves out 1.

    >>> told_apart([0.7, 0.8, 0.75], [0.9, 1.05, 1.0])
    'faster: 0.76 (0.70 to 0.81) times as long; the same run twice 0.98 (0.81 to 1.19)'
    >>> told_apart([0.95, 1.2, 1.0], [0.9, 1.05, 1.1]).partition(":")[0]
    'not distinguishable from the same run twice'
    """
    paired = [log(b) - log(again) / 2 for b, again in zip(ratios, itself, strict=False)]
    low, high = interval(paired)
    word = "slower" if low > 0 else "faster" if high < 0 else SAME
    spreads = [
        "{:.2f} ({:.2f} to {:.2f})".format(*map(exp, (fmean(logs), *interval(logs))))
        for logs in (paired, [*map(log, itself)])
    ]
    return f"{word}: {spreads[0]} times as long; the same run twice {spreads[1]}"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean of normally distributed values; of one value it is endless."""
    if len(values) < 2:
        return -inf, inf
    times = STUDENT[min(len(values), len(STUDENT) + 1) - 2]
    half = times * stdev(values) / len(values) ** 0.5
    return fmean(values) - half, fmean(values) + half


def _entry(table: str, name: str) -> Any:
    """The object that the lecture's module has under this name."""
    module = f"{__name__}.lecture_{name[:2]}"
    unknown = ValueError(f'{name!r} is not in {table}: write it as the lecture does, "02-1"')
    try:
        return getattr(import_module(module), table)[name]
    except KeyError:
        raise unknown from None
    except ModuleNotFoundError as error:
        if error.name != module:  # something that the lecture imports
            raise
        raise unknown from None
