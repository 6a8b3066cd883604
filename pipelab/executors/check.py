"""The verdict of a run: how far it is from the truth, measured in its own rounding.

A fixed tolerance cannot judge a gradient: in a deep model one stage's is 1e-17 of another's, and in
bfloat16 everything is off by a percent. So every tensor is computed three times from the same
weights:

    run     by the pipeline, in micro-batches
    own     by the reference, in the run's precision and micro-batches: how far rounding leads
    truth   by the reference, in float64 and, where the rule allows it, in one undivided batch

             |run - truth|
    ratio = ------------------------      at most about 1 in a right run, at any depth and scale
             |own - truth| + eps |truth|

Where a tensor looks wrong, |own - truth| is measured a few times more, with weights and data that
are off in their last digit: one draw of a rounding error may be small by chance, and a relu whose
input is nearly zero may fall on either side.

The reference follows the papers' rules on one device and shares no code with the worker or the
stages. Every update is judged by itself: the gradient at the run's own weights, then the step that
the optimizer takes from the run's own gradient. Steps that start equal and are equal stay equal.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

TOLERANCE = 3.0  # right runs reach 1; see tests/test_mutations.py for broken ones
DRAWS = 8  # second opinions on a tensor that looks wrong: a relu may fall on either side in each
EPS_32 = float(np.finfo(np.float32).eps)


@dataclass
class Check:
    """The verdict of a run against its reference.

    passed     whether every tensor is as near to the truth as rounding allows: ratio <= tolerance
    max_abs    the largest difference of any loss, gradient or weight
    max_rel    the largest max|a - b| / max|b| of those that can be judged, b the reference; of
               weights, the change by the update is compared
    tolerance  the largest ratio allowed
    rule       the update rule that the reference followed
    worst      the name of the tensor with the largest ratio
    ratio      how many times further from the truth it is than rounding explains
    unjudged   tensors no larger than rounding, so that zeros in their place would pass as well:
               gradients that vanish, and steps too small to show in the weights
    precision  of the truth
    tensors    the worst one as the run has it ("run") and as it should be ("truth"), if it failed
    """

    passed: bool
    max_abs: float
    max_rel: float
    tolerance: float
    rule: str
    worst: str = ""
    ratio: float = 0.0
    unjudged: list[str] = field(default_factory=list)
    precision: str = "float64"
    tensors: dict[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    def __str__(self) -> str:
        rule = self.rule.partition(":")[0]
        if self.precision != "float64":
            rule += f"; the reference in {self.precision}"
        if not self.passed:
            return (
                f"CHECK FAILED: {self.worst} is {self.ratio:.2g} times further from the reference "
                f"(rule: {rule}) than rounding explains; the limit is {self.tolerance:g}."
            )
        text = (
            "Check passed: every loss, gradient and weight equals the reference within the "
            f"tolerance (rule: {rule})."
        )
        if self.unjudged:
            more = len(self.unjudged) - 1
            text += (
                f" Not judged, being no larger than rounding: {self.unjudged[0]}"
                f"{f' and {more} more, see check.unjudged' if more else ''}."
            )
        return text


class Comparison:
    """Collects how far many tensors are from the truth."""

    def __init__(self, tolerance: float | None = None) -> None:
        tolerance = TOLERANCE if tolerance is None else tolerance
        self.check = Check(True, 0.0, 0.0, tolerance, rule="")  # so far

    def add(
        self,
        name: str,
        run: np.ndarray | float,
        truth: np.ndarray | float,
        noise: np.ndarray | float,
        again: Iterable[np.ndarray] = (),
    ) -> None:
        """Compare two numbers or arrays of float64 or complex128.

        noise  how far rounding alone may lead, as `norms` has it
        again  second opinions: what our own computing says if its input is off by a rounding error
        """
        check, run, truth = self.check, np.asarray(run), np.asarray(truth)
        difference = relative = ratio = np.inf  # of two shapes
        if run.shape == truth.shape:
            if not run.size:
                return
            with np.errstate(invalid="ignore"):  # inf - inf is nan, which is never equal
                error = norms(run - truth)
            size, others = norms(truth), iter(again)
            while (ratio := _largest(error, noise)) > check.tolerance:
                opinion = next(others, None)
                if opinion is None:
                    break
                noise = np.maximum(noise, norms(opinion - truth))
            difference, relative = error[1], _largest(error[1:], size[1:])
            # Zeros would pass as well.
            if np.any(noise) and _largest(size, noise) <= check.tolerance:
                check.unjudged.append(name)
                relative = 0.0
            if not np.isfinite(difference):  # nan and inf are never equal
                difference = relative = ratio = np.inf
        check.max_abs = max(check.max_abs, float(difference))
        check.max_rel = max(check.max_rel, float(relative))
        if ratio > check.ratio:
            check.ratio, check.worst = float(ratio), name
            check.passed = check.ratio <= check.tolerance
            check.tensors = {} if check.passed else {"run": run, "truth": truth}

    def verdict(self, rule: str, precision: str = "float64") -> Check:
        return replace(self.check, rule=rule, precision=precision)


def opinions(compute: Callable[[int], Any]) -> Callable[[Any], Iterator[np.ndarray]]:
    """Of a tensor, by its name: its values under a few random rounding errors.

    compute  number of an error -> values by name, computed when somebody asks for the first
    """
    known = cache(compute)
    return lambda name: (known(1 + draw)[name] for draw in range(DRAWS))


def norms(array: np.ndarray | float) -> np.ndarray:
    """The 2-norm, which forgives a single flipped relu, and the maximum, which sees one element."""
    magnitude = np.abs(array).ravel()
    largest = magnitude.max(initial=0.0)
    if not 0 < largest < np.inf:
        return np.array([largest, largest])
    scaled = magnitude / largest  # squares of 1e-200 would vanish
    return np.array([largest * np.sqrt(scaled @ scaled), largest])


def rounding(eps: float, array: np.ndarray | float) -> np.ndarray:
    """An eps of an array; but a number below the smallest normal one may be rounded to zero."""
    smallest = np.finfo(np.float32 if eps >= EPS_32 else np.float64).tiny
    return eps * norms(array) + smallest * np.array([np.size(array) ** 0.5, 1.0])


def _largest(error: np.ndarray, noise: np.ndarray | float) -> float:
    """The largest error / noise; 0 / 0 counts as 0, nan as infinite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(error == 0, 0.0, error / noise)
    return float(np.where(np.isnan(ratio), np.inf, ratio).max())
