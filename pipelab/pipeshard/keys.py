"""Random keys of each micro-batch's own: with the step's key, all would draw the same dropout mask."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from pipelab.pipeshard.graph import Atom, Graph, PipeshardError, contains, dtype_of, inline, inner_jaxprs, place_of, shape_of

DRAWS = ("random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform")


def with_own_keys(loss: Graph, excluded: Collection[Var]) -> tuple[Graph, Var | None]:
    """The loss with one more input, the number of the micro-batch, folded into every key where it first appears.

    excluded  inputs that are no keys of the step: parameters and the batch

    Returns the loss as it is, and None, if it draws nothing. Raises PipeshardError where a key is made inside a loop.
    """
    drawing = [eqn for eqn in loss.equations if contains(eqn, DRAWS)]
    if not drawing:
        return loss, None
    number, raw = Var(jax.typeof(np.uint32(0))), _raw_keys(loss.equations)
    equations: list[JaxprEqn] = []
    names: dict[Var, Atom] = {}
    derived: set[Atom] = set()

    def make_own(key: Var) -> None:
        shapes = (jax.ShapeDtypeStruct(shape_of(key), dtype_of(key)), jax.ShapeDtypeStruct((), np.uint32))
        folding = inline(jax.make_jaxpr(_fold)(*shapes))
        given: dict[Var, Atom] = dict(zip(folding.inputs, (key, number), strict=True))
        equations.extend(_renamed(eqn, given) for eqn in folding.equations)
        names[key] = folding.outputs[0]
        derived.add(folding.outputs[0])

    for v in {**dict.fromkeys(loss.inputs), **loss.consts}:
        if v not in excluded and (jnp.issubdtype(dtype_of(v), jax.dtypes.prng_key) or v in raw):
            make_own(v)
    for old in loss.equations:
        eqn = _renamed(old, names)
        equations.append(eqn)
        if any(isinstance(a, Var) and a in derived for a in eqn.invars):
            derived.update(eqn.outvars)
            continue
        for v in eqn.outvars:
            if eqn.primitive.name == "random_seed" or v in raw:
                make_own(v)
    if not names:
        eqn = drawing[0]
        raise PipeshardError(
            f"{eqn.primitive.name} ({place_of(eqn)}) draws random numbers from a key that is made inside it, the same for "
            "every micro-batch: make the key in the loss itself or pass it in"
        )
    return Graph([*loss.inputs, number], loss.outputs, equations, loss.consts), number


def _fold(key: Any, number: Any) -> Any:
    """One key or an array of them, typed or raw."""
    raw = not jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    keys = jax.random.wrap_key_data(key) if raw else key
    found = jax.vmap(lambda k: jax.random.fold_in(k, number))(keys.reshape(-1)).reshape(keys.shape)
    return jax.random.key_data(found) if raw else found


def _renamed(eqn: JaxprEqn, names: dict[Var, Atom]) -> JaxprEqn:
    return eqn.replace(invars=[names.get(a, a) if isinstance(a, Var) else a for a in eqn.invars])


def _raw_keys(equations: Iterable[JaxprEqn]) -> set[Var]:
    """Variables that are keys without the type of one."""
    found: set[Var] = set()
    for eqn in equations:
        if eqn.primitive.name == "random_wrap":
            found.update(v for v in eqn.invars if isinstance(v, Var))
        for inner in inner_jaxprs(eqn):
            if len(inner.invars) == len(eqn.invars):
                inside = _raw_keys(inner.eqns)
                found.update(a for a, v in zip(eqn.invars, inner.invars, strict=True) if v in inside and isinstance(a, Var))
    return found
