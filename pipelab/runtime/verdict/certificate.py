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

The eps is that of the tensor's own type; whole numbers have none. A tensor is held to this as a
whole and in every slice along each of its axes (rows and columns, or elements), since Adam trains
small elements as fast as large ones: a column that is a millionth of the largest has noise of its
own, and what is wrong in it does not show in the tensor's norm.

Where a tensor looks wrong, |own - truth| is measured a few times more, with trained weights that
are off in their last digit: one draw of a rounding error may be small by chance, and a relu whose
input is nearly zero may fall on either side. (Data are exact: a number may be an index.)

The reference follows the papers' rules on one device and shares no code with the worker or the
stages. Every update is judged by itself: the gradient at the run's own weights, then the step that
the optimizer takes from the run's own gradient. Steps that start equal and are equal stay equal.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np

TOLERANCE = 3.0  # right runs reach 1; see tests/runtime/verdict/test_mutations.py for broken ones
DRAWS = 8  # second opinions on a tensor that looks wrong: a relu may fall on either side in each
COARSE = 1e-3  # errors that do not show are mentioned from this share of a tensor on
FEW = 0.05  # elements of a matrix that are no larger than rounding, as some are by chance
IS_IT_A_MEAN = "(is the loss a mean over its samples?)"
EPS_32, EPS_64 = (float(np.finfo(dtype).eps) for dtype in (np.float32, np.float64))
# What is said of samples that a loss or a stage couples, be it on purpose or not.
COUPLED = (
    " The undivided batch and its micro-batches have different losses or gradients: these are two "
    "models, and the check cannot know which one is meant. If the loss should be a mean, return "
    "that, or (mean, count). If it or a stage couples samples on purpose (load balancing, a batch "
    "norm of your own), the model is that of the micro-batches: give reference='microbatches'."
)


@dataclass
class Check:
    """The verdict of a run against its reference.

    passed     whether every tensor is as near to the truth as rounding allows: ratio <= tolerance
    max_abs    the largest difference of any loss, gradient or weight
    max_rel    the largest max|a - b| / max|b| of those that can be judged, b the reference; of
               weights, the change by the update is compared
    tolerance  the largest ratio allowed
    rule       the update rule that the reference followed
    worst      the name of the tensor with the largest ratio, and the slice of it
    ratio      how many times further from the truth it is than rounding explains
    unjudged   tensors, or slices of them, no larger than rounding, so that zeros in their place
               would pass as well: gradients that vanish, and steps too small to show in the weights
    visible    how large an error would have failed, as a share: the medians of the gradients and
               of the optimizer's steps that can be judged
    precision  of the truth
    failure    why the reference could not judge the run (its traceback), if it failed itself
    seconds    that the verdict took
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
                f" Not judged, being no larger than rounding: {self.unjudged[0]}"
                f"{f' and {more} more, see check.unjudged' if more else ''}."
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
        run: np.ndarray | float,
        truth: np.ndarray | float,
        floor: np.ndarray | float = 0.0,
        own: np.ndarray | float | None = None,
        again: Iterable[Any] = (),
        *,
        unset: np.ndarray | bool = False,
        whole: bool = False,
    ) -> float | None:
        """Compare two numbers or arrays; whole numbers and truth values must be equal.

        floor   how far rounding may lead in every element, whatever our own computing says
        own     our own computing, which is off by its rounding
        again   second opinions: what our own computing says if its input is off by a rounding error
        unset   where nan equals nan, since nothing was ever put there
        whole   compare no slices, and do not name what cannot be judged

        Returns how large an error would have failed, as a share of the truth; None for a tensor
        that cannot be judged.
        """
        run, truth, check = np.asarray(run), np.asarray(truth), self.check
        if run.shape != truth.shape:
            check.passed, check.worst, check.ratio = False, name, np.inf
            check.max_abs = check.max_rel = np.inf
            check.tensors = {"run": run, "truth": truth}
            return None
        if not run.size:
            return None
        numbers = np.isfinite(truth) & (truth.dtype.kind in "fc")  # whole ones are exact
        noise = distance(truth if own is None else own, truth, unset) + floor
        found = Views(distance(run, truth, unset), truth, np.where(numbers, noise, 0.0), whole)
        # Second opinions cost a forward and a backward each: only where the first looks wrong.
        for opinion in again if found.ratio > check.tolerance else ():
            found.explain(np.where(numbers, distance(opinion, truth, unset), 0.0))
            if found.ratio <= check.tolerance:
                break
        # Of every tensor, whether its error is rounding or not: what failed is told by the ratio
        # alone.
        check.max_abs = max(check.max_abs, float(found.errors[0][1]))
        if found.ratio > check.ratio:
            check.ratio, check.worst = found.ratio, name + found.worst
            check.passed = check.ratio <= check.tolerance
            check.tensors = {} if check.passed else {"run": run, "truth": truth}
        if whole:
            return None
        blind = found.blind(check.tolerance)
        check.unjudged += [f"{name}{part}" for part in blind]
        # Nothing of it can be judged: then its size says nothing of the errors that show.
        if blind == [""]:
            return None
        check.max_rel = max(check.max_rel, found.relative)
        return float(check.tolerance * found.share)

    def verdict(self, rule: str, precision: str = "float64") -> Check:
        gradients, steps = (float(np.median(shares or [0.0])) for shares in self.visible)
        return replace(self.check, rule=rule, precision=precision, visible=(gradients, steps))


def opinions(compute: Callable[..., Any]) -> Callable[..., Iterator[np.ndarray]]:
    """A tensor's values, by its name, under a few random rounding errors.

    compute  (number of an error, its size) -> values by name, computed when somebody first asks
    """
    known = cache(compute)
    return lambda name, *size: (known(1 + draw, *size)[name] for draw in range(DRAWS))


# ---- errors of arrays and the noise beside them: of the whole, and of every slice along each axis


class Views:
    """A tensor's error beside its noise: as a whole, and in every slice along each axis."""

    def __init__(
        self, error: np.ndarray, truth: np.ndarray, noise: np.ndarray, whole: bool
    ) -> None:
        self.shape = error.shape
        # [()] is the whole; (axis,) the slices along it; all axes: every element.
        self.views: list[tuple[int, ...]] = [()]
        if not whole:
            self.views += [(axis,) for axis, n in enumerate(self.shape) if n > 1]
            self.views += [tuple(range(error.ndim))] * (len(self.views) > 2)
        self.errors, self.sizes, self.noises = map(self._norms, (error, np.abs(truth), noise))
        self._compare()

    def explain(self, noise: np.ndarray) -> None:
        """Count this as noise, too, where it is more."""
        self.noises = list(map(np.maximum, self.noises, self._norms(noise)))
        self._compare()

    @property
    def share(self) -> float:
        """The noise as a share of the tensor."""
        return float(_ratios(self.noises[0], self.sizes[0])[0])

    @property
    def relative(self) -> float:
        """The largest error, as a share of the largest number."""
        error, size = self.errors[0][1], self.sizes[0][1]
        if not error:
            return 0.0
        return float(error / size) if size and np.isfinite(error) else float(np.inf)

    def blind(self, tolerance: float) -> list[str]:
        """Where zeros would pass as well, and are not known to be right to the last bit.

        [""] if that is the whole tensor, else the slices along each axis.
        """
        found: list[str] = []
        parts = zip(self.views, self.sizes, self.errors, self.noises, self.limits, strict=True)
        for view, size, error, noise, limit in parts:
            # Zeros in place of a slice would be wrong by its size: within the tolerance, they would
            # pass.
            hidden = (limit > 0) & (size <= tolerance * limit)
            # But what is equal to the last bit is right; or both are zeros, and nothing is known
            # where our own computing has made something else of them.
            hidden &= (error > 0) | (size == 0) & (noise > 0)
            if not view and hidden.all():
                return [""]
            if view and hidden.mean() > (FEW if len(view) > 1 else 0):
                found.append(self._named(view, np.flatnonzero(hidden)))
        return found

    def _norms(self, array: np.ndarray) -> list[np.ndarray]:
        """The norms of the whole, then the 2-norm of each slice along each axis."""
        # Divided by the largest number first: squares of 1e-200 would vanish.
        found = [norms(array)]
        largest = found[0][1]
        scale = largest if 0 < largest < np.inf else 1.0
        squares = (np.abs(array) / scale) ** 2
        for view in self.views[1:]:
            others = tuple(axis for axis in range(array.ndim) if axis not in view)
            found.append(scale * np.sqrt(squares.sum(others)).ravel())
        return found

    def _compare(self) -> None:
        self.limits = [self.noises[0]]
        for size, noise in zip(self.sizes[1:], self.noises[1:], strict=True):
            # Of n slices of k elements each, the largest norm of a random error is about this many
            # times the usual one.
            n = len(noise)
            k = int(np.prod(self.shape)) // n
            chance = 1 + np.sqrt(2 * np.log(n) / k)
            self.limits.append(chance * np.maximum(noise, _usual(noise, size)))
        ratios = [_ratios(e, limit) for e, limit in zip(self.errors, self.limits, strict=True)]
        largest = [float(of_view.max()) for of_view in ratios]
        view = int(np.argmax(largest))
        self.ratio = largest[view]
        self.worst = self._named(self.views[view], [np.argmax(ratios[view])]) if view else ""

    def _named(self, view: tuple[int, ...], numbers: Any) -> str:
        """Slices in words, such as " (rows 3, 5, 6 of 12)"."""
        if len(view) > 1 and len(numbers) == 1:
            place = ", ".join(map(str, np.unravel_index(numbers[0], self.shape)))
            return f" (element [{place}])"
        if len(view) > 1:
            return f" ({len(numbers)} of {np.prod(self.shape)} elements)"
        (axis,) = view
        words = {1: ["element"], 2: ["row", "column"]}.get(len(self.shape))
        word = words[axis] if words else f"slice along axis {axis},"
        listed = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
        return f" ({word}{'s' * (len(numbers) > 1 and bool(words))} {listed} of {self.shape[axis]})"


def distance(a: Any, b: Any, unset: np.ndarray | bool = False) -> np.ndarray:
    """|a - b| of each element: 0 where they are equal, infinite ones too; infinite beside nan.

    unset  where nan equals nan
    """
    a, b = np.asarray(a), np.asarray(b)
    with np.errstate(invalid="ignore", over="ignore"):
        # Differences of unsigned integers would wrap around.
        gap = np.abs(a.astype(np.result_type(a, np.float64)) - b)
    gap = np.where(a == b, 0.0, gap)
    if {a.dtype.kind, b.dtype.kind}.isdisjoint("fc"):
        return np.where(a == b, 0.0, np.maximum(gap, 1.0))  # large ones are equal as floats
    gap[np.isnan(a) & np.isnan(b) & unset] = 0.0
    return np.where(np.isnan(gap), np.inf, gap)


def change(after: np.ndarray, before: np.ndarray) -> np.ndarray:
    """after - before; 0 where both are the same infinity or nan. Of whole numbers, `after`."""
    if after.dtype.kind in "biu":
        return after
    with np.errstate(invalid="ignore"):
        found = np.asarray(after - before)
    found[(after == before) | (np.isnan(after) & np.isnan(before))] = 0
    return found


def norms(array: np.ndarray | float) -> np.ndarray:
    """The 2-norm, which forgives a single flipped relu, and the maximum, which sees one element."""
    magnitude = np.abs(array).ravel()
    largest = magnitude.max(initial=0.0)
    if not 0 < largest < np.inf:
        return np.array([largest, largest])
    scaled = magnitude / largest  # squares of 1e-200 would vanish
    return np.array([largest * np.sqrt(scaled @ scaled), largest])


def rounding(eps: float, array: np.ndarray | float) -> np.ndarray:
    """An eps of each element; but a number below the smallest normal one may round to zero."""
    smallest = np.finfo(np.float32 if eps >= EPS_32 else np.float64).tiny
    return np.where(np.equal(array, 0), 0.0, eps * np.abs(array) + smallest)


def _usual(noise: np.ndarray, size: np.ndarray) -> np.ndarray:
    """The usual noise of the slices about as large as each: their root mean square.

    That of one slice alone may be small by chance. Slices of other sizes say nothing of it; but
    where the truth is zero, by the last digits of a sum, it is as usual in the whole.
    """
    known = np.where(np.isfinite(noise), noise, 0.0)
    scale = known.max(initial=0.0) or 1.0
    squares = (known / scale) ** 2
    order = np.frexp(np.where(np.isfinite(size), size, 1.0))[1] // 2  # powers of four
    group = order - order.min()
    count = np.bincount(group)
    usual = np.bincount(group, squares) / np.maximum(count, 1)
    return scale * np.sqrt(np.where(size == 0, squares.mean(), usual[group]))


def _ratios(error: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """error / noise; 0 / 0 counts as 0. Where our own computing is infinite nothing is known: 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((error == 0) | np.isinf(noise), 0.0, error / noise)
