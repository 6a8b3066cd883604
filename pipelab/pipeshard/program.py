"""A train step for arguments of certain shapes: traced, cut and compiled once, then run at will."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal, Var
from jax.sharding import NamedSharding, PartitionSpec

from pipelab.action import Kind
from pipelab.executors.threads import run_threads
from pipelab.executors.worker import Record
from pipelab.pipeshard.cut import count_layers, cut
from pipelab.pipeshard.graph import PipeshardError, bytes_of, dtype_of, shape_of, spec_of
from pipelab.pipeshard.mesh import Batch, MeshDevice, MeshJob, MeshStage
from pipelab.pipeshard.microbatches import How, combinations, with_own_keys
from pipelab.pipeshard.plan import Pipeshard, Plan, StagePlan
from pipelab.pipeshard.stage import CompiledStage, CompiledTask, Place, bytes_on_mesh
from pipelab.pipeshard.trace import Arguments, trace, trace_piece, with_update_of
from pipelab.pipeshard.update import split
from pipelab.schedule import Schedule


@dataclass
class Call:
    """What one train step made: flat results, a record per row, and [loss, *aux, *gradients]."""

    results: list[Any]
    records: list[Record]
    gradient: list[Any]


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
        whole = trace(step, arguments, arguments.samples)
        layers = method.stages_of(count_layers(whole.loss))
        piece = trace_piece(step, arguments, self.samples) if m > 1 else whole
        self.combine, self.axes, exact = combinations(
            step, arguments, piece, whole, self.samples, method
        )
        self.step = with_update_of(piece, whole) if m > 1 else whole
        self.loss = self.step.loss
        number: Var | None = None
        if m > 1:
            self.loss, number = with_own_keys(self.loss, self.step.parameters, self.step.batch)
        self.exact = exact and number is None

        # [2] The schedule, a mesh for each of its devices, and the stages.
        self.schedule: Schedule = method.table_for(len(layers))
        self.meshes = method.meshes_of(self.schedule.devices)
        self._shardings = method.shardings_of(self.schedule.devices)
        parameters, batch = self.step.parameters, self.step.batch
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
        self.owner: dict[Var, int] = {}
        for p, argument in parameters.items():
            first = min(self.readers[p], default=0)
            self.owner.update({argument: first, gradients[p]: first})
        self.paths = dict(zip(self.step.arguments, arguments.paths, strict=True))
        state = [v for v in self.step.arguments if v not in batch]
        pinned = self._next_values(state)
        self._like: dict[Var, Var] = {
            **pinned,
            **{v: v for v in state},
            **parameters,
            **{gradients[p]: argument for p, argument in parameters.items()},
        }

        # [4] Compile the stages, then the update.
        counts = Counter(v for graph in self.graphs for v in graph.inputs)
        halves = bool(np.isin(self.schedule.columns.kind, (Kind.I, Kind.W)).any())
        self.stages = [
            CompiledStage(graph, self._place_on(s), counts, halves)
            for s, graph in enumerate(self.graphs)
        ]
        # A gradient is known to its owner as soon as that has ended its backwards, unless others
        # have parts of it; all else that the loss makes is known when all stages have ended.
        early = {g for p, g in gradients.items() if len(self.readers[p]) == 1}
        late = {*self.step.gradient} - early
        homes = {v: self.owner[a] for v, a in pinned.items() if a in self.owner}
        self.tasks = [
            CompiledTask(task, self._place_on(task.stage))
            for task in split(self.step.update, self.owner, late, homes)
        ]
        self.plan = Plan(self.schedule, tuple(map(self._stage_plan, range(len(layers)), layers)))

    # ---- where things are

    def place(self, row: int, v: Var) -> NamedSharding:
        """The sharding of a variable on a row's mesh."""
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

    def _next_values(self, state: Sequence[Var]) -> dict[Var, Var]:
        """Result -> the argument that it is the next value of.

        That is known if the step returns its state first, in the order in which it takes it.
        """
        pairs = list(zip(state, self.step.update.outputs, strict=False))
        if any(shape_of(a) != shape_of(b) for a, b in pairs):
            return {}
        return {b: a for a, b in pairs if isinstance(b, Var)}

    def _stage_plan(self, s: int, layers: Sequence[int]) -> StagePlan:
        graph, row = self.graphs[s], self.schedule.placement[s]
        devices = self.meshes[row].devices
        last = s == len(self.graphs) - 1
        sent = [] if last else [*graph.outputs, *graph.aux_outputs]
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

    def optimizer_bytes(self, s: int) -> int:
        """Arguments that a stage's part of the update reads beside parameters.

        On all devices of its mesh together.
        """
        place = self._place_on(s)
        read = {v for t in self.tasks if t.task.stage == s for v in t.task.inputs}
        state = read & {*self.step.arguments} - {*self.step.parameters.values()}
        return sum(bytes_on_mesh(spec_of(v, place(v))) for v in state)

    # ---- running

    def run(self, arguments: Arguments) -> Call:
        """One train step. Raises RunError when a stage fails."""
        # [1] The arguments, on the meshes that need them.
        step, placement = self.step, self.schedule.placement
        values = {v: _array(x) for v, x in zip(step.arguments, arguments.values, strict=True)}
        values.update(step.consts)
        placed = _Placed(self, values)

        # [2] Every stage's own part of the update, which waits for no other.
        own: list[list[CompiledTask]] = [[] for _ in self.graphs]
        known: list[dict[Var, Any]] = [{} for _ in self.graphs]
        for task in self.tasks:
            if task.task.level == 0:
                s = task.task.stage
                own[s].append(task)
                known[s].update((v, placed.at(s, v)) for v in task.task.inputs if v in values)
        gradients = step.gradients

        def update(s: int, sums: list[Any]) -> list[Any]:
            for p, x in zip(self.graphs[s].parameters, sums, strict=True):
                known[s][gradients[p]] = x
            return [x for task in own[s] for x in task(known[s])]

        # [3] A worker for each mesh carries out its row of the schedule.
        devices = [
            MeshDevice(mesh, partial(self.place, row)) for row, mesh in enumerate(self.meshes)
        ]
        reads = [(*graph.inputs, *graph.aux_inputs) for graph in self.graphs]
        stages = [
            MeshStage(
                self.stages[s],
                devices[row],
                placed.batch(s),
                reads[s + 1 :],
                self.graphs[s - 1].outputs if s else (),
                partial(update, s),
                self.optimizer_bytes(s),
            )
            for s, row in enumerate(placement)
        ]
        partners: list[list[int]] = [[] for _ in stages]  # no stage waits for another's news
        jobs = []
        for row, device in enumerate(devices):
            mine = {s: stage for s, stage in enumerate(stages) if placement[s] == row}
            jobs.append(
                MeshJob(self.schedule, row, self.meshes[row], partners, None, 0, 1, device, mine)
            )
        outcomes = run_threads(jobs)

        # [4] What all stages together know, and the rest of the update.
        everything = dict(values)
        for of_stage in known:
            everything.update((v, x) for v, x in of_stage.items() if v not in values)
        everything.update(self._shared_gradients(stages))
        everything.update(self._combined(stages))
        for task in self.tasks:
            if task.task.level:
                task(everything)
        results = [
            jax.numpy.asarray(a.val) if isinstance(a, Literal) else everything[a]
            for a in step.update.outputs
        ]
        records = [outcome.record for outcome in outcomes]
        return Call(results, records, [everything[v] for v in step.gradient])

    def _shared_gradients(self, stages: Sequence[MeshStage]) -> dict[Var, Any]:
        """Of parameters that several stages read, or none: added up where the owner is."""
        sums: dict[Var, Any] = {}
        for p, v in self.step.gradients.items():
            readers = [stages[s] for s in self.readers[p]]
            if len(readers) == 1:
                continue
            home = self._place_on(self.owner[v])(v)
            total = np.zeros(shape_of(v), dtype_of(v))
            parts = [stage.gradients[stage.graph.parameters.index(p)] for stage in readers]
            parts = jax.device_put(parts or [total], home)
            sums[v] = sum(parts[1:], parts[0])
        return sums

    def _combined(self, stages: Sequence[MeshStage]) -> dict[Var, Any]:
        """The loss and what it returns beside, of the whole batch."""
        found = {}
        for i, (v, combine) in enumerate(zip(self.step.gradient, self.combine, strict=False)):
            stage = next(stage for stage in stages if i in stage.graph.results)
            found[v] = combine.apply([stage.results[k][i] for k in range(self.microbatches)])
        return found


class _Placed:
    """The arrays of one call on the meshes that need them; each is moved to a mesh once."""

    def __init__(self, program: Program, values: Mapping[Var, Any]) -> None:
        self._program, self._values = program, values
        self._at: dict[tuple[int, Var], Any] = {}
        self._pieces: dict[Var, list[Any]] = {}

    def at(self, stage: int, v: Var) -> Any:
        """An argument of the step, or what the loss is differentiated by, on a stage's mesh."""
        program = self._program
        row, source = program.schedule.placement[stage], program.step.parameters.get(v, v)
        if (row, source) not in self._at:
            sharding = program.place(row, source)
            self._at[row, source] = jax.device_put(self._values[source], sharding)
        return self._at[row, source]

    def batch(self, s: int) -> Batch:
        program, graph = self._program, self._program.graphs[s]
        row = program.schedule.placement[s]
        m = program.microbatches
        shardings = [program.place(row, v) for v in graph.data]
        data = [jax.device_put([self._cut(v)[k] for v in graph.data], shardings) for k in range(m)]
        # A mean over the batch is the mean of the micro-batches' means: each counts 1 / m.
        loss = program.loss.outputs[0]
        share = 1 / m if program.combine[0].how is How.MEAN else 1
        seed = np.asarray(share).astype(dtype_of(loss))
        everywhere = NamedSharding(program.meshes[row], PartitionSpec())
        return Batch(
            [self.at(s, v) for v in graph.parameters],
            [self.at(s, v) for v in graph.fixed],
            data,
            jax.device_put(seed, everywhere),
        )

    def _cut(self, v: Var) -> list[Any]:
        """A leaf of the batch in micro-batches, or their numbers."""
        if v not in self._pieces:
            m, value = self._program.microbatches, self._values.get(v)
            if value is None:
                self._pieces[v] = list(np.arange(m, dtype=np.uint32))
            else:
                cut = np.split if isinstance(value, np.ndarray) else _split
                self._pieces[v] = cut(value, m)
        return self._pieces[v]


@partial(jax.jit, static_argnums=1)
def _split(value: Any, count: int) -> list[Any]:
    return jax.numpy.split(value, count)


def _array(value: Any) -> Any:
    if isinstance(value, jax.Array):
        return value
    return np.asarray(value, jax.dtypes.result_type(value))
