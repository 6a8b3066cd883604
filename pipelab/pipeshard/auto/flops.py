"""FLOPs of one equation of a jaxpr, counted without compiling it."""

import math
from collections.abc import Iterable

from jax.extend.core import JaxprEqn, jaxprs_in_params

from pipelab.jax.jaxpr import Equations
from pipelab.pipeshard.arrays import shape_of, size

MOVES = """
    broadcast_in_dim concatenate convert_element_type copy copy_p device_put dynamic_slice
    dynamic_update_slice gather iota pad pipeline_boundary reshape rev scatter sharding_constraint
    slice split squeeze stop_gradient transpose bitcast_convert_type random_seed random_wrap
    random_unwrap random_split random_fold_in
"""  # they move numbers and compute none


def flops(eqn: JaxprEqn, as_xla: bool = False) -> float:
    """FLOPs of one equation, with all that is inside it.

    A matrix product or a convolution counts two for each pair that it multiplies; an elementwise
    operation one for each element of its largest operand or result; a pure move of numbers none. A
    scan counts its body as often as it runs, a conditional its most expensive branch. A `while`
    counts its body once, since its trips are unknown. An equation that combines elements with a
    function of scalars, as `reduce` does, counts that function once for each element.

    as_xla  count a scan's body as often as it is unrolled, as XLA's own analysis does

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
        # Each output element takes a product with the kernel's part for its output feature.
        kernel = eqn.invars[1]
        features = shape_of(kernel)[eqn.params["dimension_numbers"].rhs_spec[0]]
        zeros = math.prod(eqn.params["lhs_dilation"])  # of this many entries only one is nonzero
        return 2.0 * size(eqn.outvars[0]) * size(kernel) / max(features, 1) / zeros
    # What it runs inside: a loop's body, branches, the function of a custom derivative.
    inner = [total(jaxpr.eqns, as_xla) for jaxpr in jaxprs_in_params(eqn.params)]
    if name == "cond":
        return max(inner, default=0.0)
    if name == "scan":
        length = eqn.params["length"]
        return sum(inner) * (min(length, eqn.params["unroll"]) if as_xla else length)
    if inner and not name.startswith(("reduce", "scatter")):
        return sum(inner)
    if name in MOVES.split():
        return 0.0
    return max([1.0, *inner]) * max(map(size, (*eqn.invars, *eqn.outvars)), default=0)


def total(equations: Iterable[JaxprEqn], as_xla: bool = False) -> float:
    return sum((flops(eqn, as_xla) for eqn in equations), 0.0)


def repeats(equations: Equations) -> float:
    """The true FLOPs over those that XLA counts, since it counts a scan's body once."""
    counted = total(equations, as_xla=True)
    return total(equations) / counted if counted else 1.0
