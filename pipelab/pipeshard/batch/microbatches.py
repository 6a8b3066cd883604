"""A batch in micro-batches: how their results combine."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from pipelab.jax.jaxpr import Arrays, Atom, Graph, variables
from pipelab.jax.passes import sum_type
from pipelab.pipeshard.arrays import (
    PipeshardError,
    is_inexact,
    shape_of,
)
from pipelab.pipeshard.batch.primitives import KEEP
from pipelab.pipeshard.batch.reduction import Reductions
from pipelab.pipeshard.batch.tags import FIXED, Role, Tag
from pipelab.pipeshard.method import Pipeshard
from pipelab.pipeshard.tracing import WEIGHT, Arguments, TracedStep, trace


class How(Enum):
    MEAN = "mean"
    SUM = "sum"
    JOIN = "join"  # one after another: a value per sample
    LAST = "last"  # the same in all


add_arrays = jax.jit(add)  # a quarter of the time of + on arrays
BY_DEGREE: dict[float, How] = {0: How.MEAN, 1: How.SUM}  # how a reduced value grows with the batch


@dataclass(frozen=True)
class Combine:
    """How the micro-batches' results combine into the batch's.

    axis  the samples' dimension, if they are joined
    """

    how: How
    axis: int = 0

    def apply(self, values: Arrays) -> Any:
        if self.how is How.LAST or len(values) == 1:
            return values[-1]
        if self.how is How.JOIN:
            return jnp.concatenate(values, self.axis)
        # The first one's type is the sum's.
        kind = values[0].dtype
        total = reduce(add_arrays, values[1:], values[0].astype(sum_type(kind)))
        total = total / len(values) if self.how is How.MEAN else total
        return total.astype(kind) if jnp.issubdtype(kind, jnp.inexact) else total


def share_of(combine: list[Combine], m: int) -> float:
    """The weight of one micro-batch's loss, of m, in the batch's loss.

    The backward starts from it. So a custom derivative that, say, bounds a sample's gradient sees
    the same gradient as in the whole batch.
    """
    return 1 / m if combine[0].how is How.MEAN else 1


Combined = tuple[list[Combine], dict[Var, int], bool]


def combinations(
    step: Callable, arguments: Arguments, piece: TracedStep, whole: TracedStep, method: Pipeshard
) -> Combined:
    """How each result of the loss combines; the batch's dimension of each variable; exactness.

    piece, whole  the step of one micro-batch and of the batch

    Exact: the micro-batches add up to the batch. Raises PipeshardError if a result is neither a
    mean nor a sum over the batch, nor one value per sample.
    """
    m, samples = method.microbatches, arguments.samples // method.microbatches
    # Two traces of unequal sizes show what grows with the batch.
    if m == 1:
        try:
            twice = trace(step, arguments, 2 * samples)
            sizes = samples, 2 * samples
            axes = Reductions(piece.loss, twice.loss, piece.batch, sizes).axes
        except (TypeError, ValueError):
            axes = {}
        return [Combine(How.LAST)] * len(piece.loss.outputs), axes, True
    try:
        return _combined(piece, whole, (samples, arguments.samples), method.reduce)
    except PipeshardError as error:
        if samples > 1:
            raise
        # Does the loss fail at every size, or only treat one sample differently from two?
        pair = trace(step, arguments, 2)
        _combined(pair, trace(step, arguments, 4), (2, 4), method.reduce)
        raise PipeshardError(
            "the loss treats a micro-batch of one sample differently from larger ones: write the "
            "loss the same for every size of batch (squeeze(-1), not squeeze()), or ask for fewer "
            f"micro-batches ({error})"
        ) from None


def _combined(
    piece: TracedStep, whole: TracedStep, sizes: tuple[int, int], reduce: str | None
) -> Combined:
    found = Reductions(piece.loss, whole.loss, piece.batch, sizes)
    combine: list[Combine] = []
    exact = True
    pairs = zip(piece.loss.outputs, whole.loss.outputs, strict=True)
    for name, pair in zip(piece.result_names, pairs, strict=True):
        tag = found.of(pair)
        exact &= tag.role is not Role.MIXED and tag.degree in BY_DEGREE
        is_mean = _is_mean(piece.loss, pair[0], found.axes)
        if piece.trains and not combine:  # the loss; results beside it may be joined, too
            combine.append(_of_loss(tag, reduce, is_mean))
        else:
            combine.append(_of_aux(name, tag, pair[0], found.axis_of(pair), reduce, is_mean))
    return combine, found.axes, exact


def gradient_of(
    loss: Graph, share: float = 1, trains: bool = True
) -> Callable[[Arrays, Arrays], Arrays]:
    """(parameters, others) -> [loss, *aux, *gradients by the parameters].

    loss    takes the parameters first, then the others
    share   the gradients are those of this share of the loss
    trains  whether there are gradients
    """
    if not trains:
        return lambda parameters, others: loss.run(*parameters, *others)

    def value(parameters, others):
        out = loss.run(*parameters, *others)
        # Differentiate the share, but return the loss as it is.
        return share * out[0], out

    def gradient(parameters, others):
        gradients, results = jax.grad(value, has_aux=True)(parameters, others)
        return [*results, *gradients]

    return gradient


def in_pieces(
    step: TracedStep, loss: Graph, combine: list[Combine], values: Arrays, m: int
) -> Arrays:
    """[loss, *aux, *gradients] of a batch, accumulated over its micro-batches on one device.

    step    of a micro-batch
    loss    of a micro-batch; its last input may be the micro-batch's number
    values  the step's arguments, of the whole batch
    """
    known = dict(zip(step.arguments, values, strict=True))
    count = len(step.parameters)
    gradient = jax.jit(gradient_of(loss, share_of(combine, m), step.trains))
    parameters = [known[argument] for argument in step.parameters.values()]
    inputs = loss.inputs[count:]
    cut = {v: jnp.split(known[v], m) for v in inputs if v in step.batch}
    pieces = []
    for k in range(m):
        # An input that is not an argument of the step is the micro-batch's number.
        of_piece = [cut[v][k] if v in cut else known.get(v, np.uint32(k)) for v in inputs]
        pieces.append(gradient(parameters, of_piece))
    # Each gradient is already of the micro-batch's share of the loss, so sum them.
    how = [*combine, *[Combine(How.SUM)] * len(step.gradients)]
    columns = zip(*pieces, strict=True)
    return [each.apply(list(xs)) for each, xs in zip(how, columns, strict=True)]


def _is_mean(loss: Graph, result: Atom, axes: dict[Var, int]) -> bool:
    """Whether a result is written as a mean over the batch, whatever of: a sum, divided."""
    maker = {v: eqn for eqn in loss.equations for v in eqn.outvars}
    divided = False
    while isinstance(result, Var) and result in maker:
        eqn = maker[result]
        name, read = eqn.primitive.name, variables(eqn.invars)
        if len(read) != 1 or name not in KEEP | {"div", "mul"}:
            return False
        if name == "reduce_sum":
            return divided and axes.get(read[0]) in eqn.params["axes"]
        if name == "div" and eqn.invars[0] is not read[0]:
            return False
        result, divided = read[0], divided or name in ("div", "mul")
    return False


def _of_loss(tag: Tag, reduce: str | None, is_mean: bool) -> Combine:
    if tag.role is Role.FIXED:
        raise PipeshardError("the loss does not depend on the batch: check batch_argnums")
    known = BY_DEGREE.get(tag.degree) if tag.role is Role.REDUCED else None
    if known and reduce and known is not How(reduce):
        raise PipeshardError(
            f"reduce={reduce!r}, but the loss is a {known.value} over the batch: omit reduce"
        )
    if known or reduce:
        return Combine(known or How(reduce))
    why = f": {tag.why}" if tag.why else f" (it grows as samples to the power {tag.degree:g})"
    what, remedy = "neither a mean nor a sum over the batch", ""
    if is_mean and tag.why:
        what = "a mean over the batch, but of values that a sample does not make alone"
        remedy = "; to average over micro-batches anyway, say Pipeshard(reduce='mean')"
    elif ";" not in why:  # which has a remedy there
        remedy = "; return a mean or a sum of values that each sample makes alone"
    raise PipeshardError(
        f"the loss is {what}{why}, so micro-batches do not add up to the batch{remedy}"
    )


def _of_aux(
    name: str, tag: Tag, atom: Atom, axis: int | None, reduce: str | None, is_mean: bool
) -> Combine:
    if axis is not None:
        if reduce or not (tag.role is Role.MIXED or tag.degree):
            return Combine(How.JOIN, axis)
    elif tag == FIXED:
        return Combine(How.LAST)
    elif tag.role in (Role.FIXED, Role.REDUCED) and tag.degree in BY_DEGREE:
        return Combine(BY_DEGREE[tag.degree])
    elif reduce and tag.role is not Role.SAMPLES and is_inexact(atom):
        return Combine(How.MEAN)
    # What follows ";" tells how to write a masked mean as the loss. For aux it is no help.
    why = f" ({tag.why.partition(';')[0]})" if tag.why else ""
    if name == WEIGHT:
        raise PipeshardError(
            f"the weight of the loss is neither a mean nor a sum over the batch{why}: weigh by a "
            "sum over the batch, such as a mask's, or by a function of that sum alone"
        )
    raise PipeshardError(
        f"{name}, shape {shape_of(atom)}, is neither a mean nor a sum "
        f"over the batch nor one value per sample{why}: leave it out"
        + (", or average it over the micro-batches: Pipeshard(reduce='mean')" if is_mean else "")
    )
