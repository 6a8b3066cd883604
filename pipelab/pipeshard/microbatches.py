"""A batch in micro-batches: what their results add up to, and random keys of each one's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var, jaxprs_in_params

from pipelab.pipeshard.graph import (
    Arrays,
    Atom,
    Equations,
    Graph,
    PipeshardError,
    contains,
    dtype_of,
    inline,
    is_key,
    is_key_type,
    place_of,
    renamed,
    shape_of,
    spec_of,
    variables,
)
from pipelab.pipeshard.plan import Pipeshard
from pipelab.pipeshard.primitives import DRAWS
from pipelab.pipeshard.reduction import Reductions
from pipelab.pipeshard.samples import FIXED, Role, Tag
from pipelab.pipeshard.trace import Arguments, Step, trace

# ---- what micro-batches' results add up to


class How(Enum):
    MEAN = "mean"
    SUM = "sum"
    JOIN = "join"  # one after another: a value per sample
    LAST = "last"  # the same for all


BY_DEGREE: dict[float, How] = {0: How.MEAN, 1: How.SUM}  # how a reduced value grows with the batch


@dataclass(frozen=True)
class Combine:
    """How a result of the whole batch comes of those of the micro-batches.

    axis  the samples' dimension, if they are joined
    """

    how: How
    axis: int = 0

    def apply(self, values: Arrays) -> Any:
        if self.how is How.LAST or len(values) == 1:
            return values[-1]
        if self.how is How.JOIN:
            return jnp.concatenate(values, self.axis)
        total = sum(values[1:], values[0])
        return total / len(values) if self.how is How.MEAN else total


def combinations(
    step: Callable, arguments: Arguments, piece: Step, whole: Step, method: Pipeshard
) -> tuple[list[Combine], dict[Var, int], bool]:
    """Per result of the loss how it is combined; the batch's dimension of each variable; exactness.

    piece, whole  the step of one micro-batch and of the batch

    It is exact where the micro-batches add up to the batch. Raises PipeshardError where a result is
    neither a mean nor a sum over the batch, nor one value per sample.
    """
    # What grows with the batch shows in two traces of unequal sizes. None of them is of one sample,
    # whose dimension of size 1 would be like any other.
    samples = arguments.samples // method.microbatches
    small = piece if samples > 1 else trace(step, arguments, 2)
    fewer = max(samples, 2)
    more = arguments.samples if arguments.samples > fewer else 2 * fewer
    unchanged = [Combine(How.LAST)] * len(small.loss.outputs)
    try:
        large = whole if more == arguments.samples else trace(step, arguments, more)
        found = Reductions(small.loss, large.loss, small.batch, (fewer, more))
    except (TypeError, ValueError):
        if method.microbatches > 1:
            raise
        return unchanged, {}, True
    axes = found.axes if small is piece else {}
    if method.microbatches == 1:
        return unchanged, axes, True
    combine = []
    exact = True
    for i, pair in enumerate(zip(small.loss.outputs, large.loss.outputs, strict=True)):
        tag = found.of(pair)
        exact &= tag.role is not Role.MIXED and tag.degree in BY_DEGREE
        if i == 0:
            combine.append(_of_loss(tag, method.reduce))
        else:
            combine.append(_of_aux(i - 1, tag, pair[0], found.axis_of(pair), method.reduce))
    return combine, axes, exact


def _of_loss(tag: Tag, reduce: str | None) -> Combine:
    if tag.role is Role.FIXED:
        raise PipeshardError("the loss does not depend on the batch: check batch_argnums")
    known = BY_DEGREE.get(tag.degree) if tag.role is Role.REDUCED else None
    if known and reduce and known is not How(reduce):
        raise PipeshardError(
            f"reduce={reduce!r}, but the loss is a {known.value} over the batch: leave reduce out"
        )
    if known or reduce:
        return Combine(known or How(reduce))
    why = f": {tag.why}" if tag.why else f" (it grows as samples to the power {tag.degree:g})"
    raise PipeshardError(
        f"the loss is neither a mean nor a sum over the batch{why}, so that micro-batches do not "
        "add up to the batch; if each micro-batch is to count by itself anyway, say "
        "Pipeshard(reduce='mean')"
    )


def _of_aux(i: int, tag: Tag, atom: Atom, axis: int | None, reduce: str | None) -> Combine:
    if axis is not None:
        if reduce or not (tag.role is Role.MIXED or tag.degree):
            return Combine(How.JOIN, axis)
    elif tag == FIXED:
        return Combine(How.LAST)
    elif tag.role in (Role.FIXED, Role.REDUCED) and tag.degree in BY_DEGREE:
        return Combine(BY_DEGREE[tag.degree])
    elif reduce and tag.role is not Role.SAMPLES and jnp.issubdtype(dtype_of(atom), jnp.inexact):
        return Combine(How.MEAN)
    why = f" ({tag.why})" if tag.why else ""
    raise PipeshardError(
        f"auxiliary result {i} of the loss, shape {shape_of(atom)}, is neither a mean nor a sum "
        f"over the batch nor one value per sample{why}: leave it out, or say "
        "Pipeshard(reduce='mean') to average it over the micro-batches"
    )


# ---- random keys


def with_own_keys(step: Step) -> tuple[Graph, Var | None]:
    """The loss of a micro-batch's step with random keys of each micro-batch's own.

    With the step's key, all would draw the same dropout mask. So the loss gets one more input, the
    number of the micro-batch, which is folded into every key where it first appears:

        key ---- fold_in(number) ---- split ---- bernoulli

    Keys in the batch, one per sample, are each micro-batch's own as they are.

    Returns the new loss and the number's variable; the loss as it is and None, if no key is to be
    changed. Raises PipeshardError where a key is made inside a loop.
    """
    loss, batch = step.loss, step.batch
    if not any(contains(eqn, DRAWS) for eqn in loss.equations):
        return loss, None
    number = Var(jax.typeof(np.uint32(0)))
    raw = _raw_keys(loss.equations)
    equations: Equations = []
    own: dict[Var, Atom] = {}  # key -> the micro-batch's
    derived: set[Atom] = set(batch)  # what depends on such keys, or on the samples

    def make_own(key: Var) -> None:
        folding = inline(jax.make_jaxpr(_fold)(spec_of(key), spec_of(number)), (key, number))
        equations.extend(folding.equations)
        (own[key],) = folding.outputs
        derived.add(own[key])

    # [1] Keys that come from outside.
    for v in loss.sources:
        if v not in step.parameters and v not in batch and (is_key_type(dtype_of(v)) or v in raw):
            make_own(v)
    # [2] Keys that the loss makes, unless it makes them of keys that are the micro-batch's own.
    for eqn in loss.equations:
        eqn = renamed(eqn, own)
        equations.append(eqn)
        read = [v for v in variables(eqn.invars) if v in derived]
        if contains(eqn, DRAWS) and not any(map(is_key, read)):
            raise PipeshardError(
                f"{eqn.primitive.name} ({place_of(eqn)}) draws random numbers from a key that is "
                "made inside it, the same for every micro-batch: make the key in the loss itself "
                "or pass it in"
            )
        if read:
            derived.update(eqn.outvars)
            continue
        for v in eqn.outvars:
            if eqn.primitive.name == "random_seed" or v in raw:
                make_own(v)
    if not own:
        return loss, None
    return Graph([*loss.inputs, number], loss.outputs, equations, loss.consts), number


def _fold(key: Any, number: Any) -> Any:
    """One key or an array of them, typed or raw."""
    raw = not is_key_type(key.dtype)
    keys = jax.random.wrap_key_data(key) if raw else key
    folded = jnp.vectorize(jax.random.fold_in)(keys, number)
    return jax.random.key_data(folded) if raw else folded


def _raw_keys(equations: Iterable[JaxprEqn]) -> set[Var]:
    """Variables that are keys without the type of one: arrays that are wrapped somewhere."""
    found: set[Var] = set()
    for eqn in equations:
        if eqn.primitive.name == "random_wrap":
            found.update(variables(eqn.invars))
        for inner in jaxprs_in_params(eqn.params):
            if len(inner.invars) == len(eqn.invars):
                inside = _raw_keys(inner.eqns)
                pairs = zip(eqn.invars, inner.invars, strict=True)
                found.update(variables(a for a, v in pairs if v in inside))
    return found
