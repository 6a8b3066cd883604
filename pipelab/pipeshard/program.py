"""A train step for arguments of certain shapes: traced, cut and compiled once, then run at will."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal, Var
from jax.sharding import NamedSharding, PartitionSpec

from pipelab.action import Kind
from pipelab.executors.threads import run_threads
from pipelab.executors.worker import Record
from pipelab.pipeshard.cut import count_layers, cut, mark
from pipelab.pipeshard.graph import (
    Arrays,
    PipeshardError,
    Values,
    Variables,
    bytes_of,
    dtype_of,
    shape_of,
)
from pipelab.pipeshard.mesh import MeshDevice, MeshJob, MeshStage
from pipelab.pipeshard.microbatches import How, combinations, with_own_keys
from pipelab.pipeshard.plan import Pipeshard, Plan, Planner, StagePlan, StageProblem
from pipelab.pipeshard.stage import CompiledStage, Place
from pipelab.pipeshard.trace import Arguments, trace, trace_piece
from pipelab.pipeshard.update import split

split_array = jax.jit(jax.numpy.split, static_argnums=1)


@dataclass
class Call:
    """What one train step made: results, a record per row, and [loss, *aux, *gradients]."""

    results: Any
    records: list[Record]
    gradient: Arrays


class Program:
    """A train step, compiled for a plan and for arguments of certain shapes.

    step     of one micro-batch, with the update of the whole batch
    loss     of one micro-batch, which draws its own random numbers
    combine  how the micro-batches' results are combined
    exact    whether the pipeline computes what the undivided batch does; else (random numbers of
             each micro-batch's own, or `reduce` given for a loss that is neither mean nor sum)
             what accumulation over the micro-batches does
    graphs   per stage its equations
    readers  parameter -> the stages that read it
    owner    of a parameter (the argument) and of its gradient: the first stage that reads it
    plan     what each stage holds
    """

    def __init__(self, step: Callable, method: Pipeshard, arguments: Arguments) -> None:
        # [1] The step for the batch and for one micro-batch, and what makes one of the other.
        m = method.microbatches
        if arguments.samples % m:
            raise PipeshardError(
                f"a batch of {arguments.samples} samples does not divide into {m} micro-batches"
            )
        self.samples, self.microbatches = arguments.samples // m, m
        whole = self.step = trace(step, arguments, arguments.samples)
        if m > 1:
            self.step = trace_piece(step, arguments, self.samples, whole)
        found = combinations(step, arguments, self.step, whole, method)
        self.combine, self.axes, exact = found
        self.loss, number = with_own_keys(self.step) if m > 1 else (whole.loss, None)
        self.exact = exact and number is None

        # [2] The layers, the schedule, a mesh for each of its devices, and the stages.
        parameters, batch = self.step.parameters, self.step.batch
        self.paths = dict(zip(self.step.arguments, arguments.paths, strict=True))
        state = [v for v in self.step.arguments if v not in batch]
        if callable(method.layers):
            self.loss = mark(self.loss, method.layers, list(parameters), batch)
        count = count_layers(self.loss)
        auto = None
        if isinstance(method.stages, Planner):
            about = (self.axes, self.paths, self.samples, count, method)
            problem = StageProblem(self.loss, parameters, state, batch, number, *about)
            auto = method.stages.choose(problem)
            method = replace(method, stages=auto)
        layers = method.stages_of(count)
        self.schedule = method.table_for(len(layers))
        self.meshes = method.meshes_of(self.schedule.devices)
        self._shardings = method.shardings_of(self.schedule.devices)
        self.graphs = cut(self.loss, list(parameters), batch, layers, number)
        for mesh in self.meshes:
            if self.samples % mesh.shape["data"]:
                raise PipeshardError(
                    f"a micro-batch of {self.samples} samples does not divide over "
                    f"{mesh.shape['data']} devices: change the batch or microbatches, or give that "
                    "mesh another shape (data, model)"
                )

        # [3] Which stage owns which parameter, and which argument says how a variable is sharded.
        gradients = self.step.gradients
        self.readers = {
            p: [s for s, graph in enumerate(self.graphs) if p in graph.parameters]
            for p in parameters
        }
        pinned = self._next_values(state)
        self._like: dict[Var, Var] = {**pinned, **{v: v for v in state}, **parameters}
        self.owner: dict[Var, int] = {}
        for p, argument in parameters.items():
            first = min(self.readers[p], default=0)
            self.owner.update({argument: first, gradients[p]: first})
            self._like[gradients[p]] = argument

        # [4] Compile the stages, with their tasks of the update.
        apart = Kind.W in self.schedule.columns.kind
        numbers = range(len(layers))
        # A gradient is known to its owner as soon as that has ended its backwards, unless others
        # have parts of it; all else that the loss makes is known when all stages have ended.
        early = {g for p, g in gradients.items() if len(self.readers[p]) == 1}
        late = {*self.step.gradient} - early
        homes = {v: self.owner[a] for v, a in pinned.items() if a in self.owner}
        tasks = split(self.step.update, self.owner, late, homes)
        others = {*state} - {*parameters.values()}
        self.stages = [
            CompiledStage(self.graphs, s, self._place_on(s), apart, tasks, others) for s in numbers
        ]
        self.plan = Plan(self.schedule, tuple(map(self._stage_plan, numbers, layers)), auto)

    # ---- where things are

    def place(self, row: int, v: Var) -> NamedSharding:
        """The sharding of a variable on a row's mesh.

        An argument, its gradient and its next value lie as the plan says; what has a dimension of
        samples is divided over the devices that are parallel over data, if it divides; anything
        else is whole on each of them.
        """
        mesh = self.meshes[row]
        like = self._like.get(v)
        axis = 0 if v in self.step.batch else self.axes.get(v)
        spec = PartitionSpec()
        if like is not None:
            spec = self._shardings[row](self.paths[like], shape_of(like))
        elif axis is not None and shape_of(v)[axis] % mesh.shape["data"] == 0:
            spec = PartitionSpec(*[None] * axis, "data")
        try:
            sharding = NamedSharding(mesh, spec)
            sharding.check_compatible_aval(shape_of(v))
            sharding.shard_shape(shape_of(v))
        except (TypeError, ValueError) as error:
            name = self.paths.get(like or v, "an array")
            raise PipeshardError(
                f"{name} of shape {shape_of(v)} cannot be sharded as {spec} over {dict(mesh.shape)}"
            ) from error
        return sharding

    def _place_on(self, stage: int) -> Place:
        return partial(self.place, self.schedule.placement[stage])

    def _next_values(self, state: Variables) -> dict[Var, Var]:
        """Result -> the argument that it is the next value of.

        That is known if the step returns its state first, in the order in which it takes it.
        """
        pairs = list(zip(state, self.step.update.outputs, strict=False))
        if any(shape_of(a) != shape_of(b) for a, b in pairs):
            return {}
        return {b: a for a, b in pairs if isinstance(b, Var)}

    def _stage_plan(self, s: int, layers: list[int]) -> StagePlan:
        graph, row = self.graphs[s], self.schedule.placement[s]
        devices = self.meshes[row].devices
        sent = [*graph.outputs, *graph.aux_outputs] if self.stages[s].later else []
        return StagePlan(
            tuple(layers),
            row,
            devices.shape,
            tuple(devices.flat),
            {self.paths[self.step.parameters[p]]: shape_of(p) for p in graph.parameters},
            sum(map(bytes_of, graph.parameters)),
            self.stages[s].bytes,
            sum(map(bytes_of, sent)),
            len(graph.equations),
        )

    # ---- running

    def run(self, arguments: Arguments) -> Call:
        """One train step. Raises RunError when a stage fails."""
        step = self.step
        values = {v: _array(x) for v, x in zip(step.arguments, arguments.values, strict=True)}
        values.update({**step.update.consts, **step.loss.consts})

        # [1] Every stage on its mesh. A mean over the batch is the mean of the micro-batches'
        #     means, so that the gradient of each of these is 1 / m.
        share = 1 / self.microbatches if self.combine[0].how is How.MEAN else 1
        seed = np.asarray(share).astype(dtype_of(self.loss.outputs[0]))
        pieces, known = self._pieces(values), self._on_meshes(values)
        devices = [
            MeshDevice(mesh, partial(self.place, row)) for row, mesh in enumerate(self.meshes)
        ]
        stages = []
        for compiled, row in zip(self.stages, self.schedule.placement, strict=True):
            names = [step.gradients[p] for p in compiled.graph.parameters]
            stages.append(MeshStage(compiled, names, devices[row], known[row], pieces, seed))

        # [2] A worker for each mesh carries out its row of the schedule.
        partners: list[tuple[int, ...]] = [()] * len(stages)  # no stage waits for another's news
        jobs = []
        for row, device in enumerate(devices):
            mine = {s: stage for s, stage in enumerate(stages) if stage.device is device}
            jobs.append(MeshJob(self.schedule, row, device, partners, None, 0, 1, mine))
        outcomes = run_threads(jobs)

        # [3] What all stages together know, and the rest of the update.
        made = {**self._shared_gradients(stages), **self._combined(stages)}
        everything = ChainMap(made, values, *known)
        tasks = [task for stage in self.stages for task in stage.tasks if task.level]
        for task in sorted(tasks, key=attrgetter("level")):
            task(everything)
        results = [
            jax.numpy.asarray(a.val) if isinstance(a, Literal) else everything[a]
            for a in step.update.outputs
        ]
        records = [outcome.record for outcome in outcomes]
        tree = jax.tree.unflatten(step.results, results)
        return Call(tree, records, [everything[v] for v in step.gradient])

    def _on_meshes(self, values: Values) -> list[Values]:
        """Per mesh, the arguments that its stages and their own parts of the update read."""
        known: list[Values] = [{} for _ in self.meshes]
        for s, row in enumerate(self.schedule.placement):
            graph, mine = self.graphs[s], known[row]
            read = [v for task in self.stages[s].tasks if not task.level for v in task.inputs]
            for v in (*graph.parameters, *graph.fixed, *read):
                source = self.step.parameters.get(v, v)
                if source in values:
                    if source not in mine:
                        mine[source] = jax.device_put(values[source], self.place(row, source))
                    mine[v] = mine[source]
        return known

    def _pieces(self, values: Values) -> dict[Var, Arrays]:
        """Per micro-batch its number, and its part of the leaves of the batch that stages read."""
        m = self.microbatches
        cut: dict[Var, Arrays] = {}
        for v in {v for graph in self.graphs for v in graph.data}:
            if v not in values:
                cut[v] = list(np.arange(m, dtype=np.uint32))
            elif isinstance(values[v], np.ndarray):
                cut[v] = np.split(values[v], m)
            else:
                cut[v] = split_array(values[v], m)
        return cut

    def _shared_gradients(self, stages: list[MeshStage]) -> Values:
        """Of parameters that not exactly one stage reads: added up where the owner is."""
        sums: Values = {}
        for p, v in self.step.gradients.items():
            readers = [stages[s] for s in self.readers[p]]
            if len(readers) != 1:
                home = self._place_on(self.owner[v])(v)
                parts = [stage.gradients[stage.graph.parameters.index(p)] for stage in readers]
                nothing = np.zeros(shape_of(v), dtype_of(v))
                parts = jax.device_put(parts or [nothing], home)
                sums[v] = sum(parts)
        return sums

    def _combined(self, stages: list[MeshStage]) -> Values:
        """The loss and what it returns beside, of the whole batch."""
        found = {}
        for i, (v, combine) in enumerate(zip(self.step.gradient, self.combine, strict=False)):
            stage = next(stage for stage in stages if i in stage.graph.results)
            found[v] = combine.apply([stage.results[k][i] for k in range(self.microbatches)])
        return found


def _array(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return value
    return np.asarray(value, jax.dtypes.result_type(value))
