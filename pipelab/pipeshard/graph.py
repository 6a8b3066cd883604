"""Equations of a jaxpr as a list to look at, cut and evaluate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, DebugInfo, Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun

Atom = Var | Literal
CALLS = ("jit", "pjit", "closed_call", "core_call")


class PipeshardError(ValueError):
    """A train step or a plan that cannot be made a pipeline; the message says what, where and what to do."""


@dataclass
class Graph:
    """Equations without calls of jitted functions in between.

    inputs, outputs  variables (an output may be a literal)
    consts           variable -> the array that the traced function closed over
    """

    inputs: list[Var]
    outputs: list[Atom]
    equations: list[JaxprEqn]
    consts: dict[Var, Any] = field(default_factory=dict)


def inline(traced: ClosedJaxpr | Jaxpr, outer: JaxprEqn | None = None) -> Graph:
    """A traced function with the jitted functions that it calls written out; every variable is new.

    outer  the equation that it stands in: an equation that names no line of the user's takes its own
    """
    closed = traced if isinstance(traced, ClosedJaxpr) else ClosedJaxpr(traced, ())
    consts: dict[Var, Any] = {}
    equations: list[JaxprEqn] = []

    def enter(inner: ClosedJaxpr, given: Sequence[Atom], outer: JaxprEqn | None) -> list[Atom]:
        fresh = [Var(v.aval) for v in inner.jaxpr.constvars]
        consts.update(zip(fresh, inner.consts, strict=True))
        names: dict[Var, Atom] = dict(zip(inner.jaxpr.constvars, fresh, strict=True))
        names.update(zip(inner.jaxpr.invars, given, strict=True))
        for eqn in inner.jaxpr.eqns:
            arguments = [a if isinstance(a, Literal) else names[a] for a in eqn.invars]
            if outer is not None and _frame_of(eqn) is None:
                eqn = eqn.replace(source_info=outer.source_info)
            if eqn.primitive.name in CALLS:
                results = enter(eqn.params["jaxpr"], arguments, eqn)
            else:
                results = [Var(v.aval) for v in eqn.outvars]
                equations.append(eqn.replace(invars=arguments, outvars=results))
            names.update(zip(eqn.outvars, results, strict=True))
        return [a if isinstance(a, Literal) else names[a] for a in inner.jaxpr.outvars]

    inputs = [Var(v.aval) for v in closed.jaxpr.invars]
    return Graph(inputs, enter(closed, inputs, outer), equations, consts)


def renamed(eqn: JaxprEqn, names: Mapping[Var, Atom]) -> JaxprEqn:
    """The equation with other inputs."""
    return eqn.replace(invars=[names.get(a, a) if isinstance(a, Var) else a for a in eqn.invars])


def variables(atoms: Iterable[Atom]) -> list[Var]:
    return [a for a in atoms if not isinstance(a, Literal)]


def depending(equations: Iterable[JaxprEqn], sources: Iterable[Var]) -> set[Var]:
    """All variables that depend on one of the sources, which are among them."""
    found = set(sources)
    for eqn in equations:
        if not found.isdisjoint(variables(eqn.invars)):
            found.update(eqn.outvars)
    return found


def needed(equations: Sequence[JaxprEqn], outputs: Iterable[Atom]) -> list[JaxprEqn]:
    """The equations that the outputs need, in order."""
    wanted, kept = set(variables(outputs)), []
    for eqn in reversed(equations):
        if eqn.effects or not wanted.isdisjoint(eqn.outvars):
            wanted.update(variables(eqn.invars))
            kept.append(eqn)
    return kept[::-1]


def function(
    inputs: Sequence[Var], outputs: Sequence[Atom], equations: Sequence[JaxprEqn]
) -> Callable[..., list[Any]]:
    """The equations as a function of the inputs -> a list of the outputs."""
    about = DebugInfo("pipelab.pipeshard", "a part of the train step", None, None)
    jaxpr = Jaxpr((), list(inputs), list(outputs), list(equations), debug_info=about)
    return jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))


def inner_jaxprs(eqn: JaxprEqn) -> Iterator[Jaxpr]:
    """The jaxprs in an equation's parameters: a loop's body, a custom derivative's function."""
    for value in eqn.params.values():
        for x in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(x, ClosedJaxpr):
                yield x.jaxpr
            elif isinstance(x, Jaxpr):
                yield x


def contains(eqn: JaxprEqn, names: Iterable[str]) -> bool:
    """Whether the equation, or one inside it, has one of these primitives."""
    names = set(names)
    return eqn.primitive.name in names or any(
        contains(e, names) for j in inner_jaxprs(eqn) for e in j.eqns
    )


def shape_of(atom: Atom) -> tuple[int, ...]:
    return getattr(atom.aval, "shape", ())


def dtype_of(atom: Atom) -> Any:
    return atom.aval.dtype  # type: ignore[attr-defined]


def size(atom: Atom) -> int:
    """Elements of an array."""
    return math.prod(shape_of(atom))


def is_key(atom: Atom) -> bool:
    """Whether it may be a random key, typed or raw."""
    return jnp.issubdtype(dtype_of(atom), jax.dtypes.prng_key) or dtype_of(atom) == np.uint32


def bytes_of(atom: Atom) -> int:
    return size(atom) * dtype_of(atom).itemsize


def place_of(eqn: JaxprEqn) -> str:
    """The line of the user's code that made an equation, for an error."""
    frame = _frame_of(eqn)
    return f"{frame.file_name}:{frame.start_line}" if frame else "an unknown line"


def _frame_of(eqn: JaxprEqn) -> Any:
    from jax._src import source_info_util  # no public way to it

    here = str(Path(__file__).parent)
    try:
        frames = list(source_info_util.user_frames(eqn.source_info.traceback))
    except Exception:  # a message without the line is better than none
        return None
    return next((f for f in frames if not f.file_name.startswith(here)), None)
