"""Errors of arrays and the noise beside them: of the whole, and of every slice along each axis."""

from typing import Any

import numpy as np

FEW = 0.05  # elements of a matrix that are no larger than rounding, as some are by chance
EPS_32, EPS_64 = (float(np.finfo(dtype).eps) for dtype in (np.float32, np.float64))


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
