"""Is the loss a mean over the batch? Read off its equations, traced at two batch sizes.

A value is *fixed* (it knows nothing of the batch), *samples* (one entry per sample), or *reduced*: a sum over the samples of
something that each of them makes alone, plus something fixed. Its degree says how it grows with the number of samples n: a
sum has degree 1, and what is divided by n one less. A mean is reduced, of degree 0; the mean of the micro-batches' means is
then the batch's own. Anything else that a batch is made into (a maximum, a square root of a mean) is *mixed*.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from pipelab.pipeshard.graph import Atom, Graph, PipeshardError, place_of, shape_of


class How(Enum):
    FIXED = "fixed"
    SAMPLES = "samples"
    REDUCED = "reduced"
    MIXED = "mixed"


class Tag(NamedTuple):
    """What a value is to the batch; `why` names the equation that mixed samples."""

    how: How
    degree: float = 0
    why: str = ""


FIXED = Tag(How.FIXED)
KEEP = {
    "neg", "convert_element_type", "reshape", "squeeze", "broadcast_in_dim", "transpose", "copy", "copy_p", "reduce_sum",
    "reduce_precision", "slice", "pad", "real", "imag", "sharding_constraint", "optimization_barrier", "pvary", "name",
}  # fmt: skip
ADD = {"add", "sub", "add_any", "select_n", "concatenate"}
ALONG = {"cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "rev", "top_k"}
INSIDE = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr", "checkpoint": "jaxpr", "remat2": "jaxpr",
          "remat": "jaxpr"}  # fmt: skip
LOOPS = ("scan", "while", "cond")
Pair = tuple[Atom, Atom]


class Reductions:
    """Tags of the variables of a loss traced at two batch sizes, by the variables of the first."""

    def __init__(self, small: Graph, large: Graph, batch: Sequence[Var]) -> None:
        self.axes: dict[Var, int] = {}  # the dimension that is the batch's
        self.tags: dict[Var, Tag] = {}
        self._values: dict[Var, tuple[Any, Any]] = {}  # of numbers that are known while tracing, at both sizes
        ratios = [shape_of(b)[0] / shape_of(a)[0] for a, b in zip(small.inputs, large.inputs, strict=True) if a in batch]
        self._ratio = ratios[0]
        for both in zip(small.inputs, large.inputs, strict=True):
            self._note(both, Tag(How.SAMPLES) if both[0] in batch else FIXED)
        for a, b in zip(small.consts, large.consts, strict=False):
            self._note((a, b), FIXED)
        self._walk(small.equations, large.equations)

    def of(self, atom: Atom) -> Tag:
        return FIXED if isinstance(atom, Literal) else self.tags.get(atom, FIXED)

    # ---- one equation after another

    def _note(self, pair: Pair, tag: Tag) -> None:
        if isinstance(pair[0], Var):
            self.tags[pair[0]] = tag
            if axes := _axes(pair):
                self.axes[pair[0]] = axes[0]

    def _walk(self, small: Sequence[JaxprEqn], large: Sequence[JaxprEqn]) -> None:
        if [e.primitive for e in small] != [e.primitive for e in large]:
            raise PipeshardError("the loss has other equations for other batch sizes: make it the same for every size")
        for a, b in zip(small, large, strict=True):
            self._step(a, b)

    def _step(self, a: JaxprEqn, b: JaxprEqn) -> None:
        name = a.primitive.name
        ins, outs = list(zip(a.invars, b.invars, strict=True)), list(zip(a.outvars, b.outvars, strict=True))
        if name in INSIDE and INSIDE[name] in a.params:
            self._enter(a, b, ins, outs)
            return
        mixed = self._look_inside(a, b, ins, outs) if name in LOOPS else None
        self._fold(a, b)
        tags = [self._tag_with_value(pair) for pair in ins]
        for pair in outs:
            tag = mixed or _rule(a, tags, [_axes(p) for p in ins], _axes(pair))
            if tag.how is How.SAMPLES and any(n / m != self._ratio for m, n in _grown(pair)):
                tag = Tag(How.MIXED, 0, f"{name} ({place_of(a)})")  # some samples were left out
            self._note(pair, tag)

    def _enter(self, a: JaxprEqn, b: JaxprEqn, ins: Sequence[Pair], outs: Sequence[Pair]) -> None:
        """Go through an equation that wraps others: a custom derivative, a checkpoint."""
        inner = [getattr(e.params[INSIDE[e.primitive.name]], "jaxpr", e.params[INSIDE[e.primitive.name]]) for e in (a, b)]
        small, large = (x for x in inner if isinstance(x, Jaxpr))
        for (source, _), inside in zip(ins, zip(small.invars, large.invars, strict=True), strict=True):
            self._note(inside, self.of(source))
        self._walk(small.eqns, large.eqns)
        for (result, _), pair in zip(zip(small.outvars, large.outvars, strict=True), outs, strict=True):
            self._note(pair, self.of(result))

    def _look_inside(self, a: JaxprEqn, b: JaxprEqn, ins: Sequence[Pair], outs: Sequence[Pair]) -> Tag | None:
        """The tag of what is mixed within a loop's body or a branch; twice, since a loop's results are its next inputs."""
        bodies = [[getattr(x, "jaxpr", x) for x in _bodies(e)] for e in (a, b)]
        for small, large in zip(*bodies, strict=True):
            pairs = list(zip(small.invars, large.invars, strict=True))
            for (source, _), inside in zip(ins[len(ins) - len(pairs) :], pairs, strict=True):
                self._note(inside, self.of(source))
            results = list(zip(small.outvars, large.outvars, strict=True))
            for _ in range(2):
                self._walk(small.eqns, large.eqns)
                first, carried = carry_of(a)
                for (made, _), inside in zip(results[:carried], pairs[first : first + carried], strict=True):
                    if self.of(made).how is not How.FIXED:
                        self._note(inside, self.of(made))
            if found := [self.of(made) for made, _ in results if self.of(made).how is How.MIXED]:
                return found[0]
        return None

    def _fold(self, a: JaxprEqn, b: JaxprEqn) -> None:
        """Follow numbers such as the batch size through casts and arithmetic."""
        does: dict[str, Any] = {"convert_element_type": lambda x: x, "mul": lambda x, y: x * y, "div": lambda x, y: x / y,
                "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "neg": lambda x: -x, "sqrt": math.sqrt,
                "broadcast_in_dim": lambda x: x, "integer_pow": lambda x: x ** a.params["y"]}  # fmt: skip
        values = [self._value(pair) for pair in zip(a.invars, b.invars, strict=True)]
        if a.primitive.name in does and all(v is not None for v in values):
            try:
                made = tuple(does[a.primitive.name](*(v[i] for v in values if v)) for i in (0, 1))
                self._values[a.outvars[0]] = (made[0], made[1])
            except (ArithmeticError, ValueError):
                pass

    def _value(self, pair: Pair) -> tuple[Any, Any] | None:
        if isinstance(pair[0], Literal) and isinstance(pair[1], Literal):
            if np.size(pair[0].val) == 1 and np.issubdtype(np.asarray(pair[0].val).dtype, np.number):
                return tuple(float(np.asarray(x.val).reshape(())) for x in pair)  # type: ignore[return-value, union-attr]
            return None
        return None if isinstance(pair[0], Literal) else self._values.get(pair[0])

    def _tag_with_value(self, pair: Pair) -> Tag:
        value = self._value(pair)
        if value and value[0] and value[1] and value[1] / value[0] > 0:
            return Tag(How.FIXED, round(math.log(value[1] / value[0], self._ratio), 6))
        return self.of(pair[0])


def _bodies(eqn: JaxprEqn) -> Sequence[Any]:
    """What a loop or a branch runs; its inputs are the last ones of the equation's."""
    return eqn.params["branches"] if eqn.primitive.name == "cond" else [eqn.params.get("body_jaxpr", eqn.params.get("jaxpr"))]


def carry_of(eqn: JaxprEqn) -> tuple[int, int]:
    """Where a loop's carry begins among the inputs of its body, and how many values it has."""
    params = eqn.params
    if eqn.primitive.name == "while":
        return params["body_nconsts"], len(eqn.outvars)
    if eqn.primitive.name != "scan":
        return 0, 0
    if "ft_in" in params:  # since jax 0.11
        constants, carry, _ = params["ft_in"].unpack()
        return len(constants), len(carry)
    return params["num_consts"], params["num_carry"]


def _axes(pair: Pair) -> list[int]:
    """The dimensions that grow with the batch."""
    shapes = [shape_of(x) for x in pair]
    return [i for i, (m, n) in enumerate(zip(*shapes, strict=False)) if m != n]


def _grown(pair: Pair) -> list[tuple[int, int]]:
    """Those dimensions' sizes."""
    return [(shape_of(pair[0])[i], shape_of(pair[1])[i]) for i in _axes(pair)]


def _rule(eqn: JaxprEqn, tags: Sequence[Tag], axes: Sequence[list[int]], made: list[int]) -> Tag:
    """What one equation makes of values with these tags, whose batch dimensions are `axes`; `made` is the result's."""
    name = eqn.primitive.name
    mixed = Tag(How.MIXED, 0, f"{name} ({place_of(eqn)})" if eqn.source_info else name)
    hows = {t.how for t in tags}
    if How.MIXED in hows:
        return next(t for t in tags if t.how is How.MIXED)
    degree = _degree(name, tags)
    if hows <= {How.FIXED}:
        reduced = name == "reduce_sum" and set(axes[0]) & set(eqn.params["axes"])
        return Tag(How.FIXED, (degree or 0) + bool(reduced))
    if degree is None or len(made) > 1:
        return mixed
    if made:
        crossing = bool(name in ALONG and _dimension(eqn) in axes[0])
        if name == "gather":
            crossing = not set(axes[0]).isdisjoint(eqn.params["dimension_numbers"].start_index_map)
        return mixed if How.REDUCED in hows or crossing else Tag(How.SAMPLES, degree)
    if How.SAMPLES in hows:
        if name == "reduce_sum" and set(axes[0]) <= set(eqn.params["axes"]):
            return Tag(How.REDUCED, degree + 1)
        if name == "dot_general":
            (left, right), _ = eqn.params["dimension_numbers"]
            if set(axes[0]) <= set(left) and set(axes[1]) <= set(right) and How.REDUCED not in hows:
                return Tag(How.REDUCED, degree + 1)
        return mixed
    linear = name in KEEP or name in ADD or (name in ("mul", "dot_general") and How.FIXED in hows)
    divided = name == "div" and tags[1].how is How.FIXED
    chosen = name == "select_n" and tags[0].how is not How.FIXED
    return Tag(How.REDUCED, degree) if (linear or divided) and not chosen else mixed


def _degree(name: str, tags: Sequence[Tag]) -> float | None:
    """How the result grows with the number of samples, or None where that has no answer."""
    degrees = [t.degree for t in tags]
    if name in ("mul", "dot_general"):
        return sum(degrees)
    if name == "div":
        return degrees[0] - degrees[1]
    if name in KEEP:
        return degrees[0] if degrees else 0
    if name in ADD:
        given = degrees[1:] if name == "select_n" else degrees
        return given[0] if all(a == b for a, b in pairwise(given)) else None
    return None if any(degrees) else 0


def _dimension(eqn: JaxprEqn) -> Any:
    for key in ("axis", "dimension"):
        if key in eqn.params:
            return eqn.params[key]
    return next(iter(eqn.params.get("dimensions", ())), None)
