"""Random keys of each micro-batch's own: with the step's key, all would draw the same dropout mask."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from pipelab.pipeshard.graph import (
    Atom,
    Graph,
    PipeshardError,
    contains,
    dtype_of,
    inline,
    inner_jaxprs,
    is_key,
    place_of,
    renamed,
    shape_of,
    variables,
)

DRAWS = ("random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform")


def with_own_keys(
    loss: Graph, parameters: Collection[Var], batch: Collection[Var]
) -> tuple[Graph, Var | None]:
    """The loss with one more input, the number of the micro-batch, folded into every key where it first appears.

    Keys in the batch, one per sample, are each micro-batch's own as they are.

    Returns the loss as it is, and None, if no key is to be changed. Raises PipeshardError where a key is made inside a loop.
    """
    if not any(contains(eqn, DRAWS) for eqn in loss.equations):
        return loss, None
    number, raw = Var(jax.typeof(np.uint32(0))), _raw_keys(loss.equations)
    equations: list[JaxprEqn] = []
    names: dict[Var, Atom] = {}
    derived: set[Atom] = set(
        batch
    )  # what depends on keys that are the micro-batch's own, or on its samples

    def make_own(key: Var) -> None:
        shapes = (
            jax.ShapeDtypeStruct(shape_of(key), dtype_of(key)),
            jax.ShapeDtypeStruct((), np.uint32),
        )
        folding = inline(jax.make_jaxpr(_fold)(*shapes))
        given: dict[Var, Atom] = dict(zip(folding.inputs, (key, number), strict=True))
        equations.extend(renamed(eqn, given) for eqn in folding.equations)
        names[key] = folding.outputs[0]
        derived.add(folding.outputs[0])

    for v in {**dict.fromkeys(loss.inputs), **loss.consts}:
        if (
            v not in parameters
            and v not in batch
            and (jnp.issubdtype(dtype_of(v), jax.dtypes.prng_key) or v in raw)
        ):
            make_own(v)
    for old in loss.equations:
        eqn = renamed(old, names)
        equations.append(eqn)
        if contains(eqn, DRAWS) and not any(
            is_key(a) and a in derived for a in variables(eqn.invars)
        ):
            raise PipeshardError(
                f"{eqn.primitive.name} ({place_of(eqn)}) draws random numbers from a key that is made inside it, the same for "
                "every micro-batch: make the key in the loss itself or pass it in"
            )
        if any(isinstance(a, Var) and a in derived for a in eqn.invars):
            derived.update(eqn.outvars)
            continue
        for v in eqn.outvars:
            if eqn.primitive.name == "random_seed" or v in raw:
                make_own(v)
    if not names:
        return loss, None
    return Graph([*loss.inputs, number], loss.outputs, equations, loss.consts), number


def _fold(key: Any, number: Any) -> Any:
    """One key or an array of them, typed or raw."""
    raw = not jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    keys = jax.random.wrap_key_data(key) if raw else key
    found = jax.vmap(lambda k: jax.random.fold_in(k, number))(keys.reshape(-1)).reshape(keys.shape)
    return jax.random.key_data(found) if raw else found


def _raw_keys(equations: Iterable[JaxprEqn]) -> set[Var]:
    """Variables that are keys without the type of one."""
    found: set[Var] = set()
    for eqn in equations:
        if eqn.primitive.name == "random_wrap":
            found.update(v for v in eqn.invars if isinstance(v, Var))
        for inner in inner_jaxprs(eqn):
            if len(inner.invars) == len(eqn.invars):
                inside = _raw_keys(inner.eqns)
                found.update(
                    a
                    for a, v in zip(eqn.invars, inner.invars, strict=True)
                    if v in inside and isinstance(a, Var)
                )
    return found
