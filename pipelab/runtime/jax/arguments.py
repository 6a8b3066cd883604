"""Stages as functions, as `run` is given them for jax; refused where they cannot be trained."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from flax.errors import TraceContextError
from jax.interpreters.partial_eval import dce_jaxpr

from pipelab.runtime.batches import Trees
from pipelab.runtime.jax.host import as_numbers

TREES = Trees(jax.tree.flatten, lambda leaves, spec: jax.tree.unflatten(spec, leaves), as_numbers)
# (parameters, x) -> y, or (parameters, x, key) -> y where forwards draw random numbers
Apply = Callable[..., Any]
Part = tuple[Apply, Any]  # a stage as (function, parameters)


def as_function(stage: Any, number: int) -> Part:
    """A stage as (function, parameters).

    The function takes (parameters, x), and a key if forwards draw random numbers. A stage is an nnx
    module, a pair (linen module, its variables or parameters) or a pair (function, parameters).
    """
    if isinstance(stage, nnx.Module):
        return _of_nnx(stage, number)
    kinds = [type(part).__name__ for part in stage] if isinstance(stage, tuple) else []
    if len(kinds) == 2:
        function, parameters = stage
        if isinstance(function, linen.Module) and isinstance(parameters, Mapping):
            return _of_linen(function, parameters)
        if callable(function) and not isinstance(function, (linen.Module, nnx.Module, type)):
            return function, parameters
    found = f"pair of {kinds[0]} and {kinds[1]}" if len(kinds) == 2 else type(stage).__name__
    raise ValueError(
        f"stage {number} is a {found}: give an nnx module, or a pair: a linen module and its "
        "variables, or a function (parameters, x) and its parameters"
    )


def _of_linen(module: linen.Module, variables: Mapping[str, Any]) -> Part:
    if "params" not in variables:
        return _of_linen(module, {"params": variables})
    fixed = {name: value for name, value in variables.items() if name != "params"}

    def apply(p: Any, x: Any, *key: Any) -> Any:
        rngs = {"dropout": key[0]} if key else None
        return module.apply({"params": p, **fixed}, x, rngs=rngs)

    return apply, variables["params"]


def _of_nnx(module: nnx.Module, number: int) -> Part:
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


def check_trained(parts: Sequence[Part]) -> None:
    """ValueError for parameters that cannot be trained, or that two stages would train apart."""
    owners: dict[int, int] = {}
    for s, (_, parameters) in enumerate(parts):
        for path, leaf in jax.tree.leaves_with_path(parameters):
            where = f"stage {s}, parameters{jax.tree_util.keystr(path)}"
            kind = getattr(leaf, "dtype", type(leaf))
            if not hasattr(leaf, "dtype") or not jnp.issubdtype(kind, jnp.inexact):
                raise ValueError(
                    f"{where}: of type {kind}, and only floating-point arrays can be trained; "
                    "let the function hold the others"
                )
            owner = owners.setdefault(id(leaf), s)
            if owner != s and isinstance(leaf, (jax.Array, np.ndarray)):
                raise ValueError(
                    f"{where}: an array of stage {owner} too; tied weights are not supported with "
                    "jax: give each stage its own copy"
                )


def check_optimizer(optimizer: optax.GradientTransformation, parts: Sequence[Part]) -> None:
    """ValueError for an optimizer whose step of one stage depends on the other stages.

    Each stage has a state and a step of its own, so that a norm over all parameters would be a norm
    over the stage's. This is told from shapes, before training. An optimizer made for the
    parameters of one stage, by a mask of such a form, must not make one tensor's step depend on
    another's. Where neither can be traced, the run itself shows whether it can step.
    """
    if len(parts) == 1:
        return
    stages: list[Any] = []
    for _, parameters in parts:
        shapes = jax.eval_shape(lambda tree: tree, parameters)
        if stages.count(shapes) < 2:  # of equal stages two show what they do to each other
            stages.append(shapes)
    if not _check_apart(optimizer, stages, [len(jax.tree.leaves(shapes)) for shapes in stages]):
        for shapes in stages:
            _check_apart(optimizer, shapes, [1] * len(jax.tree.leaves(shapes)))


def _check_apart(optimizer: optax.GradientTransformation, tree: Any, groups: Sequence[int]) -> bool:
    """ValueError if the step of one group of a tree's leaves depends on another group.

    Returns whether the step of this tree can be traced.

    groups  how many leaves each has, in their order
    """

    def step(gradients: Any, weights: Any, state: Any) -> tuple[Any, Any]:
        return optimizer.update(gradients, state, weights)

    try:
        started, state = jax.make_jaxpr(optimizer.init, return_shape=True)(tree)
        traced, (changes, _) = jax.make_jaxpr(step, return_shape=True)(tree, tree, state)
    except Exception:
        return False
    owners = [number for number, size in enumerate(groups) for _ in range(size)]
    if len(jax.tree.leaves(changes)) != len(owners):
        return True
    for group in range(len(groups)):
        needed = _needed(traced.jaxpr, [owner == group for owner in owners])
        of_gradients_and_weights = needed[: 2 * len(owners)]
        _, of_first_weights = dce_jaxpr(started.jaxpr, needed[2 * len(owners) :])
        needed = of_gradients_and_weights + of_first_weights
        if any(needs and owner != group for needs, owner in zip(needed, owners * 3, strict=True)):
            raise ValueError(
                "the optimizer makes one stage's step depend on other stages, but steps each stage "
                "alone: leave out what looks at all parameters or gradients (such as optax."
                "apply_if_finite; clip= does what optax.clip_by_global_norm does)"
            )
    if "random_bits" in str(traced):
        raise ValueError(
            "the optimizer draws random numbers, which would be the same in every stage: leave "
            "that out"
        )
    return True


def _needed(jaxpr: Any, changes: Sequence[bool]) -> list[bool]:
    """Which arguments of an optimizer's steps some of its changes depend on.

    The state is the last argument and the last result. What of it is needed was made by an earlier
    step, of what that needed.
    """
    of_state = [False] * (len(jaxpr.outvars) - len(changes))
    while True:
        _, needed = dce_jaxpr(jaxpr, [*changes, *of_state])
        before = needed[len(needed) - len(of_state) :]
        every = [a or b for a, b in zip(before, of_state, strict=True)]
        if every == of_state:
            return needed
        of_state = every
