"""Facts about jax's primitives: which ones add, draw or move, what they mix and what they run.

A primitive that these tables do not name is assumed to mix samples, if it is given any.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from pipelab.jax.jaxpr import (
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
from pipelab.pipeshard.arrays import dtype_of, is_inexact, shape_of
from pipelab.pipeshard.batch.tags import Pairs

# Parameters that the shapes show, too.
SIZES = ("shape", "new_sizes", "slice_sizes", "limit_indices", "reps")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ADD = _names("add sub add_any select_n concatenate pad stack scatter-add")  # sums or choices
PRODUCTS = _names("mul dot_general conv_general_dilated")
INDEX = {"select_n": 0, "scatter-add": 1}  # the operand that only chooses what is added

# the result grows with the batch as the first operand does
KEEP = _names(
    """
    neg convert_element_type reshape squeeze broadcast_in_dim transpose copy copy_p reduce_sum
    stop_gradient reduce_precision slice real imag sharding_constraint pvary name gather
    dynamic_slice rev split tile device_put cumsum reduce_window_sum unstack
    """
)

DRAWS = {"random_bits", "random_gamma", "random_split"}  # from a key, their first operand
RANDOM = DRAWS | {f"random_{name}" for name in ("fold_in", "wrap", "unwrap", "seed", "clone")}

ELEMENTWISE = """
    abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e
    bitcast_convert_type cbrt ceil clamp clz complex conj convert_element_type copy copy_p cos cosh
    device_put digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a
    igammac imag integer_pow is_finite le le_to lgamma log log1p logistic lt lt_to max min mul mulhi
    name ne neg nextafter not one_minus_square or polygamma population_count pow pvary
    random_gamma_grad real
    reduce_precision regularized_incomplete_beta rem round rsqrt select_n sharding_constraint
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square stop_gradient
    sub tan tanh xor zeta
"""
# A slice keeps samples apart if it takes all of their dimension: `rules` compares sizes.
MOVES = "broadcast_in_dim squeeze transpose stack slice dynamic_slice dynamic_update_slice"

# ---- the dimensions, of an operand's n, whose entries an equation mixes, moves or drops


def _windows(params: Mapping[str, Any], n: int) -> list[int]:
    """All dimensions except those whose windows are single entries, side by side."""
    windows = zip(
        params["window_dimensions"],
        params["window_strides"],
        params["padding"],
        params.get("window_dilation") or [1] * n,
        strict=True,
    )
    return [i for i, window in enumerate(windows) if window != (1, 1, (0, 0), 1)]


_BY_NAMES: dict[str, Callable[[Mapping[str, Any], int], Collection[int]]] = {
    ELEMENTWISE + MOVES: lambda p, n: [],
    "cumsum cumprod cummax cummin cumlogsumexp split unstack": lambda p, n: [p["axis"]],
    "reduce_sum reduce_max reduce_min reduce_prod": lambda p, n: p["axes"],
    "reduce_and reduce_or reduce_xor argmax argmin": lambda p, n: p["axes"],
    "sort concatenate": lambda p, n: [p["dimension"]],
    "reduce_window_sum reduce_window_max reduce_window_min": _windows,
    "select_and_scatter_add select_and_gather_add": _windows,
    "cholesky triangular_solve lu qr eigh svd householder_product": lambda p, n: [n - 2, n - 1],
    "rev": lambda p, n: p["dimensions"],
    "top_k": lambda p, n: [p.get("axis", -1) % n],
    "fft": lambda p, n: range(n - len(p["fft_lengths"]), n),
    "tile": lambda p, n: [i for i, count in enumerate(p["reps"]) if count != 1],
    "pad": lambda p, n: [i for i, pad in enumerate(p["padding_config"]) if any(pad)],
}
MIXING = {name: dimensions for names, dimensions in _BY_NAMES.items() for name in names.split()}


def rounds(eqn: JaxprEqn) -> bool:
    """Whether an equation makes integers that are not proportional to its operands."""
    name, into = eqn.primitive.name, dtype_of(eqn.outvars[0])
    if jnp.issubdtype(into, jnp.inexact):
        return False
    if name == "convert_element_type":  # a float is truncated, a number becomes true or false
        source = dtype_of(eqn.invars[0])
        return jnp.issubdtype(source, jnp.inexact) or not jnp.issubdtype(into, jnp.number)
    return name == "div"


def contracts(eqn: JaxprEqn, axes: Sequence[int | None]) -> bool:
    """Whether a matrix product sums over the samples."""
    (left, right), _ = eqn.params["dimension_numbers"]
    return axes[0] in left and axes[1] == right[left.index(axes[0])]


def keeps_apart(eqn: JaxprEqn, axes: Sequence[int | None]) -> bool:
    """Whether an equation keeps apart the samples along these dimensions of its operands."""
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        # x[n, i] w[i, j]: n is not contracted. q[n, i, d] k[n, j, d]: n is a batch dimension of
        # both, the same one.
        (left, right), (mine, theirs) = params["dimension_numbers"]
        if None not in axes:
            return axes[0] in mine and axes[1] == theirs[mine.index(axes[0])]
        return axes[0] not in left and axes[1] not in right
    if name == "conv_general_dilated":
        batch = params["dimension_numbers"].lhs_spec[0]
        return axes == [batch, None] and params["batch_group_count"] == 1
    if name == "triangular_solve" and axes[0] is None:  # each right-hand side is solved alone
        return axes[1] != len(shape_of(eqn.invars[1])) - (2 if params["left_side"] else 1)
    # Only samples may be written into samples: all of them have one place, not each its own.
    if name not in MIXING or (name == "dynamic_update_slice" and None in axes[:2]):
        return False
    mixing = MIXING[name]
    for v, axis in zip(eqn.invars, axes, strict=True):
        if axis is not None and axis in mixing(params, len(shape_of(v))):
            return False
    return True


def same_parameters(a: JaxprEqn, b: JaxprEqn) -> bool:
    """Whether an equation's parameters at two sizes differ in shapes at most.

    Functions and jaxprs are compared elsewhere, if at all.
    """
    for key, x in a.params.items():
        y = b.params.get(key)
        code = isinstance(x, (Jaxpr, ClosedJaxpr)) or (callable(x) and not isinstance(x, type))
        nan = str(x) == str(y) == "nan"  # which is not equal to itself
        if not (code or key in SIZES or x == y or nan):
            return False
    return True


# ---- what equations run inside: a loop's body, a branch, the backward of a custom derivative

ADDS = {"add": 2, "add_any": 2, "sub": 1}  # how many operands enter with a plus sign
CHECKPOINTS = ("checkpoint", "remat2", "remat")
# Primitives that only run the function in one of their parameters: those with a custom derivative,
# then all.
CUSTOM = {
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "linear_call": "callee",
}
INSIDE = {**CUSTOM, **CALLS, **dict.fromkeys(CHECKPOINTS, "jaxpr")}
Graphs = tuple[Graph, Graph]  # one function at both sizes


def body_of(a: JaxprEqn, b: JaxprEqn, function: Callable, outside: Pairs) -> Graphs:
    """The programs that two equations run inside; `function` finds each in the parameters.

    outside  the variables that their first inputs are
    """
    small, large = ([pair[i] for pair in outside] for i in (0, 1))
    return inline(function(a.params), small, a), inline(function(b.params), large, b)


def only_adds(body: Graph, count: int) -> bool:
    """Whether a scan's body only adds to its carry, of `count` values, or subtracts from it."""
    # [1] Skip conversions to the same type, such as from a weak one.
    names: dict[Var, Atom] = {}
    equations = []
    for eqn in (renamed(eqn, names) for eqn in body.equations):
        converts = eqn.primitive.name == "convert_element_type"
        if converts and dtype_of(eqn.invars[0]) == dtype_of(eqn.outvars[0]):
            names[eqn.outvars[0]] = eqn.invars[0]
        else:
            equations.append(eqn)
    outputs = substitute(body.outputs, names)
    # [2] Nothing else may read the carry or its sums.
    sums = {
        eqn.outvars[0]: eqn.invars[: ADDS[eqn.primitive.name]]
        for eqn in equations
        if eqn.primitive.name in ADDS
    }
    read = Counter(variables([*outputs, *(atom for eqn in equations for atom in eqn.invars)]))
    for v, out in zip(body.inputs, outputs[:count], strict=False):
        if isinstance(out, Literal) or out not in sums or v not in sums[out]:
            return False
        # A second reader could make anything of an incomplete sum.
        if (read[v], read[out]) != (1, 1):
            return False
    return True


def pullback(eqn: JaxprEqn) -> Graph:
    """The backward of an equation: gradients by its results in, gradients by its operands out."""
    function = single(eqn)
    operands = [spec_of(atom) for atom in eqn.invars]

    # Keys and integers have no gradient: jax takes and gives one of type float0.
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
