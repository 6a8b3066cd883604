"""Guesses and exercises of the lectures: what is right is known here, not in the notebooks.

Also what a lecture goes on with (`yours`), what it runs on (`machine`, `jax_devices`), and whether
two runs differ (`in_turns`, `told_apart`).
"""

from collections.abc import Callable, Iterable
from importlib import import_module
from statistics import median
from typing import Any

from teach.feedback import NOT_ATTEMPTED, Exercise, Feedback, Guess, NotYet, not_yet
from teach.machines import jax_devices, machine

__all__ = [
    "NOT_ATTEMPTED",
    "Exercise",
    "Feedback",
    "Guess",
    "check",
    "guess",
    "in_turns",
    "jax_devices",
    "machine",
    "told_apart",
    "yours",
]


def check(name: str, answer: Any) -> Feedback:
    """Whether an exercise is solved: any right answer passes, a wrong one gets a hint.

    name    lecture and exercise, such as "02-1"
    answer  a number, a function, a table, ... as the exercise asks; None: not attempted

    >>> check("04-1", 9)
    Right.
    """
    if answer is None:
        return NOT_ATTEMPTED
    return _entry("EXERCISES", name).check(answer)


def yours(name: str, answer: Any) -> Any:
    """What a lecture goes on with: the answer if it passes its check, else the library's.

    name    an exercise that has one (`Exercise.reference`), such as "01-1"
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
        [min(run() for _ in range(tries)) for run in (first, second, first)] for _ in range(turns)
    ]
    ratios = [b / a for a, b, _ in trials]
    itself = [again / a for a, _, again in trials]
    spreads = [f"{median(x):.2f} ({min(x):.2f} to {max(x):.2f})" for x in (ratios, itself)]
    word = told_apart(ratios, itself)
    return f"{word}: {spreads[0]} times as long; the same run twice {spreads[1]}"


def told_apart(ratios: Iterable[float], itself: Iterable[float]) -> str:
    """Whether a run is slower or faster than another by more than that one is than itself.

    ratios  turn by turn, the run's time over the other one's
    itself  likewise the other one's, run again, over its own

    >>> told_apart([0.7, 0.8], [0.9, 1.05])
    'faster'
    >>> told_apart([1.09, 1.2], [0.9, 1.05])
    'slower'
    >>> told_apart([0.95, 1.2], [0.9, 1.05])
    'not distinguishable from the same run twice'
    """
    found, noise = sorted(ratios), sorted(itself)
    if found[0] > noise[-1]:
        return "slower"
    return "faster" if found[-1] < noise[0] else "not distinguishable from the same run twice"


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
