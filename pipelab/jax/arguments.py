"""Stages as functions, as `run` takes them for jax; ValueError if they cannot be trained."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.errors import (
    InvalidRngError,
    ModifyScopeVariableError,
    ScopeCollectionNotFound,
    TraceContextError,
)
from jax.interpreters.partial_eval import dce_jaxpr

from pipelab.jax.host import as_numbers
from pipelab.jax.jaxpr import all_equations, is_mutable
from pipelab.runtime.batches import Trees

TREES = Trees(
    jax.tree.flatten,
    lambda leaves, spec: jax.tree.unflatten(spec, leaves),
    as_numbers,
    lambda leaf: leaf.copy() if isinstance(leaf, np.ndarray) else leaf,
    np.concatenate,
)
# (parameters, x) -> y, or (parameters, x, key) -> y where forwards draw random numbers
Apply = Callable[..., Any]
Functional = tuple[Apply, Any]  # a stage as a pair: its function, and parameters


def as_function(stage: Any, number: int) -> Functional:
    """A stage as (function, parameters).

    The function takes (parameters, x), and a key if forwards draw random numbers. A stage is an nnx
    module, a pair (linen module, its variables or parameters) or a pair (function, parameters).
    """
    if isinstance(stage, nnx.Module):
        return _of_nnx(stage, number)
    if isinstance(stage, tuple) and len(stage) == 2:
        function, parameters = stage
        if isinstance(function, linen.Module):
            return _of_linen(function, parameters, number)
        if callable(function):
            return function, parameters
    raise ValueError(
        f"stage {number} is a {type(stage).__name__}: give an nnx module, or a pair: a linen "
        "module and its variables, or a function (parameters, x) and its parameters"
    )


# What flax says of a linen module that does not fit, and how it would.
REMEDIES: dict[type[Exception], str] = {
    InvalidRngError: (
        "draws random numbers: make it deterministic=True, or, where one can be given, pass a "
        "seed, such as seed=0"
    ),
    ModifyScopeVariableError: (
        "changes variables other than its parameters, which a run does not keep: use LayerNorm or "
        "GroupNorm instead of BatchNorm, or fixed running averages (use_running_average=True)"
    ),
    ScopeCollectionNotFound: (
        "lacks variables: give everything that module.init returns, not only the parameters"
    ),
}


def _of_linen(module: linen.Module, variables: Mapping[str, Any], number: int) -> Functional:
    if "params" not in variables:
        return _of_linen(module, {"params": variables}, number)
    # Collections beside the parameters, such as batch statistics, stay as they are.
    fixed = {name: value for name, value in variables.items() if name != "params"}

    def apply(p: Any, x: Any, *key: Any) -> Any:
        # Any other name's numbers are drawn from the key of "params".
        rngs = {"dropout": key[0], "params": jax.random.fold_in(key[0], 1)} if key else None
        try:
            return module.apply({"params": p, **fixed}, x, rngs=rngs)
        except tuple(REMEDIES) as error:
            reason = str(error).partition(" (http")[0]
            raise ValueError(
                f"stage {number}, a linen module, {REMEDIES[type(error)]} ({reason})"
            ) from None

    return apply, variables["params"]


def _of_nnx(module: nnx.Module, number: int) -> Functional:
    # nnx keeps state in objects; split and merged, it is a function of its parameters.
    graph, parameters, rest = nnx.split(module, nnx.Param, ...)  # type: ignore[misc]

    def apply(p: Any, x: Any, *key: Any) -> Any:
        try:
            return nnx.merge(graph, p, rest)(x)
        except TraceContextError:
            raise ValueError(
                f"stage {number}, an nnx module, changes its state (dropout, batch statistics): "
                "call .eval(), or give a function (parameters, x, key) and its parameters"
            ) from None

    return apply, parameters


def check_trained(stages: Sequence[Functional]) -> None:
    """ValueError for parameters that cannot be trained, or that two stages share."""
    owners: dict[int, int] = {}
    for s, (_, parameters) in enumerate(stages):
        for path, leaf in jax.tree.leaves_with_path(parameters):
            where = f"stage {s}, parameters{jax.tree_util.keystr(path)}"
            kind = getattr(leaf, "dtype", type(leaf))
            if is_mutable(leaf):
                kind = "mutable array (give its value, ref[...])"
            if not hasattr(leaf, "nbytes") or not jnp.issubdtype(kind, jnp.inexact):
                raise ValueError(
                    f"{where}: type {kind} cannot be trained, only floating-point arrays; let the "
                    "function hold the others"
                )
            owner = owners.setdefault(id(leaf), s)
            if owner != s and isinstance(leaf, (jax.Array, np.ndarray)):
                raise ValueError(
                    f"{where}: shared with stage {owner}, but jax does not support tied weights: "
                    "give each stage its own copy"
                )


def check_optimizer(optimizer: optax.GradientTransformation, stages: Sequence[Functional]) -> None:
    """ValueError for an optimizer whose step for one stage depends on other stages.

    Each stage has its own state and step, so a norm over all parameters would be one over the
    stage's. Two steps of all stages, traced before training, show this. If they cannot be traced (a
    mask made for one stage), the run itself shows whether it can step.
    """
    trees = [parameters for _, parameters in stages]

    def second_change(weights: Any, first: Any, second: Any) -> Any:
        # What of others came into the state by the first gradient shows in the second step.
        _, state = optimizer.update(first, optimizer.init(weights), weights)
        change, _ = optimizer.update(second, state, weights)
        return change

    try:
        traced = jax.make_jaxpr(second_change)(trees, trees, trees)
    except Exception:
        return
    owners = [s for s, tree in enumerate(trees) for _ in jax.tree.leaves(tree)]
    for stage in range(len(stages)):
        # What is still read when the results of all other stages are left out.
        _, read = dce_jaxpr(traced.jaxpr, [owner == stage for owner in owners])
        # Owners three times: of the weights, of the first gradient and of the second.
        if any(reads and owner != stage for reads, owner in zip(read, owners * 3, strict=True)):
            raise ValueError(
                "the optimizer makes one stage's step depend on other stages, but each stage steps "
                "alone: leave out transformations of all parameters or gradients, such as "
                "optax.apply_if_finite (for optax.clip_by_global_norm use clip=, which divides by "
                "norm + 1e-6)"
            )
    drawn = (eqn.primitive.name == "random_bits" for eqn in all_equations(traced.eqns))
    if len(stages) > 1 and any(drawn):
        raise ValueError(
            "the optimizer draws random numbers, which would be the same in every stage: use one "
            "without"
        )
