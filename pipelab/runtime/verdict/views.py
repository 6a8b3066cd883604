"""A tensor's error beside its noise: as a whole, in every slice along each axis, in every element.

Tensors may fill a device's memory. They are read there part by part, by their own library (numpy,
torch or jax.numpy, whose functions have the same names), and only a few numbers for each slice come
to the host.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, prod
from typing import Any, NamedTuple

import numpy as np

FEW = 0.05  # of a matrix's elements may be no larger than rounding, by chance
EPS_32, EPS_64 = (float(np.finfo(dtype).eps) for dtype in (np.float32, np.float64))
GROUPS = 2**10  # of sizes: powers of four, by the upper bits of a float64's exponent
AT_ONCE = 2**15  # elements of a part on a CPU: intermediate results stay in its cache
SAMPLE = 2  # parts from which the usual noise of elements is taken, or one more
SAFE = 1e-75, 1e150  # between these, squares of a tensor and its noise neither overflow nor vanish
# (rows, the truth there, its size) -> how far rounding may lead there
Floor = Callable[[slice, Any, Any], Any]


@dataclass(frozen=True)
class Lazy:
    """An array that is read in parts.

    read     some of its rows (all of a number), in float64 or complex128; integers and booleans as
             they are
    at_once  elements of a part
    cuts     the parts, where they do not all have the same number of rows
    """

    shape: tuple[int, ...]
    read: Callable[[slice], Any]
    at_once: int = AT_ONCE
    cuts: Sequence[slice] = ()

    @classmethod
    def of(cls, array: Any) -> "Lazy":
        """A number or a numpy array as a Lazy, unless it is one already."""
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
        if not self.size:
            return np.zeros(self.shape)
        return np.concatenate([on_host(part) for part in self.parts()]).reshape(self.shape)

    def square(self) -> float:
        """The sum of its elements' squares."""
        return sum(float((abs(part) ** 2).sum()) for part in self.parts())


Array = Lazy | np.ndarray | float


def wide(array: np.ndarray) -> np.ndarray:
    """The array in float64 or complex128; integers and booleans as they are."""
    if array.dtype.kind in "biu":
        return array
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64, copy=False)


def on_host(array: Any) -> np.ndarray:
    return array.cpu().numpy() if hasattr(array, "cpu") else np.asarray(array)


@dataclass
class Tensors:
    """The arrays that a tensor is judged by, all of one shape.

    floor     how far rounding may lead in every element, whatever `own` is
    own       the reference in the run's precision, off by its rounding
    unset     where nan equals nan, since nothing was ever written there
    opinions  second opinions: `own` again, from an input that is off by a rounding error
    """

    run: Lazy
    truth: Lazy
    floor: float | Floor = 0.0
    own: Lazy | None = None
    unset: np.ndarray | bool = False
    opinions: list[Lazy] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        run: Array,
        truth: Array,
        floor: float | np.ndarray | Floor,
        own: Array | None,
        unset: np.ndarray | bool,
    ) -> "Tensors":
        """Tensors from any arrays or numbers."""
        if isinstance(floor, np.ndarray):
            noise = Lazy.of(floor)
            floor = lambda rows, truth, size: noise.read(rows)  # noqa: E731
        unset = unset if isinstance(unset, bool) else np.atleast_1d(unset)
        return cls(Lazy.of(run), Lazy.of(truth), floor, own if own is None else Lazy.of(own), unset)

    def hear(self, opinion: Array) -> None:
        """Take a second opinion into account."""
        self.opinions.append(Lazy.of(opinion))

    def read(self, rows: slice) -> tuple[Any, Any, Any]:
        """The error, the size of the truth, and the noise of some rows."""
        truth = self.truth.read(rows)
        # What is known to be equal is read once.
        run = truth if self.run is self.truth else self.run.read(rows)
        unset = self.unset if isinstance(self.unset, bool) else self.unset[rows]
        error = distance(run, truth, unset)
        if is_whole(truth):  # exact
            return error, abs(truth * 1.0), error * 0.0
        xp, size = library(truth), abs(truth)
        noise = self.floor(rows, truth, size) if callable(self.floor) else self.floor
        if self.own:
            noise = noise + distance(self.own.read(rows), truth, unset)
        if isinstance(noise, float):
            noise = xp.full_like(size, noise)
        for opinion in self.opinions:
            noise = xp.maximum(noise, distance(opinion.read(rows), truth, unset))
        if not isfinite(float(size.max())):
            noise = xp.where(xp.isfinite(size), noise, 0.0)
        return error, size, noise


class OfPart(NamedTuple):
    """Statistics of some rows: of the error, the size and the noise, in this order.

    largest, total  the largest element, and the sum of squares
    sums            the sums of squares of the slices along each axis
    ratio           the largest error / noise of an element; `place`: where
    hidden          how many elements cannot be judged; `first`: the first of them
    """

    largest: list[float]
    total: list[float]
    sums: list[list[np.ndarray]]
    ratio: float = 0.0
    place: tuple[int, ...] = ()
    hidden: int = 0
    first: tuple[int, ...] = ()


class Views:
    """A tensor's error beside its noise: as a whole, in slices along each axis, and in elements.

    errors, sizes, noises  norms of views: of the whole (2-norm and largest), then of each axis's
                           slices
    ratio                  how many times larger than the noise the error is, in the worst view
    worst                  that view in words
    """

    def __init__(self, tensors: Tensors, tolerance: float, *, whole: bool = False) -> None:
        self.tensors, self.tolerance = tensors, tolerance
        self.shape, self.count = tensors.truth.shape, tensors.truth.size
        self.axes = [] if whole else [axis for axis, n in enumerate(self.shape) if n > 1]
        self.by_element = len(self.axes) > 1
        self.measure()

    def measure(self) -> None:
        """Read all parts, and compare; call it again after a second opinion."""
        rows = list(self.tensors.truth.rows())
        sampled = rows[:: max(1, len(rows) // SAMPLE)]
        found = self._compare(rows, sampled)
        doubtful = self.ratio > self.tolerance or found.hidden > FEW * self.count
        if self.by_element and doubtful and len(sampled) < len(rows):
            found = self._compare(rows, rows)
        self.hidden, self.first_hidden = found.hidden, found.first

    def _compare(self, rows: Sequence[slice], sampled: Sequence[slice]) -> OfPart:
        # [1] the whole, the slices and the elements: their errors, sizes and noises
        found = self._summed(rows, sampled, 1.0)
        largest = max(found.largest[:2])
        if not SAFE[0] < largest < SAFE[1] and 0 < largest < inf:
            found = self._summed(rows, sampled, largest)
        else:
            largest = 1.0
        self.errors, self.sizes, self.noises = (
            [np.array([largest * np.sqrt(found.total[q]), found.largest[q]])]
            + [largest * np.sqrt(of_axis[q]) for of_axis in found.sums]
            for q in range(3)
        )
        # [2] a slice has at least the usual noise of slices about as large
        self.limits = [self.noises[0]]
        for size, noise in zip(self.sizes[1:], self.noises[1:], strict=True):
            usual = _usual(noise, size)
            self.limits.append(_chance(len(noise), self.count) * np.maximum(noise, usual))
        # [3] the worst of all
        ratios = [_ratios(e, limit) for e, limit in zip(self.errors, self.limits, strict=True)]
        largest_of = [float(of_view.max()) for of_view in ratios]
        view = int(np.argmax(largest_of))
        self.ratio = largest_of[view]
        self.worst = self._named(self.axes[view - 1], [np.argmax(ratios[view])]) if view else ""
        if found.ratio > self.ratio:
            self.ratio, self.worst = found.ratio, _element(found.place)
        return found

    def _summed(self, rows: Sequence[slice], sampled: Sequence[slice], scale: float) -> OfPart:
        """All parts together; everything is divided by `scale` before it is squared."""
        usual = None
        if self.by_element:
            found = [self._groups_of(scale, at) for at in sampled]
            count, squares = (np.sum(of, 0) for of in zip(*found, strict=True))
            usual = scale * np.sqrt(squares / np.maximum(count, 1))
            usual[0] = scale * np.sqrt(squares.sum() / max(count.sum(), 1))  # where it is zero
        largest, total, ratio, hidden = [0.0] * 3, [0.0] * 3, 0.0, 0
        sums = [[np.zeros(self.shape[axis]) for _ in range(3)] for axis in self.axes]
        place: tuple[int, ...] = ()
        first: tuple[int, ...] = ()
        for at in rows:
            part = self._of_part(scale, usual, at)
            for q in range(3):
                largest[q] = max(largest[q], part.largest[q])
                total[q] += part.total[q]
                for axis, of_axis, more in zip(self.axes, sums, part.sums, strict=True):
                    of_axis[q][at if axis == 0 else slice(None)] += more[q]
            if part.ratio > ratio:
                ratio, place = part.ratio, part.place
            hidden, first = hidden + part.hidden, first or part.first
        return OfPart(largest, total, sums, ratio, place, hidden, first)

    def _groups_of(self, scale: float, rows: slice) -> tuple[np.ndarray, np.ndarray]:
        """How many elements there are of each size, and the sum of their noise squared."""
        _, size, noise = self.tensors.read(rows)
        groups, squares = _group_of(size).reshape(-1), (noise / scale).reshape(-1) ** 2
        xp = library(groups)
        if not isfinite(float(squares.sum())):  # infinite noise says nothing about the others'
            squares = xp.where(xp.isfinite(squares), squares, 0.0)
        count = on_host(xp.bincount(groups, minlength=GROUPS))
        return count, on_host(xp.bincount(groups, squares, minlength=GROUPS))

    def _of_part(self, scale: float, usual: np.ndarray | None, rows: slice) -> OfPart:
        quantities = self.tensors.read(rows)
        largest, total = [float(values.max()) for values in quantities], []
        sums: list[list[np.ndarray]] = [[] for _ in self.axes]
        for values in quantities:
            squares = (values / scale if scale != 1 else values) ** 2
            for axis, of_axis in zip(self.axes, sums, strict=True):
                others = tuple(a for a in range(squares.ndim) if a != axis)
                of_axis.append(on_host(squares.sum(others) if others else squares))
            total.append(float(sums[0][-1].sum() if sums else squares.sum()))
        found = OfPart(largest, total, sums)
        return found if usual is None else self._of_elements(found, usual, rows, *quantities)

    def _of_elements(
        self, found: OfPart, usual: np.ndarray, rows: slice, error: Any, size: Any, noise: Any
    ) -> OfPart:
        xp = library(error)
        if not found.largest[0]:
            # What is equal to the last bit is right, except two zeros where there is noise.
            hidden = (size == 0) & (noise > 0)
            return found._replace(**_which(hidden, rows))
        # An element has at least the usual noise of elements about as large.
        limit = _chance(self.count, self.count) * xp.maximum(noise, _of_groups(usual, size))
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = error / limit
        if not isfinite(ratio := float(ratios.max())):
            ratios = xp.where((error == 0) | xp.isinf(limit), 0.0, ratios)
            ratio = float(ratios.max())
        found = found._replace(ratio=ratio, place=_place(rows, ratios.argmax(), ratios.shape))
        hidden = (limit > 0) & (size <= self.tolerance * limit)
        if hidden.any():  # but what is equal is right, as above
            hidden = hidden & ((error > 0) | (size == 0) & (noise > 0))
        return found._replace(**_which(hidden, rows))

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
        """Where zeros would pass as well, and the run is not equal to the last bit.

        [""] if that is the whole tensor, else the slices along each axis, and the elements.
        """
        found: list[str] = []
        views = [None, *self.axes]
        parts = zip(views, self.sizes, self.errors, self.noises, self.limits, strict=True)
        for axis, size, error, noise, limit in parts:
            # Zeros in place of a slice would be wrong by its size: within the tolerance, they would
            # pass.
            hidden = (limit > 0) & (size <= self.tolerance * limit)
            # But what is equal to the last bit is right, except two zeros where there is noise.
            hidden &= (error > 0) | (size == 0) & (noise > 0)
            if axis is None and hidden.all():
                return [""]
            if axis is not None and hidden.any():
                found.append(self._named(axis, np.flatnonzero(hidden)))
        if self.hidden > FEW * self.count:
            many = f" ({self.hidden} of {self.count} elements)"
            found.append(_element(self.first_hidden) if self.hidden == 1 else many)
        return found

    def _named(self, axis: int, numbers: Any) -> str:
        """Slices in words, such as " (rows 3, 5, 6 of 12)"."""
        words = {1: ["element"], 2: ["row", "column"]}.get(len(self.shape))
        word = words[axis] if words else f"slice along axis {axis},"
        listed = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
        return f" ({word}{'s' * (len(numbers) > 1 and bool(words))} {listed} of {self.shape[axis]})"


# ---- errors, in any library


def library(array: Any) -> Any:
    """The module of functions for an array: numpy, torch or jax.numpy."""
    if hasattr(array, "__array_namespace__"):  # torch's tensors have none
        return array.__array_namespace__()
    return sys.modules[type(array).__module__.partition(".")[0]]


def is_whole(array: Any) -> bool:
    """Whether it is a numpy array of integers or booleans, which are exact."""
    return isinstance(array, np.ndarray) and array.dtype.kind in "biu"


def distance(a: Any, b: Any, unset: Any = False) -> Any:
    """|a - b| of each element: 0 where both are equal, also if infinite; infinite beside nan.

    unset  where nan equals nan
    """
    xp = library(b)
    if is_whole(a) and is_whole(b):
        gap = np.abs(a.astype(np.float64) - b)  # unsigned ones would wrap around
        return np.where(a == b, 0.0, np.maximum(gap, 1.0))  # large ones may be equal as floats
    with np.errstate(invalid="ignore", over="ignore"):
        gap = abs(a - b)
    if isfinite(float(gap.max())):
        return gap
    gap = xp.where(a == b, 0.0, gap)
    if unset is not False:
        gap = xp.where(xp.isnan(a) & xp.isnan(b) & xp.asarray(unset), 0.0, gap)
    return xp.where(xp.isnan(gap), inf, gap)


def agree(a: Lazy, b: Lazy, eps: float) -> bool:
    """Whether every element differs by at most one rounding."""
    return a.shape == b.shape and all(
        bool((abs(a.read(rows) - there) <= eps * abs(there)).all())
        for rows, there in zip(b.rows(), b.parts(), strict=True)
    )


def equal(a: Lazy, b: Lazy) -> bool:
    """Whether they are equal to the last bit; nan is not."""
    return a.shape == b.shape and all(
        bool((a.read(rows) == there).all()) for rows, there in zip(b.rows(), b.parts(), strict=True)
    )


def change(after: Any, before: Any) -> Any:
    """after - before; 0 where both are the same infinity or nan. For integers, `after`."""
    if is_whole(after):
        return after
    xp = library(after)
    with np.errstate(invalid="ignore"):
        found = after - before
    if isfinite(float(abs(found.sum()))):
        return found
    same = (after == before) | (xp.isnan(after) & xp.isnan(before))
    return xp.where(same, 0.0, found)


def rounding(eps: float) -> Floor:
    """An eps of each element, and the smallest normal number: less may round to zero."""
    smallest = float(np.finfo(np.float32 if eps >= EPS_32 else np.float64).tiny)
    return lambda rows, truth, size: eps * size + smallest * (size != 0)


def _group_of(sizes: Any) -> Any:
    """The power of four of each size >= 0 in float64, counted from the smallest."""
    # The exponent's upper ten bits, as an integer: much quicker than a logarithm.
    if isinstance(sizes, np.ndarray):
        return sizes.view(np.int64) >> 53
    xp = library(sizes)
    return sizes.view(xp.int64) >> 53


def _of_groups(table: np.ndarray, sizes: Any) -> Any:
    """The entry of each size's group."""
    groups = _group_of(sizes)
    if isinstance(groups, np.ndarray):
        return table.take(groups)
    xp = library(groups)
    return xp.take(xp.asarray(table, device=groups.device), groups)


def _place(rows: slice, number: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    row, *rest = np.unravel_index(int(number), tuple(shape))
    return rows.start + int(row), *map(int, rest)


def _which(hidden: Any, rows: slice) -> dict[str, Any]:
    """How many elements of a part are hidden, and the first of them."""
    if not (number := int(hidden.sum())):
        return {}
    first = library(hidden).argmax(hidden.reshape(-1) * 1)
    return {"hidden": number, "first": _place(rows, first, hidden.shape)}


def _element(place: tuple[int, ...]) -> str:
    return f" (element [{', '.join(map(str, place))}])"


def _chance(slices: int, elements: int) -> float:
    """About how many times the usual norm the largest one is, in slices of a random error.

    The slices have equal shares of the elements.
    """
    return float(1 + np.sqrt(2 * np.log(slices) * slices / elements))


def _usual(noise: np.ndarray, size: np.ndarray) -> np.ndarray:
    """The usual noise of the slices about as large as each: their root mean square.

    A single slice's noise may be small by chance. Slices of other sizes say nothing about it; but
    where the truth is zero, by the last digits of a sum, the mean over all slices counts.
    """
    known = np.where(np.isfinite(noise), noise, 0.0)
    scale = known.max(initial=0.0) or 1.0
    squares = (known / scale) ** 2
    group = _group_of(np.where(np.isfinite(size), size, 1.0))
    count = np.bincount(group)
    usual = np.bincount(group, squares) / np.maximum(count, 1)
    return scale * np.sqrt(np.where(size == 0, squares.mean(), usual[group]))


def _ratios(error: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """error / noise; 0 / 0 counts as 0. Infinite noise tells nothing: 0, too."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where((error == 0) | np.isinf(noise), 0.0, error / noise)
