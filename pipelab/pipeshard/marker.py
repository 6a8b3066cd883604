"""Marks in a train step: the boundaries between layers, and the loss."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, JaxprEqn, Primitive, jaxpr_as_fun
from jax.interpreters import ad, mlir

from pipelab.jax.jaxpr import Arrays, Graph, inline, is_mutable, read_by, variables
from pipelab.pipeshard.arrays import is_array, shape_of, shown

# A boundary is a primitive without arguments or results. jax keeps it where it stands in a traced
# function; it is lowered to nothing, and has no derivative: the loss is cut, never its gradient.
boundary_p = Primitive("pipeline_boundary")
boundary_p.multiple_results = True
boundary_p.def_impl(lambda: [])
boundary_p.def_abstract_eval(lambda: [])
mlir.register_lowering(boundary_p, lambda context: [])
ad.primitive_jvps[boundary_p] = lambda primals, tangents: ([], [])


def mark_pipeline_boundary() -> None:
    """One layer ends here and the next begins: call it between two layers of a forward pass.

    It computes nothing; without `parallelize` it has no effect. It cannot be inside `lax.scan`,
    `jax.checkpoint` or a custom derivative: cuts go between these.
    """
    boundary_p.bind()


def value_and_grad(
    fun: Callable,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    weighted: bool = False,
) -> Callable:
    """`jax.value_and_grad` that marks the loss.

    The mark lets `parallelize` tell the two passes from the update.

    fun       (*args) -> a scalar, a mean over the batch; with `has_aux` a pair (scalar, tree of
              arrays)
    weighted  instead of the scalar, `fun` returns a pair (total, weight), both sums over the batch;
              the value is total / weight. So a masked mean weighs micro-batches by what counts:
              both sums are added up, and divided once. The weight may be guarded, as by
              jnp.maximum(mask.sum(), 1): the guard then applies to the whole sum

    Returns a function of the same arguments -> (value, gradients), the value as `fun` returns it.
    Outside of `parallelize`, eagerly or under `jax.jit`, it computes what jax's own does, but
    supports neither derivatives nor `jax.vmap`. Raises TypeError if the loss is not a scalar, or
    the weight depends on arguments of the gradient.

    >>> import numpy as np
    >>> value_and_grad(lambda w, x: (w * x).mean())(2.0, np.ones(4, np.float32))[1]
    Array(1., dtype=float32, weak_type=True)
    >>> masked = lambda w, x, mask: (jnp.sum(w * x * mask), jnp.sum(mask))
    >>> x, mask = np.array([1.0, 2.0, 4.0], np.float32), np.array([0, 1, 1])
    >>> value_and_grad(masked, weighted=True)(1.0, x, mask)[1]
    Array(3., dtype=float32)
    """

    return partial(_marked, fun, argnums, has_aux, weighted)


def _marked(
    fun: Callable,
    argnums: int | Sequence[int],
    has_aux: bool,
    weighted: bool,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    # [1] What the gradient is taken by.
    positions, chosen = _taken_by(args, argnums)
    values, tree = jax.tree.flatten(chosen)

    # [2] Trace the loss as a function of it.
    def flat(*values: Any) -> Any:
        filled = list(args)
        for i, value in zip(positions, jax.tree.unflatten(tree, values), strict=True):
            filled[i] = value
        return _checked(fun(*filled, **kwargs), has_aux, weighted)

    closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*values)
    _check_loss(closed, len(values), weighted)

    weights, guard = 0, None
    if weighted:
        closed, guard = _unguarded(closed)
        weights = len(guard.inputs)

    # [3] What the loss closes over, arguments and outer tracers, becomes its last arguments.
    if any(map(is_mutable, closed.consts)):
        raise TypeError(
            "the loss uses a mutable array (jax.new_ref) made outside of it: pass its value "
            "(ref[...]), and return what it becomes (has_aux=True)"
        )
    jaxpr = closed.jaxpr
    hoisted = jaxpr.replace(constvars=(), invars=[*jaxpr.invars, *jaxpr.constvars])
    inner = ClosedJaxpr(hoisted, ())
    given = [*values, *closed.consts]
    found = grad_p.bind(*given, jaxpr=inner, wanted=len(values), weights=weights)
    # The marked equation gives [loss, *aux, *gradients] in a row. A guard of the weight (at least
    # 1, say) is put on when it is complete.
    if guard:
        found[1 : 1 + weights] = guard.run(*found[1 : 1 + weights])
    value, gradients = jax.tree.unflatten(jax.tree.structure((shapes, chosen)), found)
    gradients = gradients[0] if isinstance(argnums, int) else tuple(gradients)
    if not weighted:
        return value, gradients

    # [4] The sums over the batch are divided where they are complete: outside the loss.
    (total, weight), *aux = value if has_aux else (value,)
    mean, gradients = jax.tree.map(partial(_divided, weight), (total, gradients))
    return ((mean, *aux) if has_aux else mean), gradients


def _taken_by(
    args: Sequence[Any], argnums: int | Sequence[int]
) -> tuple[tuple[int, ...], list[Any]]:
    """Positions of the arguments that the gradient is taken by, and these.

    Raises TypeError if there is no gradient by one of them.
    """
    positions = (argnums,) if isinstance(argnums, int) else tuple(argnums)
    try:
        chosen = [args[i] for i in positions]
    except IndexError:
        raise TypeError(
            f"argnums={argnums}: the loss was given {len(args)} arguments by position"
        ) from None
    for value in jax.tree.leaves(chosen):
        kind = jax.dtypes.result_type(value)
        if not jnp.issubdtype(kind, jnp.inexact):
            raise TypeError(
                f"the gradient cannot be taken by an array of {kind}: pass such arrays in another "
                "argument of the loss"
            )
    return positions, chosen


def grad(
    fun: Callable,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    weighted: bool = False,
) -> Callable:
    """`jax.grad` that marks the loss: see `value_and_grad`.

    Returns gradients; with `has_aux` a pair (gradients, aux).
    """
    both = value_and_grad(fun, argnums, has_aux, weighted)

    def marked(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return marked


def _checked(out: Any, has_aux: bool, weighted: bool) -> Any:
    """The loss's results. Raises TypeError where they are not what the options say."""
    value, aux = _pair(out, "(scalar, aux)", "has_aux") if has_aux else (out, ())
    for leaf in _pair(value, "(total, weight)", "weighted") if weighted else [value]:
        if not jax.tree_util.all_leaves([leaf]):
            raise TypeError(
                f"the loss is a {type(leaf).__name__}: return one real number, or say has_aux=True"
            )
    for leaf in jax.tree.leaves(aux):
        if not is_array(leaf):
            raise TypeError(
                f"the loss also returns {shown(leaf)}, which is not an array: leave it out"
            )
    return out


def _divided(weight: Any, total: Any) -> Any:
    """A mean in the type of the sum; in between no coarser than float32, which can count."""
    wide = jnp.promote_types(total.dtype, jnp.float32)
    return (total / jnp.asarray(weight, wide)).astype(total.dtype)


def _pair(out: Any, parts: str, option: str) -> tuple[Any, Any]:
    if not isinstance(out, tuple) or len(out) != 2:
        raise TypeError(
            f"the loss is a {type(out).__name__}: return a pair {parts}, since {option}=True"
        )
    return out


def _check_loss(closed: ClosedJaxpr, wanted: int, weighted: bool) -> None:
    """TypeError for a traced loss, or its weight, of which no gradient can be taken.

    wanted  how many of its arguments, from the first, the gradient is taken by
    """
    loss, *others = closed.out_avals
    if loss.shape or not jnp.issubdtype(loss.dtype, jnp.inexact):
        raise TypeError(
            f"the loss is {loss.str_short()}: return one real number, such as the mean over the "
            "batch"
        )
    if not weighted:
        return
    if others[0].shape:
        raise TypeError(
            f"the weight is {others[0].str_short()}: return one number, such as the sum of a mask "
            "over the batch"
        )
    graph = inline(closed)
    depending = graph.depending(graph.inputs[:wanted])
    if not depending.isdisjoint(variables(graph.outputs[1:2])):
        raise TypeError("the weight depends on arguments of the gradient: weigh only by the batch")


def _unguarded(closed: ClosedJaxpr) -> tuple[ClosedJaxpr, Graph]:
    """A weighted loss that returns [total, *numbers, *aux], and the weight of these numbers.

    mask --> sum --> max --> weight    the sum is a number, and max is the function
    """
    graph = inline(closed)
    total, weight, *aux = graph.outputs
    wanted, tail = {*variables([weight])}, list[JaxprEqn]()
    for eqn in reversed(graph.equations):
        # What is made of numbers; of arrays it is added up.
        alone = not any(map(shape_of, (*eqn.invars, *eqn.outvars)))
        if alone and not wanted.isdisjoint(eqn.outvars):
            tail.insert(0, eqn)
            wanted.update(variables(eqn.invars))
    numbers = read_by(tail, [weight])
    guard = Graph(numbers, [weight], tail)
    return replace(graph, outputs=[total, *numbers, *aux]).jaxpr, guard


def evaluate_marked(*args: Any, jaxpr: ClosedJaxpr, wanted: int, weights: int) -> Arrays:
    """Evaluate the primitive by jax's own value_and_grad: [loss, *aux, *gradients].

    wanted   how many of the arguments, from the first, the gradient is taken by
    weights  how many of the aux, from the first, the weight of the loss is made of
    """

    def loss(chosen):
        value, *aux = jaxpr_as_fun(jaxpr)(*chosen, *args[wanted:])
        return value, aux

    (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)(args[:wanted])
    return [value, *aux, *gradients]


# The marked gradient: a primitive that carries the loss as a parameter. Where no pipeline takes it
# apart, it is evaluated and lowered as jax's own value_and_grad.
grad_p = Primitive("pipelab_grad")
grad_p.multiple_results = True
grad_p.def_impl(evaluate_marked)
grad_p.def_abstract_eval(lambda *args, jaxpr, wanted, weights: [*jaxpr.out_avals, *args[:wanted]])
mlir.register_lowering(grad_p, mlir.lower_fun(evaluate_marked, multiple_results=True))
