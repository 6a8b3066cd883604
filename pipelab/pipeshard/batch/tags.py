"""Tags: how a value relates to the batch.

A function is traced twice, for two batch sizes. So everything comes in pairs, and an array's batch
dimension is the one that differs.
"""

import math
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from pipelab.jax.jaxpr import place_of, single
from pipelab.pipeshard.arrays import shape_of

Pair = tuple[Any, Any]  # the same at both sizes: variables, equations, arrays
Pairs = list[Pair]


class Role(Enum):
    FIXED = "fixed"  # independent of the samples' values
    SAMPLES = "samples"  # each entry belongs to one sample
    REDUCED = "reduced"  # a sum over samples, plus something fixed
    MIXED = "mixed"  # anything else


class Tag(NamedTuple):
    """The relation of a value to the batch (see `reduction`).

    degree  of its growth with the number of samples
    why     the equation that mixed samples
    inner   entries of one sample that lie side by side in the batch's dimension (tokens, after a
            reshape); 0: any order will do
    """

    role: Role
    degree: float = 0
    why: str = ""
    inner: int = 1


FIXED = Tag(Role.FIXED)
Tags = list[Tag]


def paired(small: Iterable[Any], large: Iterable[Any]) -> Pairs:
    return list(zip(small, large, strict=True))


# What an equation that mixes samples does with them, by what the user may have written.
MIXES = {
    "iota": (
        "numbers the entries of the batch, as jnp.arange and jnp.argsort do (in a micro-batch they "
        "have other numbers)"
    ),
    **dict.fromkeys(
        ("pure_callback", "io_callback", "ffi_call"),
        "runs code that cannot be looked into, and may mix samples",
    ),
}


def mixed(eqn: JaxprEqn, why: str = "") -> Tag:
    name = eqn.primitive.name
    why = why or MIXES.get(name, "does not keep the samples apart")
    return Tag(Role.MIXED, 0, f"{name} ({place_of(eqn)}) {why}")


def samples(degree: float, inner: Iterable[int]) -> Tag:
    return Tag(Role.SAMPLES, degree, inner=min(inner, default=0))


def inner_of(tags: Iterable[Tag]) -> set[int]:
    """How samples lie in these values, which can be combined if there is at most one answer."""
    return {tag.inner for tag in tags if tag.role is Role.SAMPLES and tag.inner}


def join(tags: Sequence[Tag]) -> Tag | None:
    """The tag of a value that may be any one of these; None if there is no such tag."""
    roles, inner = {tag.role for tag in tags}, inner_of(tags)
    degree = tags[0].degree
    if Role.MIXED in roles:
        return next(tag for tag in tags if tag.role is Role.MIXED)
    if len(inner) > 1 or {Role.SAMPLES, Role.REDUCED} <= roles:
        return None
    if any(tag.degree != degree for tag in tags):
        return None
    if Role.SAMPLES in roles:
        return samples(degree, inner)
    return Tag(Role.REDUCED if Role.REDUCED in roles else Role.FIXED, degree)


def axes_of(pair: Pair) -> list[int]:
    """The dimensions that grow with the batch."""
    small, large = map(shape_of, pair)
    return [i for i, (m, n) in enumerate(zip(small, large, strict=False)) if m != n]


def cotangent(tag: Tag, pair: Pair) -> Tag:
    """The tag of the loss's gradient by a value with this tag, which is not mixed.

    The gradient by a sample's value is that sample's. To the gradient by a shared value, every
    sample adds. The gradient by a sum over the samples is fixed, since the loss is linear in it.

    The degree is as for a loss that is a sum: a micro-batch's mean is weighted by 1 / m.
    """
    if tag.role is Role.SAMPLES or axes_of(pair):
        return samples(-tag.degree, inner_of([tag]))
    return Tag(Role.FIXED if tag.role is Role.REDUCED else Role.REDUCED, 1 - tag.degree)


class Known:
    """Arrays that follow from the batch's size alone: len(x), jnp.arange(len(x)), 1 / len(x).

    They are computed at both sizes, on first use.

    arrays  those computed so far
    parts   an array of indices -> the arrays joined into it, with tags
    """

    def __init__(self, sizes: tuple[int, int]) -> None:
        self.sizes = sizes
        self.arrays: dict[Pair, Pair] = {}
        self.parts: dict[Var, list[tuple[Pair, Tag]]] = {}
        self._makers: dict[Pair, Pair] = {}  # result -> the equations that make it

    def add_results(self, a: JaxprEqn, b: JaxprEqn) -> None:
        """Add the results of an equation with known operands."""
        self._makers.update(dict.fromkeys(paired(a.outvars, b.outvars), (a, b)))

    def __contains__(self, pair: Pair) -> bool:
        return isinstance(pair[0], Literal) or pair in self.arrays or pair in self._makers

    def values(self, pair: Pair) -> Pair:
        a, b = pair
        if isinstance(a, Literal):
            return a.val, b.val
        if pair not in self.arrays:
            self.arrays.update(self._evaluate(*self._makers[pair]))
        return self.arrays[pair]

    def is_zero(self, pair: Pair) -> bool:
        return pair in self and not any(np.any(np.asarray(x)) for x in self.values(pair))

    def _evaluate(self, a: JaxprEqn, b: JaxprEqn) -> dict[Pair, Pair]:
        operands = list(map(self.values, paired(a.invars, b.invars)))
        small = single(a).run(*(x for x, _ in operands))
        large = single(b).run(*(y for _, y in operands))
        return dict(zip(paired(a.outvars, b.outvars), paired(small, large), strict=True))

    def tag(self, pair: Pair, why: str = "") -> Tag:
        """The tag, from the values at both sizes; `why` is the reason if it is mixed."""
        unknown = Tag(Role.MIXED, 0, why)
        values = self.values(pair)
        # One array in both traces: the loss closes over it.
        if values[0] is values[1]:
            return FIXED
        x, y = map(np.asarray, values)
        grown = axes_of(pair)
        inner = 0
        if grown:
            # The same entries for every sample, such as ones: they grow as those of one sample do.
            axis = grown[0]
            inner = x.shape[axis] // self.sizes[0]
            rows = []
            for array, n in zip((x, y), self.sizes, strict=True):
                if len(grown) > 1 or array.shape[axis] != inner * n:
                    return unknown
                each = np.moveaxis(array, axis, 0).reshape(n, -1)
                if (each != each[:1]).any():
                    return unknown
                rows.append(each[0])
            x, y = rows
        degree = _growth(x, y, self.sizes[1] / self.sizes[0])
        if degree is None:
            return unknown
        return Tag(Role.FIXED, degree) if inner < 2 else samples(degree, [inner])


def _growth(x: np.ndarray, y: np.ndarray, ratio: float) -> float | None:
    """The d for which y = x ratio^d, if there is one; `ratio` is that of the sizes."""
    inexact, floating = (jnp.issubdtype(x.dtype, kind) for kind in (jnp.inexact, jnp.floating))
    # [1] The same at both sizes.
    if np.array_equal(x, y, equal_nan=inexact):
        return 0
    real = floating or jnp.issubdtype(x.dtype, jnp.integer)
    if not real or ((x == 0) != (y == 0)).any():
        return None
    rounding = 8 * float(jnp.finfo(x.dtype).eps) if floating else 0
    # [2] Every entry must have grown by the same factor, up to rounding.
    ratios = y[y != 0].astype(float) / x[x != 0].astype(float)
    alike = np.isfinite(ratios).all() and np.ptp(ratios) <= rounding * ratios.max()
    if not alike or ratios.min() <= 0:
        return None
    # [3] A sum, a mean and a square root have degrees of 1, 0 and 1/2: round to such a degree.
    degree = math.log(ratios[0], ratio)
    half = round(2 * degree) / 2
    close = abs(degree - half) * math.log(ratio) <= rounding + 1e-12
    return half if close else degree
