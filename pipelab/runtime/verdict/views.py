"""A tensor's error beside its noise: as a whole, in every slice along each axis, in every element.

Tensors may fill the memory of a device. They are read there part by part, by the library that they
belong to (numpy, torch or jax.numpy, whose functions have the same names), and what comes to the
host is a few numbers for each slice.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, prod
from typing import Any, NamedTuple

import numpy as np

FEW = 0.05  # elements of a matrix that are no larger than rounding, as some are by chance
EPS_32, EPS_64 = (float(np.finfo(dtype).eps) for dtype in (np.float32, np.float64))
GROUPS = 2**10  # of sizes: powers of four, by the upper bits of a float64's exponent
AT_ONCE = 2**16  # elements of a part on a CPU: what is made of them stays in its cache
SAFE = 1e-75, 1e150  # between these the squares of a tensor and of its noise are numbers
Floor = Callable[[slice, Any], Any]  # (rows, the truth there) -> how far rounding may lead there


@dataclass(frozen=True)
class Lazy:
    """An array that is read in parts.

    read     some of its rows (all of a number), in float64 or complex128; whole numbers and truth
             values as they are
    at_once  elements of a part
    cuts     the parts, where they are not just as many rows each
    """

    shape: tuple[int, ...]
    read: Callable[[slice], Any]
    at_once: int = AT_ONCE
    cuts: Sequence[slice] = ()

    @classmethod
    def of(cls, array: Any) -> "Lazy":
        """A number or an array of numpy, unless it is one already."""
        if isinstance(array, Lazy):
            return array
        array = np.asarray(array)
        rows = wide(array.reshape(array.shape or 1))
        return cls(array.shape, rows.__getitem__)

    @property
    def size(self) -> int:
        return prod(self.shape)

    def rows(self) -> Iterator[slice]:
        """The parts that it is read in."""
        if self.cuts:
            return iter(self.cuts)
        count = self.shape[0] if self.shape else 1
        step = max(1, self.at_once * count // max(1, self.size))
        return (slice(i, min(i + step, count)) for i in range(0, count, step))

    def parts(self) -> Iterator[Any]:
        return map(self.read, self.rows())

    def whole(self) -> np.ndarray:
        """All of it on the host."""
        return np.concatenate([on_host(part) for part in self.parts()]).reshape(self.shape)

    def square(self) -> float:
        """The sum of its elements' squares."""
        return sum(float((abs(part) ** 2).sum()) for part in self.parts())


def wide(array: np.ndarray) -> np.ndarray:
    """In float64 or complex128; whole numbers and truth values as they are."""
    if array.dtype.kind in "biu":
        return array
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def on_host(array: Any) -> np.ndarray:
    return array.cpu().numpy() if hasattr(array, "cpu") else np.asarray(array)


class Part(NamedTuple):
    """Rows of a tensor, from `start` on: the error, the size of the truth, and the noise."""

    start: int
    error: Any
    size: Any
    noise: Any


@dataclass
class Tensors:
    """The arrays that a tensor is judged by, all of one shape.

    floor     how far rounding may lead in every element, whatever our own computing says
    own       our own computing, which is off by its rounding
    unset     where nan equals nan, since nothing was ever put there
    opinions  second opinions: what our own computing says if its input is off by a rounding error
    """

    run: Lazy
    truth: Lazy
    floor: float | Floor = 0.0
    own: Lazy | None = None
    unset: np.ndarray | bool = False
    opinions: list[Lazy] = field(default_factory=list)

    def __iter__(self) -> Iterator[Part]:
        for rows in self.truth.rows():
            run, truth = self.run.read(rows), self.truth.read(rows)
            unset = self.unset if isinstance(self.unset, bool) else self.unset[rows]
            error = distance(run, truth, unset)
            if is_whole(truth):  # exact
                yield Part(rows.start, error, abs(truth * 1.0), error * 0.0)
                continue
            noise = self.floor(rows, truth) if callable(self.floor) else self.floor
            if self.own:
                noise = noise + distance(self.own.read(rows), truth, unset)
            xp, size = library(truth), abs(truth)
            if isinstance(noise, float):
                noise = xp.full_like(size, noise)
            for opinion in self.opinions:
                noise = xp.maximum(noise, distance(opinion.read(rows), truth, unset))
            if not isfinite(float(size.sum())):
                noise = xp.where(xp.isfinite(size), noise, 0.0)
            yield Part(rows.start, error, size, noise)


class Views:
    """A tensor's error beside its noise: as a whole, and in every slice along each axis.

    errors, sizes, noises  norms of views: of the whole (2-norm and largest), then of each axis's
                           slices
    ratio                  how many times larger than the noise the error is, in the worst view
    """

    def __init__(
        self, parts: Iterable[Part], shape: tuple[int, ...], tolerance: float, whole: bool
    ) -> None:
        self.parts, self.shape, self.tolerance = parts, shape, tolerance
        self.axes = [] if whole else [axis for axis, n in enumerate(shape) if n > 1]
        self.measure()

    def measure(self) -> None:
        """Read all parts, and compare; again after a second opinion."""
        # [1] of the whole and the slices, the error, the size and the noise
        self._sum_squares()
        if not SAFE[0] < (largest := max(self._largest[:2])) < SAFE[1] and 0 < largest < inf:
            self._sum_squares(largest)
        self.errors, self.sizes, self.noises = (
            [np.array([self._root(q, total[q]), self._largest[q]]) for total in [self._total]]
            + [self._root(q, sums[q]) for sums in self._sums.values()]
            for q in range(3)
        )
        # [2] where each is compared with the usual noise of those about as large
        self.limits = [self.noises[0]]
        for size, noise in zip(self.sizes[1:], self.noises[1:], strict=True):
            chance = _chance(len(noise), prod(self.shape))
            self.limits.append(chance * np.maximum(noise, _usual(noise, size)))
        ratios = [_ratios(e, limit) for e, limit in zip(self.errors, self.limits, strict=True)]
        largest_of = [float(of_view.max()) for of_view in ratios]
        view = int(np.argmax(largest_of))
        self.ratio = largest_of[view]
        self.worst = self._named(self.axes[view - 1], [np.argmax(ratios[view])]) if view else ""
        # [3] and every element of a matrix
        self.hidden = 0
        if len(self.axes) > 1:
            self._compare_elements()

    def _root(self, quantity: int, squares: Any) -> Any:
        return self._scale * np.sqrt(squares)

    def _sum_squares(self, scale: float = 1.0) -> None:
        """The sums of the squares of everything / scale, and the largest of everything."""
        self._scale, self._largest, self._total = scale, [0.0] * 3, [0.0] * 3
        self._sums = {axis: np.zeros((3, self.shape[axis])) for axis in self.axes}
        self._groups = np.zeros((2, GROUPS))  # elements by size: how many, and their noise squared
        for start, *quantities in self.parts:
            for q, values in enumerate(quantities):
                squares = (values / scale if scale != 1 else values) ** 2
                self._total[q] += float(squares.sum())
                self._largest[q] = max(self._largest[q], float(values.max()))
                for axis, sums in self._sums.items():
                    others = tuple(a for a in range(squares.ndim) if a != axis)
                    of_slices = on_host(squares.sum(others) if others else squares)
                    place = slice(start, start + len(of_slices)) if axis == 0 else slice(None)
                    sums[q, place] += of_slices
            if len(self.axes) > 1:  # the noise came last
                groups = _group_of(quantities[1]).reshape(-1)
                xp = library(groups)
                if self._total[2] == inf:  # infinite noise says nothing of the others'
                    squares = xp.where(xp.isfinite(squares), squares, 0.0)
                for sums, of_each in zip(self._groups, (None, squares.reshape(-1)), strict=True):
                    sums += on_host(xp.bincount(groups, of_each, minlength=GROUPS))

    def _compare_elements(self) -> None:
        """The largest ratio of an element, and how many cannot be judged."""
        count, squares = self._groups
        usual = self._scale * np.sqrt(squares / np.maximum(count, 1))
        usual[0] = self._scale * np.sqrt(squares.sum() / max(count.sum(), 1))  # of zeros
        chance = _chance(prod(self.shape), prod(self.shape))
        worst = None
        for start, error, size, noise in self.parts:
            xp = library(error)
            limit = chance * xp.maximum(noise, _of_groups(usual, size))
            with np.errstate(divide="ignore", invalid="ignore"):
                ratios = error / limit
            if not (largest := float(ratios.max())) <= self.ratio:  # nan of 0 / 0, too
                ratios = xp.where((error == 0) | xp.isinf(limit), 0.0, ratios)
                largest = float(ratios.max())
            if largest > self.ratio:
                self.ratio = largest
                worst = start, int(ratios.argmax()), ratios.shape
            hidden = (limit > 0) & (size <= self.tolerance * limit)
            if number := int(hidden.sum()):
                # But what is equal to the last bit is right; or both are zeros: see `blind`.
                hidden &= (error > 0) | (size == 0) & (noise > 0)
                number = int(hidden.sum())
                if number and not self.hidden:
                    self._first_hidden = self._place(start, int(_first(hidden)), hidden.shape)
            self.hidden += number
        if worst:
            self.worst = f" (element [{self._place(*worst)}])"

    def _place(self, start: int, number: int, shape: tuple[int, ...]) -> str:
        row, *rest = np.unravel_index(number, shape)
        return ", ".join(map(str, (start + row, *rest)))

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

    def blind(self) -> list[str]:
        """Where zeros would pass as well, and are not known to be right to the last bit.

        [""] if that is the whole tensor, else the slices along each axis.
        """
        found: list[str] = []
        views = [None, *self.axes]
        parts = zip(views, self.sizes, self.errors, self.noises, self.limits, strict=True)
        for axis, size, error, noise, limit in parts:
            # Zeros in place of a slice would be wrong by its size: within the tolerance, they would
            # pass.
            hidden = (limit > 0) & (size <= self.tolerance * limit)
            # But what is equal to the last bit is right; or both are zeros, and nothing is known
            # where our own computing has made something else of them.
            hidden &= (error > 0) | (size == 0) & (noise > 0)
            if axis is None and hidden.all():
                return [""]
            if axis is not None and hidden.any():
                found.append(self._named(axis, np.flatnonzero(hidden)))
        if self.hidden > FEW * prod(self.shape):
            one = f" (element [{self._first_hidden}])"
            many = f" ({self.hidden} of {prod(self.shape)} elements)"
            found.append(one if self.hidden == 1 else many)
        return found

    def _named(self, axis: int, numbers: Any) -> str:
        """Slices in words, such as " (rows 3, 5, 6 of 12)"."""
        words = {1: ["element"], 2: ["row", "column"]}.get(len(self.shape))
        word = words[axis] if words else f"slice along axis {axis},"
        listed = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
        return f" ({word}{'s' * (len(numbers) > 1 and bool(words))} {listed} of {self.shape[axis]})"


# ---- errors, in any library


def library(array: Any) -> Any:
    """numpy, torch or jax.numpy, whichever an array belongs to."""
    if isinstance(array, np.ndarray | np.generic):
        return np
    if hasattr(array, "__array_namespace__"):
        return array.__array_namespace__()
    import torch

    return torch


def is_whole(array: Any) -> bool:
    """Whether it is of whole numbers or truth values, which are exact."""
    return isinstance(array, np.ndarray) and array.dtype.kind in "biu"


def distance(a: Any, b: Any, unset: Any = False) -> Any:
    """|a - b| of each element: 0 where they are equal, infinite ones too; infinite beside nan.

    unset  where nan equals nan
    """
    xp = library(b)
    if is_whole(a) and is_whole(b):
        gap = np.abs(a.astype(np.float64) - b)  # unsigned ones would wrap around
        return np.where(a == b, 0.0, np.maximum(gap, 1.0))  # large ones are equal as floats
    with np.errstate(invalid="ignore", over="ignore"):
        gap = abs(a - b)
    if isfinite(float(gap.sum())):
        return gap
    gap = xp.where(a == b, 0.0, gap)
    if unset is not False:
        gap = xp.where(xp.isnan(a) & xp.isnan(b) & xp.asarray(unset), 0.0, gap)
    return xp.where(xp.isnan(gap), inf, gap)


def change(after: Any, before: Any) -> Any:
    """after - before; 0 where both are the same infinity or nan. Of whole numbers, `after`."""
    if is_whole(after):
        return after
    xp = library(after)
    with np.errstate(invalid="ignore"):
        found = after - before
    if isfinite(float(abs(found).sum())):
        return found
    same = (after == before) | (xp.isnan(after) & xp.isnan(before))
    return xp.where(same, 0.0, found)


def rounding(eps: float) -> Floor:
    """An eps of each element; but a number below the smallest normal one may round to zero."""
    smallest = float(np.finfo(np.float32 if eps >= EPS_32 else np.float64).tiny)
    return lambda rows, truth: eps * abs(truth) + smallest * (truth != 0)


def _group_of(sizes: Any) -> Any:
    """Of each size >= 0 in float64, its power of four, counted from the smallest."""
    # The exponent's upper ten bits, as whole numbers: much quicker than to compute it.
    if isinstance(sizes, np.ndarray):
        return sizes.view(np.int64) >> 53
    xp = library(sizes)
    return sizes.view(xp.int64) >> 53


def _of_groups(table: np.ndarray, sizes: Any) -> Any:
    """The entry of each size's group."""
    groups = _group_of(sizes)
    if isinstance(groups, np.ndarray):
        return table[groups]
    xp = library(groups)
    return xp.take(xp.asarray(table, device=groups.device), groups)


def _first(mask: Any) -> Any:
    return library(mask).argmax(mask.reshape(-1) * 1)


def _chance(slices: int, elements: int) -> float:
    """How many times the usual one the largest norm of a random error is, about.

    Of that many slices, which have the elements in equal parts.
    """
    return float(1 + np.sqrt(2 * np.log(slices) * slices / elements))


def _usual(noise: np.ndarray, size: np.ndarray) -> np.ndarray:
    """The usual noise of the slices about as large as each: their root mean square.

    That of one slice alone may be small by chance. Slices of other sizes say nothing of it; but
    where the truth is zero, by the last digits of a sum, it is as usual in the whole.
    """
    known = np.where(np.isfinite(noise), noise, 0.0)
    scale = known.max(initial=0.0) or 1.0
    squares = (known / scale) ** 2
    group = _group_of(np.where(np.isfinite(size), size, 1.0))
    count = np.bincount(group)
    usual = np.bincount(group, squares) / np.maximum(count, 1)
    return scale * np.sqrt(np.where(size == 0, squares.mean(), usual[group]))


def _ratios(error: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """error / noise; 0 / 0 counts as 0. Where our own computing is infinite nothing is known: 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((error == 0) | np.isinf(noise), 0.0, error / noise)
