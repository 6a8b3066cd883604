"""What a train step is marked with: the boundaries between layers, and the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

boundary_p = Primitive("pipeline_boundary")
boundary_p.multiple_results = True
boundary_p.def_impl(lambda: [])
boundary_p.def_abstract_eval(lambda: [])
mlir.register_lowering(boundary_p, lambda context: [])
ad.primitive_jvps[boundary_p] = lambda primals, tangents: ([], [])


def mark_pipeline_boundary() -> None:
    """One layer ends here and the next begins: call it between two layers of a model's forward pass.

    It computes nothing; without `parallelize` it has no effect. Not inside `lax.scan`, `jax.checkpoint` or a custom
    derivative: those are cut between, never within.
    """
    boundary_p.bind()


def value_and_grad(
    fun: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False
) -> Callable:
    """`jax.value_and_grad` that marks the loss, so that `parallelize` can tell the two passes from the update.

    fun  (*args) -> a scalar, the mean of something over the batch; with `has_aux` a pair (scalar, tree of arrays)

    Returns a function of the same arguments -> (value, gradients), the value as `fun` returns it. Elsewhere than in
    `parallelize`, eagerly or under `jax.jit`, it computes what jax's own does. Raises TypeError where the loss is no scalar.

    >>> value_and_grad(lambda w, x: (w * x).mean())(2.0, np.ones(4, np.float32))[1]
    Array(1., dtype=float32, weak_type=True)
    """

    def marked(*args: Any, **kwargs: Any) -> Any:
        leaves, tree = jax.tree.flatten((args, kwargs))
        numbered = jax.tree.unflatten(tree, range(len(leaves)))[0]
        try:
            chosen = (
                numbered[argnums]
                if isinstance(argnums, int)
                else tuple(numbered[i] for i in argnums)
            )
        except IndexError:
            raise TypeError(
                f"argnums={argnums}: the loss was given {len(args)} arguments by position"
            ) from None
        wanted, gradients_tree = jax.tree.flatten(chosen)
        for i in wanted:
            if not jnp.issubdtype(jax.dtypes.result_type(leaves[i]), jnp.inexact):
                kind = jax.dtypes.result_type(leaves[i])
                raise TypeError(
                    f"the gradient is taken by an array of {kind}: keep such ones in another argument of the loss"
                )
        traced = [
            i
            for i, leaf in enumerate(leaves)
            if i in set(wanted) or isinstance(leaf, (jax.Array, np.ndarray))
        ]
        aux_tree: list[Any] = []

        def flat(*values: Any) -> list[Any]:
            given = list(leaves)
            for i, value in zip(traced, values, strict=True):
                given[i] = value
            args, kwargs = jax.tree.unflatten(tree, given)
            out = fun(*args, **kwargs)
            if not (
                isinstance(out, tuple) and len(out) == 2
                if has_aux
                else jax.tree_util.all_leaves([out])
            ):
                wanted = (
                    "a pair (scalar, aux), since has_aux=True"
                    if has_aux
                    else "one real number, or say has_aux=True"
                )
                raise TypeError(f"the loss is a {type(out).__name__}: return {wanted}")
            loss, aux = out if has_aux else (out, ())
            aux_leaves, structure = jax.tree.flatten(aux)
            for leaf in aux_leaves:
                if isinstance(leaf, str) or not (
                    hasattr(leaf, "dtype") or isinstance(leaf, (int, float, complex))
                ):
                    raise TypeError(
                        f"the loss returns {leaf!r} beside its value, which is no array: leave it out"
                    )
            aux_tree.append(structure)
            return [loss, *aux_leaves]

        given = [leaves[i] for i in traced]
        closed = jax.make_jaxpr(flat)(*given)
        _check_loss(closed.out_avals[0])
        j, consts = (
            closed.jaxpr,
            closed.consts,
        )  # what the loss closes over, outer tracers too, becomes an argument
        hoisted = ClosedJaxpr(
            Jaxpr((), [*j.constvars, *j.invars], j.outvars, j.eqns, j.effects, j.debug_info), ()
        )
        at = tuple(len(consts) + traced.index(i) for i in wanted)
        loss, *rest = grad_p.bind(*consts, *given, jaxpr=hoisted, wanted=at)
        aux = jax.tree.unflatten(aux_tree[-1], rest[: len(rest) - len(wanted)])
        gradients = jax.tree.unflatten(gradients_tree, rest[len(rest) - len(wanted) :])
        return ((loss, aux) if has_aux else loss), gradients

    return marked


def grad(fun: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable:
    """`jax.grad` that marks the loss: see `value_and_grad`. Returns gradients; with `has_aux` a pair (gradients, aux)."""
    both = value_and_grad(fun, argnums, has_aux)

    def marked(*args: Any, **kwargs: Any) -> Any:
        value, gradients = both(*args, **kwargs)
        return (gradients, value[1]) if has_aux else gradients

    return marked


def evaluate_marked(*args: Any, jaxpr: ClosedJaxpr, wanted: tuple[int, ...]) -> list[Any]:
    """What the primitive computes, by jax's own value_and_grad: [loss, *aux, *gradients]."""
    fun = jaxpr_as_fun(jaxpr)

    def loss(chosen: list[Any]) -> tuple[Any, list[Any]]:
        given = list(args)
        for i, value in zip(wanted, chosen, strict=True):
            given[i] = value
        value, *aux = fun(*given)
        return value, aux

    (value, aux), gradients = jax.value_and_grad(loss, has_aux=True)([args[i] for i in wanted])
    return [value, *aux, *gradients]


def _check_loss(aval: Any) -> None:
    if aval.shape or not jnp.issubdtype(aval.dtype, jnp.inexact):
        raise TypeError(
            f"the loss is {aval.str_short()}: return one real number, such as the mean over the batch"
        )


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    return jax.jvp(
        partial(evaluate_marked, **params),
        tuple(primals),
        tuple(ad.instantiate_zeros(t) for t in tangents),
    )


def _batch(args: Sequence[Any], dimensions: Sequence[Any], **params: Any) -> Any:
    out = jax.vmap(partial(evaluate_marked, **params), in_axes=dimensions)(*args)
    return out, [0] * len(out)


grad_p = Primitive("pipelab_grad")
grad_p.multiple_results = True
grad_p.def_impl(evaluate_marked)
grad_p.def_abstract_eval(
    lambda *args, jaxpr, wanted: [*jaxpr.out_avals, *(args[i] for i in wanted)]
)
ad.primitive_jvps[grad_p] = _jvp
batching.primitive_batchers[grad_p] = _batch
mlir.register_lowering(grad_p, mlir.lower_fun(evaluate_marked, multiple_results=True))
