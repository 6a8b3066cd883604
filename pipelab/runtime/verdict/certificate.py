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

The eps is that of the tensor's own type; integers have none. The ratio is taken for a tensor as a
whole and for every slice along each axis (rows and columns, or elements), since Adam trains small
elements as fast as large ones: a column a millionth as large as the largest has its own noise, and
its errors do not show in the tensor's norm.

A run that equals `own`, each number to within one rounding, has a ratio of at most 1 and needs no
truth. So the truth is computed for the first update, and later only where the two differ, or where
the undivided batch's loss is not the mean of its parts'.

If a tensor looks wrong, |own - truth| is measured a few times more, with trained weights changed in
their last digit: one rounding error may be small by chance, and a relu with an input near zero may
fall on either side. (Data stay exact: a number may be an index.)

The reference follows the papers' rules on one device and shares no code with the worker or the
stages. Every update is judged alone: the gradient at the run's own weights, then the optimizer's
step from the run's own gradient. Steps that start equal and are equal stay equal.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

from pipelab.runtime.verdict.views import Array, Floor, Tensors, Views, equal

TOLERANCE = 3.0  # right runs reach 1; see tests/runtime/verdict/test_mutations.py for broken ones
DRAWS = 8  # second opinions on a tensor that looks wrong; in each, a relu may fall on either side
COARSE = 1e-3  # errors that do not show are mentioned if they may exceed this share of a tensor
IS_IT_A_MEAN = "(is the loss a mean over its samples?)"
# The advice where a loss or a stage couples samples, on purpose or not.
COUPLED = (
    " The undivided batch and its micro-batches have different losses or gradients: these are two "
    "models, and the check cannot know which one you mean. If the loss should be a mean, return "
    "it, or (mean, count). If a loss or a stage couples samples on purpose (load balancing, your "
    "own batch norm), the model is that of the micro-batches: give reference='microbatches'."
)


@dataclass
class Check:
    """The verdict of a run against its reference.

    passed     whether every tensor is as near to the truth as rounding allows: ratio <= tolerance
    max_abs    the largest difference of any loss, gradient or weight
    max_rel    the largest max|a - b| / max|b| of tensors that can be judged, b the reference; for
               weights, of the update's change
    tolerance  the largest ratio allowed
    rule       the update rule that the reference followed
    worst      the name of the tensor with the largest ratio, and its slice
    ratio      its distance from the truth, in multiples of what rounding explains
    unjudged   tensors or slices no larger than rounding, where zeros would pass as well: vanishing
               gradients, and steps too small to show in the weights
    visible    the smallest error that would have failed, as a share of the tensor: medians over
               the judged gradients and optimizer steps
    precision  of the truth
    failure    the reference's traceback, if it failed and could not judge the run
    seconds    the verdict's duration
    tensors    if the check failed, the worst one in the run ("run") and as it should be ("truth")
    """

    passed: bool
    max_abs: float
    max_rel: float
    tolerance: float
    rule: str
    worst: str = ""
    ratio: float = 0.0
    unjudged: list[str] = field(default_factory=list)
    visible: tuple[float, float] = (0.0, 0.0)
    precision: str = "float64"
    failure: str = ""
    seconds: float = field(default=0.0, compare=False)
    tensors: dict[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def not_made(cls, failure: str) -> "Check":
        """The verdict where the reference could not compute what the run did."""
        return cls(False, np.nan, np.nan, TOLERANCE, rule="", failure=failure)

    def __str__(self) -> str:
        if self.failure:
            reason = self.failure.strip().splitlines()[-1]
            return (
                f"NOT CHECKED: the reference failed, because {reason} (see check.failure). The run "
                "itself is complete."
            )
        rule = self.rule.partition(":")[0]
        if self.precision != "float64":
            rule += f"; the reference in {self.precision}"
        if not self.passed:
            text = (
                f"CHECK FAILED: {self.worst} is {self.ratio:.2g} times further from the reference "
                f"(rule: {rule}) than rounding explains; the limit is {self.tolerance:g}."
            )
            return text + COUPLED * (IS_IT_A_MEAN in self.worst)
        text = (
            "Check passed: every loss, gradient and weight equals the reference within the "
            f"tolerance (rule: {rule})."
        )
        shares = zip(self.visible, ("a gradient", "an optimizer's step"), strict=True)
        if coarse := [f"{share:.1%} of {what}" for share, what in shares if share > COARSE]:
            text += f" In this precision an error below {' or '.join(coarse)} may not show."
        if self.unjudged:
            more = len(self.unjudged) - 1
            text += (
                " Not judged (no larger than rounding): "
                f"{self.unjudged[0]}{f' and {more} more, see check.unjudged' if more else ''}."
            )
        return text


class Comparison:
    """Collects how far many tensors are from the truth."""

    def __init__(self, tolerance: float | None = None) -> None:
        tolerance = TOLERANCE if tolerance is None else tolerance
        self.check = Check(True, 0.0, 0.0, tolerance, rule="")  # so far
        self.visible: tuple[list[float], list[float]] = [], []  # of gradients and of steps

    def add(
        self,
        name: str,
        run: Array,
        truth: Array,
        floor: float | np.ndarray | Floor = 0.0,
        own: Array | None = None,
        again: Iterable[Any] = (),
        *,
        unset: np.ndarray | bool = False,
        whole: bool = False,
    ) -> float | None:
        """Compare two numbers or arrays; integers and booleans must be equal.

        floor   how far rounding may lead in every element, whatever `own` is
        own     the reference in the run's precision, off by its rounding
        again   second opinions: `own` again, from an input that is off by a rounding error
        unset   where nan equals nan, since nothing was ever written there
        whole   compare no slices, and do not name what cannot be judged

        Returns the smallest error that would have failed, as a share of the truth; None for a
        tensor that cannot be judged.
        """
        check, tensors = self.check, Tensors.of(run, truth, floor, own, unset)
        if tensors.run.shape != tensors.truth.shape:
            check.max_abs = check.max_rel = np.inf
            self._note(name, np.inf, tensors)
            return None
        if not tensors.truth.size:
            return None
        if own is None and isinstance(floor, float) and equal(tensors.run, tensors.truth):
            return 0.0  # usual for what was only saved or sent: reading it once is enough
        found = Views(tensors, check.tolerance, whole=whole)
        # Second opinions cost a forward and a backward each: only where the first looks wrong.
        for opinion in again if found.ratio > check.tolerance else ():
            tensors.hear(opinion)
            found.measure()
            if found.ratio <= check.tolerance:
                break
        # max_abs counts every tensor, whether its error is rounding or not: only the ratio judges.
        check.max_abs = max(check.max_abs, float(found.errors[0][1]))
        self._note(name + found.worst, found.ratio, tensors)
        if whole:
            return None
        blind = found.blind()
        check.unjudged += [f"{name}{part}" for part in blind]
        # Nothing of it can be judged, so it says nothing about the errors that would show.
        if blind == [""]:
            return None
        check.max_rel = max(check.max_rel, found.relative)
        return float(check.tolerance * found.share)

    def _note(self, name: str, ratio: float, tensors: Tensors) -> None:
        """Keep the tensor if it is the worst so far."""
        check = self.check
        if ratio > check.ratio:
            check.ratio, check.worst, check.passed = ratio, name, ratio <= check.tolerance
            both = {} if check.passed else {"run": tensors.run, "truth": tensors.truth}
            check.tensors = {which: array.whole() for which, array in both.items()}

    def verdict(self, rule: str, precision: str = "float64") -> Check:
        gradients, steps = (float(np.median(shares or [0.0])) for shares in self.visible)
        return replace(self.check, rule=rule, precision=precision, visible=(gradients, steps))


def opinions(compute: Callable[..., Any]) -> Callable[..., Iterator[Any]]:
    """A tensor's values, by its name, under a few random rounding errors.

    compute  (seed of the errors, their size) -> values by name; called when they are first needed
    """
    known = cache(compute)
    return lambda name, *size: (known(1 + draw, *size)[name] for draw in range(DRAWS))
