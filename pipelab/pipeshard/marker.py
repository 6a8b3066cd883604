"""What a train step is marked with: the boundaries between layers, and the loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import ad, mlir

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


def value_and_grad(fun: Callable, argnums: int | Sequence[int] = 0, has_aux: bool = False) -> Callable:
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
        chosen = numbered[argnums] if isinstance(argnums, int) else tuple(numbered[i] for i in argnums)
        wanted, gradients_tree = jax.tree.flatten(chosen)
        traced = [i for i, leaf in enumerate(leaves) if i in set(wanted) or isinstance(leaf, (jax.Array, np.ndarray))]
        aux_tree: list[Any] = []

        def flat(*values: Any) -> list[Any]:
            given = list(leaves)
            for i, value in zip(traced, values, strict=True):
                given[i] = value
            args, kwargs = jax.tree.unflatten(tree, given)
            loss, aux = fun(*args, **kwargs) if has_aux else (fun(*args, **kwargs), ())
            aux_leaves, structure = jax.tree.flatten(aux)
            aux_tree.append(structure)
            return [loss, *aux_leaves]

        given = [leaves[i] for i in traced]
        closed = jax.make_jaxpr(flat)(*given)
        _check_loss(closed.out_avals[0])
        j, consts = closed.jaxpr, closed.consts  # what the loss closes over, outer tracers too, becomes an argument
        hoisted = ClosedJaxpr(Jaxpr((), [*j.constvars, *j.invars], j.outvars, j.eqns, j.effects, j.debug_info), ())
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
    if aval.shape or (not np.issubdtype(aval.dtype, np.inexact) and aval.dtype != jax.numpy.bfloat16):
        raise TypeError(f"the loss is {aval.str_short()}: return one real number, such as the mean over the batch")


grad_p = Primitive("pipelab_grad")
grad_p.multiple_results = True
grad_p.def_impl(evaluate_marked)
grad_p.def_abstract_eval(lambda *args, jaxpr, wanted: [*jaxpr.out_avals, *(args[i] for i in wanted)])
mlir.register_lowering(grad_p, mlir.lower_fun(evaluate_marked, multiple_results=True))
