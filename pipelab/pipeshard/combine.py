"""What becomes of the micro-batches' losses and other results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Var

from pipelab.pipeshard import reduction
from pipelab.pipeshard.graph import Atom, PipeshardError, dtype_of, shape_of
from pipelab.pipeshard.plan import Pipeshard
from pipelab.pipeshard.reduction import Reductions, Tag
from pipelab.pipeshard.trace import Arguments, Step, trace


class How(Enum):
    MEAN = "mean"
    SUM = "sum"
    JOIN = "join"  # one after another: a value per sample
    LAST = "last"  # the same for all


@dataclass(frozen=True)
class Combine:
    """How a result of the whole batch comes of those of the micro-batches; `axis` is the samples', if they are joined."""

    how: How
    axis: int = 0

    def apply(self, values: list[Any]) -> Any:
        if self.how is How.LAST or len(values) == 1:
            return values[-1]
        if self.how is How.JOIN:
            return jnp.concatenate(values, self.axis)
        total = sum(values[1:], values[0])
        return total / len(values) if self.how is How.MEAN else total


def combinations(
    step: Callable, arguments: Arguments, traced: Step, whole: Step, samples: int, method: Pipeshard
) -> tuple[list[Combine], dict[Var, int], bool]:
    """Per result of the loss how it is combined; the batch's dimension of each variable; whether that is exact.

    traced, whole  the step of one micro-batch, of so many samples, and of the batch

    Raises PipeshardError where a result is neither a mean nor a sum over the batch, nor one value per sample.
    """
    small = (
        traced if samples > 1 else trace(step, arguments, 2)
    )  # one sample: no dimension would show
    sizes = (
        max(samples, 2),
        arguments.samples if arguments.samples > max(samples, 2) else 2 * max(samples, 2),
    )
    try:
        large = whole if sizes[1] == arguments.samples else trace(step, arguments, sizes[1])
        found = Reductions(small.loss, large.loss, small.batch, sizes)
    except (TypeError, ValueError):
        if method.microbatches > 1:
            raise
        return [Combine(How.LAST)] * len(small.loss.outputs), {}, True
    axes = found.axes if small is traced else {}
    if method.microbatches == 1:
        return [Combine(How.LAST)] * len(small.loss.outputs), axes, True
    results = list(zip(small.loss.outputs, large.loss.outputs, strict=True))
    tags = [found.of(pair) for pair in results]
    others = [
        _of_aux(i, tag, pair[0], found.axis_of(pair), method.reduce)
        for i, (tag, pair) in enumerate(zip(tags[1:], results[1:], strict=True))
    ]
    exact = all(tag.how is not reduction.How.MIXED and tag.degree in (0, 1) for tag in tags)
    return [_of_loss(tags[0], method.reduce), *others], axes, exact


def _of_loss(tag: Tag, reduce: str | None) -> Combine:
    if tag.how is reduction.How.FIXED:
        raise PipeshardError("the loss does not depend on the batch: check batch_argnums")
    known = {0: How.MEAN, 1: How.SUM}.get(tag.degree) if tag.how is reduction.How.REDUCED else None  # type: ignore[call-overload]
    if known and reduce and known is not How(reduce):
        raise PipeshardError(
            f"reduce={reduce!r}, but the loss is a {known.value} over the batch: leave reduce out"
        )
    if known or reduce:
        return Combine(known or How(reduce))
    why = f": {tag.why}" if tag.why else f" (it grows as samples to the power {tag.degree:g})"
    raise PipeshardError(
        f"the loss is neither a mean nor a sum over the batch{why}, so that micro-batches do not add up to the batch; if each "
        "micro-batch is to count by itself all the same, say Pipeshard(reduce='mean')"
    )


def _of_aux(i: int, tag: Tag, atom: Atom, axis: int | None, reduce: str | None) -> Combine:
    if tag == reduction.FIXED and axis is None:
        return Combine(How.LAST)
    mixed = tag.how is reduction.How.MIXED
    if axis is not None and (reduce or not (mixed or tag.degree)):
        return Combine(How.JOIN, axis)
    if (
        tag.how in (reduction.How.FIXED, reduction.How.REDUCED)
        and axis is None
        and tag.degree in (0, 1)
    ):
        return Combine(How.MEAN if tag.degree == 0 else How.SUM)
    if (
        reduce
        and axis is None
        and tag.how is not reduction.How.SAMPLES
        and jnp.issubdtype(dtype_of(atom), jnp.inexact)
    ):
        return Combine(How.MEAN)
    why = f" ({tag.why})" if tag.why else ""
    raise PipeshardError(
        f"auxiliary result {i} of the loss, shape {shape_of(atom)}, is neither a mean nor a sum over the batch nor one value "
        f"per sample{why}: leave it out, or say Pipeshard(reduce='mean') to average it over the micro-batches"
    )
