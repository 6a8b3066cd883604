"""Gradients of a mesh that is parallel over data: each device's own sum, reduced once a batch.

    device 0    samples 0-3    backward --> its sum of the gradients --.
    device 1    samples 4-7    backward --> its sum of the gradients ---+--> the update, once

A backward of all samples ends in an all-reduce: its results are the gradients of them all. So each
device runs that of a smaller micro-batch, which is its own samples (jax.shard_map over "data"; the
axis "model" stays the compiler's), and the sums have a dimension more: a row per device.

That is the same where the gradient by a parameter is a sum over the samples. It is looked up as it
is of a loss (`batch.reduction`), in the backward traced for the samples of a device and for all.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from pipelab.jax.jaxpr import Arrays, Graph, Variables, inline, spec_of
from pipelab.jax.passes import Groups, Passes, Pullback, Specs, passes
from pipelab.pipeshard.arrays import PipeshardError, axes_in, on_mesh
from pipelab.pipeshard.batch.draws import draw_own, redraw
from pipelab.pipeshard.batch.reduction import Reductions
from pipelab.pipeshard.batch.tags import Pair, Role, Tag, axes_of, cotangent, paired
from pipelab.pipeshard.cut import StageGraph, cut, mark
from pipelab.pipeshard.marker import boundary_p
from pipelab.pipeshard.tracing import Arguments, trace

DATA = "data"


@dataclass(frozen=True)
class Shard:
    """The loss of one device's samples, of `count` devices that share a micro-batch.

    loss  with its `parameters` and `batch`, the micro-batch's number included
    tags  of its variables, by pairs with those of the micro-batch's
    """

    count: int
    loss: Graph
    parameters: Variables
    batch: Variables
    tags: Reductions

    def cut(self, stages: Sequence[Sequence[int]]) -> list[StageGraph]:
        """Its stages of these layers."""
        return cut(self.loss, self.parameters, self.batch, stages)


def shard_of(
    step: Callable, arguments: Arguments, loss: Graph, whole: Graph, samples: int, count: int
) -> Shard:
    """The loss of a device's samples.

    loss     of a micro-batch of so many samples, with its boundaries; its last input is the number
             of the micro-batch
    whole    of the batch

    Raises PipeshardError where it has other equations for fewer samples.
    """
    traced = trace(step, arguments, samples // count)
    mine, _ = redraw(traced.loss, whole, draw_own)
    # The same boundaries, which a planner may have set by the size of the micro-batch.
    marks = [i for i, eqn in enumerate(loss.equations) if eqn.primitive is boundary_p]
    starts = [at - before for before, at in enumerate(marks)]
    parameters = list(traced.parameters)
    mine = mark(mine, lambda *_: starts, parameters, traced.batch)
    sizes = samples // count, samples
    tags = Reductions(mine, loss, traced.batch, sizes)
    if tags.of((mine.outputs[0], loss.outputs[0])).role is not Role.REDUCED:
        raise PipeshardError("the loss is no sum over the samples")
    return Shard(count, mine, parameters, [*traced.batch, mine.inputs[-1]], tags)


# ---- how an array gets to a device, and back


@dataclass(frozen=True)
class Way:
    """How devices share an array of all samples.

    axis    the samples' dimension, which is divided; None: each has all of it
    scale   what a device's is, as a multiple of it; the sum of the devices', if `summed`
    summed  whether it is made of their sum (on the way back)
    own     whether it is another array on each device: the first dimension is theirs
    """

    axis: int | None = None
    scale: float = 1.0
    summed: bool = False
    own: bool = False

    @property
    def spec(self) -> PartitionSpec:
        axis = 0 if self.own else self.axis
        return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, DATA)

    def enter(self, x: Any) -> Any:
        return x[0] if self.own else _scaled(x, self.scale)

    def leave(self, x: Any) -> Any:
        if self.summed:
            # XLA's CPU compiler aborts at a sum over part of a mesh's axes in bfloat16.
            wide = x.astype(jax.numpy.promote_types(x.dtype, np.float32))
            x = jax.lax.psum(wide, DATA).astype(x.dtype)
        return x[None] if self.own else _scaled(x, 1 / self.scale)


OWN = Way(own=True)


def _scaled(x: Any, scale: float) -> Any:
    return x if scale == 1 else x * np.asarray(scale, x.dtype)


def _way(shard: Shard, tag: Tag, pair: Pair, back: bool = False) -> Way:
    """The way of an array with this tag, on a device and for all samples; `back` from there."""
    axes, axis = axes_of(pair), shard.tags.axis_of(pair)
    # As micro-batches are joined along it, so it is divided.
    if tag.role is Role.MIXED or axes not in ([], [axis]):
        raise PipeshardError(tag.why or "an array has its samples in another order")
    # What a device has beside what all samples make. A sum over them (degree 1) is a quarter of it
    # on one of 4 devices, and one that is divided by their number twice (degree -1) is 4 times it:
    #
    #     degree                      -1     0     1
    #     on one of 4 devices          4     1    1/4
    #     the sum of all 4 devices'   16     4     1
    if back and tag.role is Role.REDUCED:
        return Way(axis, shard.count ** (1 - tag.degree), summed=True)
    return Way(axis, shard.count**-tag.degree)


class Unreduced(Pullback):
    """A stage's backward, run by each device along "data" on its own samples."""

    own = OWN

    def __init__(
        self, shard: Shard, mine: StageGraph, whole: StageGraph, compiled: Passes, parameters: Specs
    ) -> None:
        """That of stage `mine` of the shard, which is stage `whole` of the micro-batch.

        compiled    the passes of all samples, as they are compiled
        parameters  where they lie

        Raises PipeshardError where the gradients are no sums over the samples.
        """
        if any(DATA in axes_in(x.sharding.spec) for x in parameters):
            raise PipeshardError("a parameter is divided over the devices that share the samples")
        counts = [[list(map(len, of.groups)), len(of.outputs)] for of in (mine, whole)]
        if counts[0] != counts[1]:
            raise PipeshardError("it is cut otherwise for fewer samples")
        self.mesh, tags = parameters[0].sharding.mesh, shard.tags
        # Without shardings, for which jax has equations of its own.
        own, every = (
            passes(graph.run, Groups(*(list(map(spec_of, vs)) for vs in graph.groups)))
            for graph in map(self._unshared, (mine, whole))
        )
        # [1] What the backward is given: gradients of the outputs, and what the forward kept.
        outputs = paired(mine.outputs, whole.outputs)
        arguments = paired(mine.arguments, whole.arguments)
        known = list(map(tags.of, arguments))
        made = tags.run_underived((own.forward, every.forward), known)
        if not own.kept == every.kept == compiled.kept:
            raise PipeshardError("it keeps other arrays for fewer samples")
        pairs = [*arguments, *paired(own.forward.outputs, every.forward.outputs)]
        kept = [[*known, *made][i] for i in own.kept]
        if any(tag.role is Role.REDUCED for tag in kept):
            raise PipeshardError("its backward reads a sum over the samples")
        given = [*outputs, *(pairs[i] for i in own.kept)]
        given_tags = [*(cotangent(tags.of(pair), pair) for pair in outputs), *kept]
        # [2] What it makes of them.
        active = paired([*mine.parameters, *mine.inputs], [*whole.parameters, *whole.inputs])
        wanted = [cotangent(tags.of(pair), pair) for pair in active]
        backwards = []
        for side, backward in enumerate((own.backward, every.backward)):
            shapes = [spec_of(pair[side]) for pair in given]
            backwards.append(inline(jax.make_jaxpr(backward)(*shapes)))
        if redraw(backwards[0], backwards[1], draw_own)[1]:
            raise PipeshardError("its backward draws random numbers (in a checkpoint)")
        if bad := tags.misfit((backwards[0], backwards[1]), given_tags, wanted):
            raise PipeshardError(bad.why or "its gradients are no sums over the samples")
        # [3] How all of it gets to the devices, and back.
        super().__init__(own, len(mine.inputs))
        self.operands = [_way(shard, *each) for each in zip(given_tags, given, strict=True)]
        backs = [_way(shard, *each, back=True) for each in zip(wanted, active, strict=True)]
        self.back = backs[len(mine.parameters) :]

    def _unshared(self, graph: StageGraph) -> StageGraph:
        """With the user's sharding constraints over the other axes."""
        mesh = self.mesh.abstract_mesh.update(axis_types=(AxisType.Manual, AxisType.Auto))
        return replace(graph, equations=on_mesh(graph.equations, mesh, without=DATA))

    def sums(self, parameters: Specs) -> Specs:
        count = self.mesh.shape[DATA]
        return [
            x.update(
                shape=(count, *x.shape),
                sharding=NamedSharding(self.mesh, PartitionSpec(DATA, *x.sharding.spec)),
            )
            for x in parameters
        ]

    def each(self, run: Callable, given: Sequence[Way], made: Sequence[Way]) -> Callable:
        def part(*xs: Any) -> Arrays:
            results = run(*(way.enter(x) for way, x in zip(given, xs, strict=True)))
            return [way.leave(x) for way, x in zip(made, results, strict=True)]

        return jax.shard_map(
            part,
            mesh=self.mesh,
            in_specs=tuple(way.spec for way in given),
            out_specs=[way.spec for way in made],
            axis_names={DATA},
            check_vma=False,
        )
