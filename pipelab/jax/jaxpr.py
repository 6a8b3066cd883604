"""Equations of a jaxpr as a list to look at, cut and evaluate."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from traceback import walk_tb
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import (
    ClosedJaxpr,
    DebugInfo,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxpr_as_fun,
    jaxprs_in_params,
)

Atom = Var | Literal
Arrays = list[Any]  # in the order of some variables
Values = dict[Var, Any]  # variable -> array
Variables = list[Var]
Equations = list[JaxprEqn]
LIBRARY = Path(__file__).parents[1]
OURS = tuple(str(LIBRARY / room) for room in ("jax", "runtime", "pipeshard"))  # no code of a user's
FRAMEWORKS = re.compile(r"site-packages.(flax|optax|chex)\W")  # a user's code calls them
CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr"}  # of what, by parameter


@dataclass(eq=False)  # two are the same if they are one
class Graph:
    """Equations without calls of jitted functions in between.

    inputs, outputs  variables (an output may be a literal)
    consts           variable -> the array that the traced function closed over
    """

    inputs: Variables
    outputs: Sequence[Atom]
    equations: Equations
    consts: Values = field(default_factory=dict)

    @property
    def sources(self) -> Variables:
        """Variables that equations read and none makes: the inputs, then the constants."""
        return [*self.inputs, *self.consts]

    def depending(self, sources: Iterable[Var]) -> set[Var]:
        """All variables that depend on one of the sources, which are among them."""
        found = set(sources)
        for eqn in self.equations:
            # Equations are in an order in which they can run: one pass is enough.
            if not found.isdisjoint(variables(eqn.invars)):
                found.update(eqn.outvars)
        return found

    @property
    def jaxpr(self) -> ClosedJaxpr:
        about = DebugInfo("pipelab", "some equations", None, None)
        constants, outputs = list(self.consts), list(self.outputs)
        jaxpr = Jaxpr(constants, self.inputs, outputs, self.equations, debug_info=about)
        return ClosedJaxpr(jaxpr, list(self.consts.values()))

    def run(self, *values: Any) -> Arrays:
        """Evaluate the equations: input values -> output values."""
        return jaxpr_as_fun(self.jaxpr)(*values)


def inline(
    traced: ClosedJaxpr | Jaxpr, inputs: Sequence[Atom] = (), outer: JaxprEqn | None = None
) -> Graph:
    """A traced function with the jitted functions that it calls written out.

    Every variable is new, since jax shares one jaxpr between all calls of a jitted function.

    inputs  its arguments, or the first of them; for the others the graph has inputs
    outer   the equation it is in: an equation without a line of the user's takes that one's line
    """
    closed = traced if isinstance(traced, ClosedJaxpr) else ClosedJaxpr(traced, ())
    consts: Values = {}
    equations: Equations = []

    def enter(inner: ClosedJaxpr, inputs: Sequence[Atom], outer: JaxprEqn | None) -> list[Atom]:
        # [1] What the inner function closed over becomes a constant of the graph.
        fresh = [Var(v.aval) for v in inner.jaxpr.constvars]
        consts.update(zip(fresh, inner.consts, strict=True))
        inside = [*inner.jaxpr.constvars, *inner.jaxpr.invars]
        names: dict[Var, Atom] = dict(zip(inside, [*fresh, *inputs], strict=True))
        # [2] Calls are entered, and all else is copied with variables of its own.
        for eqn in inner.jaxpr.eqns:
            if outer is not None and not _user_frames(eqn):
                eqn = eqn.replace(source_info=outer.source_info)
            eqn = renamed(eqn, names)
            if eqn.primitive.name in CALLS:
                inside_it = eqn.params[CALLS[eqn.primitive.name]]
                results: list[Any] = enter(inside_it, eqn.invars, eqn)
            else:
                results = [Var(v.aval) for v in eqn.outvars]
                equations.append(eqn.replace(outvars=results))
            names.update(zip(eqn.outvars, results, strict=True))
        return substitute(inner.jaxpr.outvars, names)

    others = [Var(v.aval) for v in closed.jaxpr.invars[len(inputs) :]]
    return Graph(others, enter(closed, [*inputs, *others], outer), equations, consts)


def single(eqn: JaxprEqn) -> Graph:
    """One equation as a function of all its operands."""
    inputs = [Var(atom.aval) for atom in eqn.invars]
    return Graph(inputs, eqn.outvars, [eqn.replace(invars=[*inputs])])


def substitute(atoms: Iterable[Atom], names: Mapping[Var, Atom]) -> list[Atom]:
    """The atoms with those variables replaced that `names` names."""
    return [a if isinstance(a, Literal) else names.get(a, a) for a in atoms]


def renamed(eqn: JaxprEqn, names: Mapping[Var, Atom]) -> JaxprEqn:
    """The equation with other inputs."""
    return eqn.replace(invars=substitute(eqn.invars, names))


def spec_of(of: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """The shape and type of an atom or array; a Python number's type stays weak."""
    aval = getattr(of, "aval", of)
    weak = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=weak)


def is_mutable(of: Any) -> bool:
    """Whether an atom or array is a mutable one (jax.new_ref)."""
    return hasattr(getattr(of, "aval", of), "inner_aval")


def variables(atoms: Iterable[Atom]) -> Variables:
    return [a for a in atoms if not isinstance(a, Literal)]


def needed(
    equations: Equations, outputs: Iterable[Atom], always: Collection[JaxprEqn] = ()
) -> Equations:
    """The equations that the outputs need, in order.

    always  equations that are kept although nothing reads them
    """
    # From the last one to the first: who reads a result is known before its maker is reached.
    wanted = set(variables(outputs))
    kept = []
    for eqn in reversed(equations):
        if eqn in always or not wanted.isdisjoint(eqn.outvars):
            wanted.update(variables(eqn.invars))
            kept.append(eqn)
    return kept[::-1]


def read_by(equations: Equations, outputs: Iterable[Atom] = ()) -> Variables:
    """The variables that equations or outputs read, and that no equation makes."""
    made = {v for eqn in equations for v in eqn.outvars}
    read = [v for eqn in equations for v in variables(eqn.invars)]
    # Not a set: its order is another in each process, and so would be the compiled program.
    return [v for v in dict.fromkeys([*read, *variables(outputs)]) if v not in made]


def all_equations(equations: Iterable[JaxprEqn]) -> Iterator[JaxprEqn]:
    """These and all inside them: a loop's body, a custom derivative's function."""
    for eqn in equations:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from all_equations(inner.eqns)


def contains(eqn: JaxprEqn, names: Collection[str]) -> bool:
    """Whether the equation, or one inside it, has one of these primitives."""
    return any(inner.primitive.name in names for inner in all_equations([eqn]))


def rounding_unit(made: Iterable[JaxprEqn], read: Iterable[Any]) -> jnp.finfo:
    """The coarsest type that equations, and all inside them, compute in or read.

    It is float32 if there are only whole numbers.
    """
    inside = [v for eqn in all_equations(made) for v in eqn.outvars if hasattr(v.aval, "dtype")]
    types = {v.aval.dtype for v in (*read, *inside)}
    inexact = [x for x in types if jnp.issubdtype(x, jnp.inexact)]
    found = max(map(jnp.finfo, inexact), key=lambda of: float(of.eps), default=None)
    return found or jnp.finfo(jnp.float32)


def place_of(eqn: JaxprEqn) -> str:
    """The line of the user's code that made an equation, and in which of flax or optax, if any."""
    lines = [f"{frame.file_name}:{frame.start_line}" for frame in _user_frames(eqn)]
    if not lines:
        return "an unknown line"
    theirs = next((line for line in lines if not FRAMEWORKS.search(line)), lines[0])
    return theirs if theirs is lines[0] else f"{theirs}, in {lines[0]}"


def place_of_error(error: BaseException) -> str:
    """The line of the user's code that raised an error, itself or in what it calls."""
    from jax._src import source_info_util  # no public way to it

    lines = [(frame.f_code.co_filename, n) for frame, n in walk_tb(error.__traceback__)]
    theirs = [f"{name}:{n}" for name, n in lines if source_info_util.is_user_filename(name)]
    return next((line for line in reversed(theirs) if not line.startswith(OURS)), "an unknown line")


def _user_frames(eqn: JaxprEqn) -> list[Any]:
    from jax._src import source_info_util  # no public way to it

    try:
        frames = list(source_info_util.user_frames(eqn.source_info.traceback))
    except Exception:  # a message without the line is better than no message
        return []
    return [frame for frame in frames if not frame.file_name.startswith(OURS)]


def carry_of(scan: JaxprEqn) -> tuple[int, int]:
    """Where a scan's carry begins among the inputs of its body, and how many values it has."""
    params = scan.params
    if "ft_in" in params:  # since jax 0.11
        constants, carry, _ = params["ft_in"].unpack()
        return len(constants), len(carry)
    return params["num_consts"], params["num_carry"]
