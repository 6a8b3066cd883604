"""A batch in micro-batches: what their results add up to, and what each draws of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from pipelab.pipeshard.graph import (
    Arrays,
    Atom,
    Equations,
    Graph,
    PipeshardError,
    contains,
    dtype_of,
    inline,
    place_of,
    renamed,
    shape_of,
    single,
    spec_of,
    substitute,
)
from pipelab.pipeshard.plan import Pipeshard
from pipelab.pipeshard.primitives import DRAWS
from pipelab.pipeshard.reduction import CHECKPOINTS, Reductions, carry_of
from pipelab.pipeshard.samples import FIXED, Role, Tag, axes_of
from pipelab.pipeshard.trace import Arguments, Step, trace

BODIES = ("jaxpr", "call_jaxpr", "cond_jaxpr", "body_jaxpr")  # parameters: what equations run

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


# ---- random numbers

# The number of a micro-batch is folded in at the draw, if what is drawn grows with the batch:
#
#     key ---- split ---- fold_in(number) ---- random_bits    a mask: (8, 5), of 32 samples (32, 5)
#                 \\
#                  `--------------------------- random_bits    features: (4, 4), of 32 samples, too
#
# What is drawn in one shape for all sizes of batch stays as it was written, and so does what is
# drawn from keys of the samples' own.

# An equation that draws, the same for another size of batch, the micro-batch's number and the
# equation's operands -> results
Draw = Callable[[JaxprEqn, JaxprEqn, Any, Arrays], Arrays]


def with_own_draws(piece: Step, whole: Step) -> tuple[Graph, dict[Var, Atom]]:
    """The loss of a micro-batch's step, which draws its own numbers where these grow.

    With the step's key, all micro-batches would draw the same dropout mask.

    Returns the loss as `redraw` does. Raises PipeshardError where that cannot be done.
    """

    def draw(eqn: JaxprEqn, _: JaxprEqn, number: Any, operands: Arrays) -> Arrays:
        key, *others = operands
        return single(eqn).run(jnp.vectorize(jax.random.fold_in)(key, number), *others)

    return redraw(piece.loss, whole.loss, draw)


def draws_grow(graph: Graph, twin: Graph) -> bool:
    """Whether something that is drawn has another shape in a trace for another size of batch.

    Raises PipeshardError where the two do not draw in the same places.
    """
    return any(_grows(eqn, other) for eqn, other in _drawing(graph, twin))


def _drawing(graph: Graph, twin: Graph) -> list[tuple[JaxprEqn, JaxprEqn]]:
    """The equations that draw, or have such inside, at both sizes."""
    mine, theirs = ([e for e in g.equations if contains(e, DRAWS)] for g in (graph, twin))
    if [e.primitive for e in mine] != [e.primitive for e in theirs]:
        raise PipeshardError(
            "the loss draws other random numbers for another size of batch: write it the same for "
            "every size"
        )
    return list(zip(mine, theirs, strict=True))


def _grows(eqn: JaxprEqn, twin: JaxprEqn) -> bool:
    if eqn.primitive.name in DRAWS:
        made, key = (eqn.outvars[0], twin.outvars[0]), (eqn.invars[0], twin.invars[0])
        return bool(axes_of(made)) and not axes_of(key)
    bodies = zip(_bodies(eqn), _bodies(twin), strict=True)
    return any(draws_grow(a, b) for a, b in bodies)


def _bodies(eqn: JaxprEqn) -> list[Graph]:
    """The functions that an equation runs."""
    functions = [eqn.params[key] for key in BODIES if key in eqn.params]
    return [inline(f, outer=eqn) for f in (*functions, *eqn.params.get("branches", ()))]


def redraw(graph: Graph, twin: Graph, draw: Draw) -> tuple[Graph, dict[Var, Atom]]:
    """The graph with every draw that grows made by `draw`; its last input is the number for that.

    twin  the same function for another size of batch

    Returns the new graph, and what stands in it for variables of the old one.
    """
    twins = {id(eqn): other for eqn, other in _drawing(graph, twin) if _grows(eqn, other)}
    number = Var(jax.typeof(np.uint32(0)))
    equations: Equations = []
    consts = dict(graph.consts)
    names: dict[Var, Atom] = {}
    for eqn in graph.equations:
        other = twins.get(id(eqn))
        eqn = renamed(eqn, names)
        if other is None:
            equations.append(eqn)
            continue
        made_anew = draw if eqn.primitive.name in DRAWS else partial(_inside, draw)
        new = partial(made_anew, eqn, other)
        operands = [number, *eqn.invars]
        traced = jax.make_jaxpr(lambda n, *xs, new=new: new(n, list(xs)))(*map(spec_of, operands))
        part = inline(traced, operands, eqn)
        equations += part.equations
        consts.update(part.consts)
        names.update(zip(eqn.outvars, part.outputs, strict=True))
    outputs = substitute(graph.outputs, names)
    return Graph([*graph.inputs, number], outputs, equations, consts), names


def _inside(draw: Draw, eqn: JaxprEqn, twin: JaxprEqn, number: Any, xs: Arrays) -> Arrays:
    """An equation that runs others, with the draws in these made by `draw`."""
    name, params = eqn.primitive.name, eqn.params
    functions = []
    for body, other in zip(_bodies(eqn), _bodies(twin), strict=True):
        again = redraw(body, other, draw)[0].run
        functions.append(lambda *xs, again=again: again(*xs, number))
    if name in CHECKPOINTS:
        options = {key: params[key] for key in ("policy", "prevent_cse")}
        return jax.checkpoint(functions[0], **options)(*xs)
    if name == "cond":
        return jax.lax.switch(xs[0], functions, *xs[1:])
    if name == "scan":
        first, count = carry_of(eqn)
        end = first + count

        def iteration(carry, slices):
            out = functions[0](*xs[:first], *carry, *slices)
            return out[:count], out[count:]

        options = {key: params[key] for key in ("length", "reverse", "unroll")}
        carry, stacked = jax.lax.scan(iteration, xs[first:end], xs[end:], **options)
        return [*carry, *stacked]
    if name == "while":
        begin = params["cond_nconsts"]
        end = begin + params["body_nconsts"]
        condition, body = functions
        return jax.lax.while_loop(
            lambda carry: condition(*xs[:begin], *carry)[0],
            lambda carry: body(*xs[begin:end], *carry),
            xs[end:],
        )
    raise PipeshardError(
        f"{name} ({place_of(eqn)}) draws random numbers for every sample, inside a function that "
        "cannot be opened: draw them before, and pass them in"
    )
