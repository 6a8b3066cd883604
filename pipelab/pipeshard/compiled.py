"""One stage, compiled for its mesh: its forward, its backward, and its tasks of the update."""

from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import NamedSharding

from pipelab.jax.device import bytes_on_mesh, moved
from pipelab.jax.jaxpr import Arrays, Graph, spec_of
from pipelab.jax.passes import (
    DONE,
    Compiled,
    Groups,
    Passes,
    Specs,
    compile_passes,
    passes,
    sum_spec,
)
from pipelab.pipeshard.arrays import PipeshardError
from pipelab.pipeshard.cut import StageGraph
from pipelab.pipeshard.unreduced import Shard, Unreduced
from pipelab.pipeshard.update import UpdateTask
from pipelab.table.action import Kind

Place = Callable[[Var], NamedSharding]


class CompiledStage(Compiled):
    """A stage's passes, compiled for its mesh, with its part of the update.

    graph     its equations
    own       what is there with or without a backward: parameters, constants, data
    later     what later stages read of earlier ones
    trains    whether it has a backward
    all_reduced  why its gradients are reduced in every micro-batch, if they are, not once a batch
    total     the sums -> the gradients, as the update reads them, and `DONE`; None where they are
              the same. Parts of a parameter that several stages read stay as they are summed
    tasks     its tasks of the update
    bytes     what a forward leaves for its backward, on all devices of the mesh together;
              `parameter_bytes` of its parameters, `gradient_bytes` of their gradients' sums,
              `optimizer_bytes` of the state that tasks read
    """

    def __init__(
        self,
        graphs: list[StageGraph],
        s: int,
        place: Place,
        kinds: Collection[Kind] = (Kind.B,),
        tasks: Iterable[UpdateTask] = (),
        state: Collection[Var] = (),
        options: Mapping[str, Any] | None = None,
        layers: Sequence[Sequence[int]] = (),
        shard: Shard | str = "",
        traced: Passes | None = None,
    ) -> None:
        """Stage `s` of these.

        kinds    of the schedule's actions
        tasks    of all stages
        state    the step's arguments beside parameters
        options  for the compiler
        layers   of all stages
        shard    the loss of one device's samples, or why there is none
        traced   its passes, if they have been traced before
        """
        # [1] What its neighbours need to know.
        self.graph = graph = graphs[s]
        after = graphs[s + 1 :]
        self.later = {v: None for of in after for v in (*of.inputs, *of.aux_inputs)}
        # [2] Its passes. What they hand on lies where the plan says.
        shapes = Groups(*(specs(vs, place) for vs in graph.groups))
        traced = traced or passes(graph.run, shapes)
        sent = [place(v) for v in (*graph.outputs, *graph.aux_outputs)]
        self.all_reduced, pullback = "", None
        if shard and graph.parameters:
            try:
                if isinstance(shard, str):
                    raise PipeshardError(shard)
                mine = shard.cut(layers)[s]
                pullback = Unreduced(shard, mine, graph, traced, shapes.parameters)
            except PipeshardError as error:
                self.all_reduced = str(error)
        super().__init__(traced, shapes, kinds, sent, options, pullback)
        self.total = self._compile_total(graphs, shapes.parameters, options)
        # [3] What it holds.
        self.own = {*graph.parameters, *graph.fixed, *graph.data}
        own = {i for i, v in enumerate(graph.arguments) if v in self.own}
        kept = zip(self.kept, self.kept_shapes, strict=True)
        self.bytes = sum(bytes_on_mesh(x) for i, x in kept if i not in own)
        self.trains = not {Kind.B, Kind.I}.isdisjoint(kinds)
        weights = shapes.parameters if self.trains else shapes.fixed
        self.parameter_bytes = sum(map(bytes_on_mesh, weights))
        self.gradient_bytes = sum(map(bytes_on_mesh, self.sums)) if self.trains else 0
        # [4] The update.
        self.tasks = [CompiledTask(task, place) for task in tasks if task.stage == s]
        read = {v for task in self.tasks for v in task.inputs}
        self.optimizer_bytes = sum(map(bytes_on_mesh, specs(read & {*state}, place)))

    def _compile_total(
        self, graphs: list[StageGraph], parameters: Specs, options: Mapping[str, Any] | None
    ) -> Any:
        """`total`: the devices' rows added up; rounded, where all of a gradient is here."""
        several = [sum(v in of.parameters for of in graphs) > 1 for v in self.graph.parameters]
        pairs = zip(several, parameters, strict=True)
        found = [sum_spec(x) if shared else x for shared, x in pairs]
        if self.sums == found:
            return None

        def total(sums: Arrays) -> Any:
            pairs = zip(sums, found, strict=True)
            whole = (x if x.ndim == y.ndim else jnp.sum(x, 0) for x, y in pairs)
            return [x.astype(y.dtype) for x, y in zip(whole, found, strict=True)], DONE

        where = [x.sharding for x in found], None
        return compile_passes(total, where, self.sums, donate=0, options=options)


class CompiledTask(UpdateTask):
    """A task of the update, compiled for its stage's mesh."""

    def __init__(self, task: UpdateTask, place: Place) -> None:
        super().__init__(**vars(task))
        inputs = specs(task.inputs, place)
        self._places = [x.sharding for x in inputs]
        graph = Graph(task.inputs, task.outputs, task.equations)
        donate = [i for i, v in enumerate(task.inputs) if v in task.donated]
        self._run = compile_passes(
            graph.run, list(map(place, task.outputs)), *inputs, donate=donate
        )

    def __call__(self, known: MutableMapping[Var, Any]) -> Arrays:
        """Add the task's outputs to what is known; returns them."""
        # Small ones may have been made on another mesh.
        inputs = [moved(known[v], home) for v, home in zip(self.inputs, self._places, strict=True)]
        outputs = self._run(*inputs)
        known.update(zip(self.outputs, outputs, strict=True))
        return outputs


def specs(of: Iterable[Var], place: Place) -> Specs:
    return [spec_of(v, place(v)) for v in of]
