"""FLOPs of one equation of a jaxpr, counted without compiling it."""

from __future__ import annotations

import math
from collections.abc import Iterable

from jax.extend.core import JaxprEqn, jaxprs_in_params

from pipelab.pipeshard.graph import shape_of, size

MOVES = """
    broadcast_in_dim concatenate convert_element_type copy copy_p device_put dynamic_slice
    dynamic_update_slice gather iota pad pipeline_boundary reshape rev scatter sharding_constraint
    slice split squeeze stop_gradient transpose bitcast_convert_type random_seed random_wrap
    random_unwrap random_split random_fold_in
"""  # they move numbers and compute none


def flops(eqn: JaxprEqn) -> float:
    """FLOPs of one equation, with all that is inside it.

    A matrix product or a convolution counts two for each pair that it multiplies; what works
    element by element, one for each element of its largest operand or result; what only moves
    numbers, none. A scan counts its body as often as it runs, a branch its most expensive case. A
    `while` counts once, since nobody knows how often it runs.

    >>> import jax
    >>> jaxpr = jax.make_jaxpr(lambda x, w: x @ w)(jax.numpy.ones((2, 3)), jax.numpy.ones((3, 5)))
    >>> flops(jaxpr.eqns[0])
    60.0
    """
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = shape_of(eqn.invars[0])
        return 2.0 * size(eqn.outvars[0]) * math.prod(shape[i] for i in contracted)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1]
        features = shape_of(kernel)[eqn.params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * size(eqn.outvars[0]) * size(kernel) / max(features, 1)
    inner = [total(jaxpr.eqns) for jaxpr in jaxprs_in_params(eqn.params)]
    if name == "cond":
        return max(inner, default=0.0)
    if inner:
        return sum(inner) * times(eqn)
    if name in MOVES.split():
        return 0.0
    return float(max(map(size, (*eqn.invars, *eqn.outvars)), default=0))


def times(eqn: JaxprEqn) -> int:
    """How often what is inside the equation runs, as far as the equation says."""
    return eqn.params["length"] if eqn.primitive.name == "scan" else 1


def total(equations: Iterable[JaxprEqn]) -> float:
    return sum(map(flops, equations), 0.0)


def as_xla_counts(equations: Iterable[JaxprEqn]) -> float:
    """The same as XLA's own analysis sees it: the body of a scan once, whatever its length."""
    found = 0.0
    for eqn in equations:
        repeated = flops(eqn)
        if times(eqn) > 1:
            repeated = sum(as_xla_counts(inner.eqns) for inner in jaxprs_in_params(eqn.params))
        found += repeated
    return found
