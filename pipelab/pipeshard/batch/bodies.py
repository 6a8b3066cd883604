"""What equations run inside: the body of a loop, a branch, the backward of a custom derivative."""

from collections import Counter
from collections.abc import Callable

import jax
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from pipelab.pipeshard.arrays import dtype_of, is_inexact, shape_of
from pipelab.pipeshard.batch.tags import Pairs
from pipelab.runtime.jax.jaxpr import (
    CALLS,
    Atom,
    Graph,
    inline,
    renamed,
    single,
    spec_of,
    substitute,
    variables,
)

ADDS = ("add", "add_any")
CHECKPOINTS = ("checkpoint", "remat2", "remat")
# What only runs the function in one of its parameters; first, what has a derivative of its own.
CUSTOM = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "linear_call": "callee",
}
INSIDE = {**CUSTOM, **CALLS, **dict.fromkeys(CHECKPOINTS, "jaxpr")}
Graphs = tuple[Graph, Graph]  # one function at both sizes


def body_of(a: JaxprEqn, b: JaxprEqn, function: Callable, outside: Pairs) -> Graphs:
    """The programs that two equations run inside, by a `function` of their parameters.

    Its first inputs are these variables outside.
    """
    small, large = ([pair[i] for pair in outside] for i in (0, 1))
    return inline(function(a.params), small, a), inline(function(b.params), large, b)


def only_adds(body: Graph, count: int) -> bool:
    """Whether all that a scan's body does with its carry, of `count` values, is to add to it."""
    # [1] What a conversion to the same type makes, as of a weak one, is what it is made of.
    names: dict[Var, Atom] = {}
    equations = []
    for eqn in (renamed(eqn, names) for eqn in body.equations):
        converts = eqn.primitive.name == "convert_element_type"
        if converts and dtype_of(eqn.invars[0]) == dtype_of(eqn.outvars[0]):
            names[eqn.outvars[0]] = eqn.invars[0]
        else:
            equations.append(eqn)
    outputs = substitute(body.outputs, names)
    # [2] Nothing else reads it, or its sums.
    sums = {v: eqn for eqn in equations for v in eqn.outvars if eqn.primitive.name in ADDS}
    read = Counter(variables([*outputs, *(atom for eqn in equations for atom in eqn.invars)]))
    for v, out in zip(body.inputs, outputs[:count], strict=False):
        if isinstance(out, Literal) or out not in sums or v not in sums[out].invars:
            return False
        # A second reader could make anything of a sum that is not complete.
        if (read[v], read[out]) != (1, 1):
            return False
    return True


def pullback(eqn: JaxprEqn) -> Graph:
    """The backward of an equation: gradients by its results in, gradients by its operands out."""
    function = single(eqn)
    operands = [spec_of(atom) for atom in eqn.invars]

    # Keys and whole numbers have no gradient: jax's are of a type without numbers.
    def pull(operands, cotangents):
        results, back = jax.vjp(function.run, *operands)
        given = iter(cotangents)
        every = [
            next(given) if is_inexact(v) else np.zeros(shape_of(v), jax.dtypes.float0)
            for v in eqn.outvars
        ]
        pairs = [
            *zip(results, eqn.outvars, strict=True),
            *zip(back(every), eqn.invars, strict=True),
        ]
        return [x for x, v in pairs if is_inexact(v)]

    cotangents = [spec_of(v) for v in eqn.outvars if is_inexact(v)]
    return inline(jax.make_jaxpr(pull)(operands, cotangents), eqn.invars, eqn)
