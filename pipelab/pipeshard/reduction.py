"""Is the loss a mean over the batch? Read off its equations, traced for a micro-batch and for the whole batch.

A value is *fixed* (it knows nothing of the samples), *samples* (each of its entries is of one sample), or *reduced*: a sum
over the samples of something that each of them makes alone, plus something fixed. Its degree says how it grows with the
number of samples n: a sum has degree 1, and what is divided by n one less. A mean is reduced, of degree 0; the mean of the
micro-batches' means is then the batch's own.

Anything else is *mixed*: a maximum over the batch, a square root of a mean, a position in the batch, and whatever an equation
makes of samples that is not known here to keep them apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from pipelab.pipeshard.graph import (
    CALLS,
    Atom,
    Graph,
    PipeshardError,
    dtype_of,
    function,
    inline,
    place_of,
    shape_of,
    size,
)
from pipelab.pipeshard.primitives import ADD, DRAWS, KEEP, contracts, is_linear, keeps_apart, rounds


class Role(Enum):
    FIXED = "fixed"
    SAMPLES = "samples"
    REDUCED = "reduced"
    MIXED = "mixed"


class Tag(NamedTuple):
    """What a value is to the batch.

    why    the equation that mixed samples
    inner  entries of one sample that lie side by side in the batch's dimension (tokens, after a reshape); 0: any order will do
    """

    role: Role
    degree: float = 0
    why: str = ""
    inner: int = 1


FIXED = Tag(Role.FIXED)
INSIDE = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "checkpoint": "jaxpr",
    "remat2": "jaxpr",
    "remat": "jaxpr",
    **dict.fromkeys(CALLS, "jaxpr"),
}
SIZES = {
    "shape",
    "new_sizes",
    "slice_sizes",
    "limit_indices",
}  # parameters that the results' shapes show as well
LARGEST = 2**22  # elements of what is computed to see how it grows
Pair = tuple[Any, Any]  # the same at both sizes: variables, equations, arrays


class Reductions:
    """Tags of the variables of a loss traced at two batch sizes, by the variables of the first.

    Raises PipeshardError where the two have other equations.
    """

    def __init__(
        self, small: Graph, large: Graph, batch: Sequence[Var], sizes: tuple[int, int]
    ) -> None:
        self.axes: dict[Var, int] = {}  # the dimension that is the batch's
        self._tags: dict[Var, Tag] = {}
        self._sizes, self._ratio = sizes, sizes[1] / sizes[0]
        self._twin: dict[Var, Atom] = {}  # variable of the first trace -> that of the second
        self._values: dict[
            Var, Pair
        ] = {}  # arrays that follow from the batch's size alone, at both sizes
        self._maker: dict[
            Var, Callable[[], None]
        ] = {}  # computes such an array, when it is asked for
        self._parts: dict[Var, list[Pair]] = {}  # what an array of indices was joined of
        self._enter(
            (small, large), [Tag(Role.SAMPLES) if v in batch else FIXED for v in small.inputs], ()
        )
        self._walk(small.equations, large.equations)

    def of(self, pair: Pair) -> Tag:
        """Of a variable or a number at both sizes."""
        a, b = pair
        if isinstance(a, Literal) and isinstance(b, Literal):
            return self._tag_of((a.val, b.val), "")
        if isinstance(a, Literal) or self._twin.get(a) is not b:
            raise self._other()
        return self._tags[a]

    def axis_of(self, pair: Pair) -> int | None:
        """The dimension in which micro-batches can be joined: one in which samples follow each other."""
        axis, tag = self.axes.get(pair[0]) if isinstance(pair[0], Var) else None, self.of(pair)
        if axis is None or tag.role is Role.FIXED or not tag.inner:
            return axis
        return axis if shape_of(pair[0])[axis] == tag.inner * self._sizes[0] else None

    # ---- one equation after another

    def _other(self, place: str = "") -> PipeshardError:
        sizes = f"{self._sizes[0]} samples than for {self._sizes[1]}"
        return PipeshardError(
            f"the loss has other equations for {sizes}{place}: write it the same for every size of batch"
        )

    def _note(self, pair: Pair, tag: Tag) -> None:
        self._tags[pair[0]], self._twin[pair[0]] = tag, pair[1]
        if axes := _axes(pair):
            self.axes[pair[0]] = axes[0]

    def _enter(
        self, graphs: tuple[Graph, Graph], tags: Sequence[Tag], known: Sequence[Pair]
    ) -> None:
        """Note inputs and constants; `known` are atoms outside, one for each of the first inputs."""
        small, large = graphs
        if len(small.consts) != len(large.consts):
            raise self._other()
        for a, b, tag in zip(small.inputs, large.inputs, tags, strict=True):
            self._note((a, b), tag)
        for (a, x), (b, y) in zip(small.consts.items(), large.consts.items(), strict=True):
            if not jnp.issubdtype(dtype_of(a), jax.dtypes.prng_key):
                self._values[a] = (x, y)
            self._note((a, b), self._tag_of((x, y), ""))
        for v, source in zip(small.inputs, known, strict=False):
            if self._is_known(source):
                self._maker[v] = partial(self._copy, v, source)

    def _walk(self, small: Sequence[JaxprEqn], large: Sequence[JaxprEqn]) -> None:
        for a, b in zip(small, large, strict=False):
            if (
                a.primitive is not b.primitive
                or len(a.outvars) != len(b.outvars)
                or len(a.invars) != len(b.invars)
            ):
                raise self._other(f" ({a.primitive.name}, {place_of(a)})")
            self._step(a, b)
        if len(small) != len(large):
            raise self._other()

    def _inside(self, graphs: tuple[Graph, Graph]) -> list[Tag]:
        """Go through what was entered; its results."""
        self._walk(graphs[0].equations, graphs[1].equations)
        return [self.of(pair) for pair in zip(graphs[0].outputs, graphs[1].outputs, strict=True)]

    def _step(self, a: JaxprEqn, b: JaxprEqn) -> None:
        name, ins = a.primitive.name, list(zip(a.invars, b.invars, strict=True))
        tags = [self.of(pair) for pair in ins]
        loops = {"scan": self._scan, "while": self._while, "cond": self._cond}
        if name in INSIDE and INSIDE[name] in a.params:
            graphs = _graphs(a, b, INSIDE[name])
            self._enter(graphs, tags, ins)
            results = self._inside(graphs)
        elif name in loops:
            results = loops[name](a, b, ins, tags)
        elif name == "optimization_barrier":
            results = tags
        else:
            results = [
                self._rule(a, b, ins, list(tags), pair)
                for pair in zip(a.outvars, b.outvars, strict=True)
            ]
        if (
            all(map(self._is_known, ins))
            and name not in DRAWS
            and all(size(v) <= LARGEST for v in b.outvars)
        ):
            self._maker.update(dict.fromkeys(a.outvars, partial(self._evaluate, a, b)))
        if name == "concatenate" and a.params["dimension"] == len(shape_of(a.outvars[0])) - 1:
            self._parts[a.outvars[0]] = ins
        for pair, tag in zip(zip(a.outvars, b.outvars, strict=True), results, strict=True):
            if tag.role is Role.MIXED and pair[0] in self._maker:
                tag = self._tag_of(self._value(pair), tag.why)
            self._note(pair, tag)

    # ---- loops and branches

    def _scan(self, a: JaxprEqn, b: JaxprEqn, ins: Sequence[Pair], tags: list[Tag]) -> list[Tag]:
        graphs, (first, count) = _graphs(a, b, "jaxpr"), carry_of(a)
        if a.params["length"] == b.params["length"]:
            return self._repeat(a, graphs, tags, first, count, ins[:first])
        inner = {t.inner for t in tags if t.role is Role.SAMPLES and t.inner}
        each = (
            not count
            and all(t.role in (Role.FIXED, Role.SAMPLES) and not t.degree for t in tags)
            and len(inner) < 2
        )
        if each and all(_axes(pair) == ([] if i < first else [0]) for i, pair in enumerate(ins)):
            self._enter(graphs, [FIXED] * len(ins), ins[:first])  # lax.map: one sample at a time
            results = self._inside(graphs)
            return [
                t
                if t.role is Role.MIXED
                else Tag(Role.SAMPLES, t.degree, inner=min(inner, default=0))
                for t in results
            ]
        return [_mixed(a, "goes from sample to sample")] * len(a.outvars)

    def _repeat(
        self,
        a: JaxprEqn,
        graphs: tuple[Graph, Graph],
        tags: Sequence[Tag],
        first: int,
        count: int,
        known: Sequence[Pair],
    ) -> list[Tag]:
        """A loop whose state stands among the inputs from `first` on; again, until its tags are those of its next inputs."""
        given = list(tags)
        for _ in range(4):
            self._enter(graphs, given, known)
            results = self._inside(graphs)
            carried = [
                _join([t, u]) or _mixed(a)
                for t, u in zip(given[first : first + count], results[:count], strict=True)
            ]
            if carried == given[first : first + count]:
                return [*carried, *results[count:]]
            given[first : first + count] = carried
        return [_mixed(a)] * len(a.outvars)

    def _while(self, a: JaxprEqn, b: JaxprEqn, ins: Sequence[Pair], tags: list[Tag]) -> list[Tag]:
        begin, (first, count) = a.params["cond_nconsts"], carry_of(a)
        results = self._repeat(
            a, _graphs(a, b, "body_jaxpr"), tags[begin:], first, count, ins[begin : begin + first]
        )
        asked = _graphs(a, b, "cond_jaxpr")
        self._enter(asked, [*tags[:begin], *results], ins[:begin])
        return results if self._inside(asked) == [FIXED] else [_mixed(a)] * len(results)

    def _cond(self, a: JaxprEqn, b: JaxprEqn, ins: Sequence[Pair], tags: list[Tag]) -> list[Tag]:
        found = []
        for i in range(len(a.params["branches"])):
            graphs = _graphs(a, b, "branches", i)
            self._enter(graphs, tags[1:], ins[1:])
            found.append(self._inside(graphs))
        joined = [_join(branches) or _mixed(a) for branches in zip(*found, strict=True)]
        return joined if tags[0] == FIXED else [_mixed(a)] * len(joined)

    # ---- numbers that follow from the batch's size

    def _is_known(self, pair: Pair) -> bool:
        return isinstance(pair[0], Literal) or pair[0] in self._values or pair[0] in self._maker

    def _value(self, pair: Pair) -> Pair:
        a, b = pair
        if isinstance(a, Literal):
            return a.val, b.val
        if a not in self._values:
            self._maker[a]()
        return self._values[a]

    def _copy(self, v: Var, source: Pair) -> None:
        self._values[v] = self._value(source)

    def _evaluate(self, a: JaxprEqn, b: JaxprEqn) -> None:
        made = []
        for i, eqn in enumerate((a, b)):
            pairs = [
                pair for pair in zip(a.invars, b.invars, strict=True) if isinstance(pair[i], Var)
            ]
            known: dict[Any, Any] = {pair[i]: self._value(pair)[i] for pair in pairs}
            made.append(function(list(known), eqn.outvars, [eqn])(*known.values()))
        self._values.update(zip(a.outvars, zip(*made, strict=True), strict=True))

    def _tag_of(self, values: Pair, why: str) -> Tag:
        """Of an array that is known at both sizes."""
        if values[0] is values[1] or jnp.issubdtype(
            jnp.asarray(values[0]).dtype, jax.dtypes.prng_key
        ):
            return FIXED
        x, y = map(np.asarray, values)
        grown, inner = (
            [i for i, (m, n) in enumerate(zip(x.shape, y.shape, strict=True)) if m != n],
            0,
        )
        if grown:
            inner = x.shape[grown[0]] // self._sizes[0]
            if len(grown) > 1 or any(
                v.shape[grown[0]] != inner * n for v, n in zip((x, y), self._sizes, strict=True)
            ):
                return Tag(Role.MIXED, 0, why)
            x, y = (
                np.moveaxis(v, grown[0], 0).reshape(n, -1)
                for v, n in zip((x, y), self._sizes, strict=True)
            )
            if (x != x[:1]).any() or (y != y[:1]).any():  # not the same for every sample
                return Tag(Role.MIXED, 0, why)
            x, y = x[0], y[0]
        degree = self._growth(x, y)
        if degree is None:
            return Tag(Role.MIXED, 0, why)
        return Tag(Role.FIXED, degree) if inner < 2 else Tag(Role.SAMPLES, degree, inner=inner)

    def _growth(self, x: np.ndarray, y: np.ndarray) -> float | None:
        """d, if y is x times the ratio of the sizes to the power d."""
        if np.array_equal(x, y, equal_nan=jnp.issubdtype(x.dtype, jnp.inexact)):
            return 0
        real = any(jnp.issubdtype(x.dtype, kind) for kind in (jnp.integer, jnp.floating))
        if not real or ((x == 0) != (y == 0)).any():
            return None
        rounding = 8 * float(jnp.finfo(x.dtype).eps) if jnp.issubdtype(x.dtype, jnp.floating) else 0
        ratios = y[y != 0].astype(float) / x[x != 0].astype(float)
        if not (
            np.isfinite(ratios).all()
            and ratios.min() > 0
            and np.ptp(ratios) <= rounding * ratios.max()
        ):
            return None
        degree = math.log(ratios[0], self._ratio)
        whole = round(2 * degree) / 2
        return whole if abs(degree - whole) * math.log(self._ratio) <= rounding + 1e-12 else degree

    # ---- what one equation makes of samples

    def _rule(
        self, a: JaxprEqn, b: JaxprEqn, ins: Sequence[Pair], tags: list[Tag], out: Pair
    ) -> Tag:
        name, axes, made = a.primitive.name, [_axes(pair) for pair in ins], _axes(out)
        if name in DRAWS:
            tags = [
                FIXED if self._is_known(pair) else tag for pair, tag in zip(ins, tags, strict=True)
            ]
        indexing = name == "gather" or name.startswith("scatter")
        apart = (
            self._indexed(a, ins, axes, tags)
            if indexing and all(len(x) < 2 for x in axes)
            else None
        )
        roles = {t.role for t in tags}
        if Role.MIXED in roles:
            why = next(t.why for t in tags if t.role is Role.MIXED)
            return (
                Tag(Role.MIXED, 0, why)
                if why
                else _mixed(a, "reads an array or a number made of the batch's size")
            )
        changed = any(
            not _equal(x, b.params.get(key)) for key, x in a.params.items() if key not in SIZES
        )
        if not (made or any(axes) or roles - {Role.FIXED} or any(t.degree for t in tags)):
            return _mixed(a) if changed else FIXED
        degree, inner = (
            self._degree(a, ins, tags),
            {t.inner for t in tags if t.role is Role.SAMPLES and t.inner},
        )
        if name in DRAWS and Role.REDUCED not in roles and not changed and len(made) < 2:
            return (
                Tag(Role.SAMPLES, 0, inner=min(inner, default=0))
                if made
                else FIXED
                if roles <= {Role.FIXED}
                else _mixed(a)
            )
        if degree is None and name in ADD and roles <= {Role.FIXED, Role.REDUCED}:
            return _mixed(
                a, "adds a sum over the samples to what is none (take their mean instead)"
            )
        if (
            degree is None
            or changed
            or len(made) > 1
            or any(len(x) > 1 for x in axes)
            or len(inner) > 1
        ):
            return _mixed(a)
        if Role.REDUCED in roles:
            stays = (
                not made and not any(axes) and is_linear(a, [t.role is Role.FIXED for t in tags])
            )
            return Tag(Role.REDUCED, degree) if stays else _mixed(a)
        role = Role.SAMPLES if Role.SAMPLES in roles else Role.FIXED
        if not made:
            if (name == "reduce_sum" and any(axes)) or (
                name == "dot_general" and contracts(a, axes)
            ):
                return Tag(Role.REDUCED if role is Role.SAMPLES else Role.FIXED, degree + 1)
            return Tag(Role.FIXED, degree) if role is Role.FIXED and not any(axes) else _mixed(a)
        if name == "reshape":
            return self._reshaped(a, ins[0], tags[0]._replace(degree=degree), out)
        if not any(axes):
            alike = name == "broadcast_in_dim" or (
                name == "iota" and a.params["dimension"] not in made
            )
            return Tag(Role.FIXED, degree) if alike else _mixed(a)
        whole = all(
            shape_of(v)[axis[0]] == shape_of(w)[made[0]]
            for pair, axis in zip(ins, axes, strict=True)
            if axis
            for v, w in zip(pair, out, strict=True)
        )
        keeps = whole and (apart if indexing else keeps_apart(a, axes))
        return (
            Tag(role, degree, inner=min(inner, default=int(role is Role.FIXED)))
            if keeps
            else _mixed(a)
        )

    def _degree(self, eqn: JaxprEqn, ins: Sequence[Pair], tags: Sequence[Tag]) -> float | None:
        """Role the result grows with the number of samples, or None where that has no answer."""
        name, degrees = eqn.primitive.name, [t.degree for t in tags]
        if name in ("mul", "dot_general", "conv_general_dilated"):
            return sum(degrees)
        if not any(degrees):
            return 0
        if name == "div" and not rounds(eqn):
            return degrees[0] - degrees[1]
        if name in KEEP and not any(degrees[1:]) and not rounds(eqn):
            return degrees[0]
        if name in ADD:
            first = int(
                name == "select_n"
            )  # the predicate grows with nothing; zeros grow as anything does
            found = {
                d
                for pair, d in zip(ins[first:], degrees[first:], strict=True)
                if not self._is_zero(pair)
            }
            return found.pop() if len(found) == 1 and not any(degrees[:first]) else None
        return None

    def _is_zero(self, pair: Pair) -> bool:
        return self._is_known(pair) and not any(np.any(np.asarray(x)) for x in self._value(pair))

    def _reshaped(self, eqn: JaxprEqn, pair: Pair, tag: Tag, out: Pair) -> Tag:
        """Samples in another shape: where each one's entries lie now."""
        (axis,), (made,) = _axes(pair), _axes(out)
        if tag.inner == 0:
            return tag
        found = set()
        for v, w, n in zip(pair, out, self._sizes, strict=True):
            inner = tag.inner if tag.role is Role.SAMPLES else shape_of(v)[axis] // n
            now, rest = divmod(
                inner * math.prod(shape_of(v)[axis + 1 :]), math.prod(shape_of(w)[made + 1 :])
            )
            found.add((now, rest or not now or shape_of(w)[made] % (n * now)))
        now, apart = found.pop()
        return Tag(Role.SAMPLES, tag.degree, inner=now) if not found and not apart else _mixed(eqn)

    def _indexed(
        self, eqn: JaxprEqn, ins: Sequence[Pair], axes: Sequence[list[int]], tags: list[Tag]
    ) -> bool:
        """Whether a gather or scatter keeps samples apart. x[jnp.arange(n), labels] does: such positions are no mixture."""
        numbers = eqn.params["dimension_numbers"]
        if eqn.primitive.name == "gather":
            batched, their = numbers.operand_batching_dims, numbers.start_indices_batching_dims
            asked, single = numbers.start_index_map, numbers.collapsed_slice_dims
        else:
            batched, their = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
            asked, single = numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims
        (axis, at), last = (x[0] if x else None for x in axes[:2]), len(shape_of(eqn.invars[1])) - 1
        if at == last or (len(ins) > 2 and not (axes[0] and axes[2])):
            return False
        if axis is None or axis in batched:
            return axis is None or at == their[batched.index(axis)]
        if axis not in asked:
            return at is None
        offset, column, rest = 0, asked.index(axis), []
        for part in self._parts.get(ins[1][0], [ins[1]]):
            width = shape_of(part[0])[-1]
            if offset != column:
                rest.append(self.of(part))
            elif (
                width != 1
                or at is None
                or not self._is_known(part)
                or not all(_counts(x, at) for x in self._value(part))
            ):
                return False
            offset += width
        joined = _join([FIXED, *rest])
        tags[1] = joined or tags[1]
        return at is not None and axis in single


def _mixed(eqn: JaxprEqn, why: str = "makes it another") -> Tag:
    return Tag(Role.MIXED, 0, f"{eqn.primitive.name} ({place_of(eqn)}) {why}")


def _join(tags: Sequence[Tag]) -> Tag | None:
    """Of what is one or another, as they come."""
    roles, inner = (
        {t.role for t in tags},
        {t.inner for t in tags if t.role is Role.SAMPLES and t.inner},
    )
    if Role.MIXED in roles:
        return next(t for t in tags if t.role is Role.MIXED)
    if {Role.SAMPLES, Role.REDUCED} <= roles or len(inner) > 1 or len({t.degree for t in tags}) > 1:
        return None
    if Role.SAMPLES in roles:
        return Tag(Role.SAMPLES, tags[0].degree, inner=min(inner, default=0))
    return Tag(Role.REDUCED if Role.REDUCED in roles else Role.FIXED, tags[0].degree)


def _graphs(a: JaxprEqn, b: JaxprEqn, key: str, branch: int | None = None) -> tuple[Graph, Graph]:
    """What two equations run inside; every variable is new, since one jaxpr may be run by several."""
    x, y = (e.params[key] if branch is None else e.params[key][branch] for e in (a, b))
    return inline(x, a), inline(y, b)


def carry_of(eqn: JaxprEqn) -> tuple[int, int]:
    """Where a loop's carry begins among the inputs of its body, and how many values it has."""
    params = eqn.params
    if eqn.primitive.name == "while":
        return params["body_nconsts"], len(eqn.outvars)
    if "ft_in" in params:  # since jax 0.11
        constants, carry, _ = params["ft_in"].unpack()
        return len(constants), len(carry)
    return params["num_consts"], params["num_carry"]


def _axes(pair: Pair) -> list[int]:
    """The dimensions that grow with the batch."""
    shapes = [shape_of(x) for x in pair]
    return [i for i, (m, n) in enumerate(zip(*shapes, strict=False)) if m != n]


def _equal(x: Any, y: Any) -> bool:
    """Of two parameters of an equation; functions and jaxprs are looked at elsewhere, if at all."""
    code = isinstance(x, (Jaxpr, ClosedJaxpr)) or (callable(x) and not isinstance(x, type))
    return code or bool(x == y or (x != x and y != y))  # not a number


def _counts(positions: Any, axis: int) -> bool:
    """Whether an array of indices, the last dimension of which is 1, is 0, 1, 2, ... along this dimension."""
    x = np.moveaxis(np.asarray(positions), axis, -1)
    return bool((x == np.arange(x.shape[-1])).all())
