"""A train step for arguments of certain shapes: traced, cut and compiled once, then run as often as wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.extend.core import Literal, Var
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipelab.action import Kind
from pipelab.executors.job import Job
from pipelab.executors.threads import run_threads
from pipelab.executors.worker import Record
from pipelab.pipeshard.combine import How, combinations
from pipelab.pipeshard.cut import count_layers, cut
from pipelab.pipeshard.graph import PipeshardError, bytes_of, dtype_of, shape_of
from pipelab.pipeshard.keys import with_own_keys
from pipelab.pipeshard.plan import Pipeshard, Plan, StagePlan
from pipelab.pipeshard.stage import (
    Batch,
    CompiledStage,
    CompiledTask,
    MeshDevice,
    MeshStage,
    Place,
    bytes_on_mesh,
    spec,
)
from pipelab.pipeshard.trace import Arguments, trace, trace_piece, with_update_of
from pipelab.pipeshard.update import split
from pipelab.schedule import Schedule


class Program:
    """A train step, compiled for a plan and for arguments of certain shapes.

    exact  whether the pipeline computes what the undivided batch does; else (random numbers of each micro-batch's own, or
           `reduce` given for a loss that is neither mean nor sum) what accumulation over the micro-batches does
    plan   what each stage holds
    """

    def __init__(
        self, step: Callable, method: Pipeshard, batch_argnums: Sequence[int], arguments: Arguments
    ) -> None:
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
        self.loss, self.number = self.step.loss, None
        if m > 1:
            self.loss, self.number = with_own_keys(self.loss, self.step.parameters, self.step.batch)
        self.exact = exact and self.number is None
        self.schedule: Schedule = method.table_for(len(layers))
        self.meshes = method.meshes_of(self.schedule.devices)
        self._shardings = method.shardings_of(self.schedule.devices)
        self.graphs = cut(
            self.loss, list(self.step.parameters), self.step.batch, layers, self.number
        )
        self.paths = dict(zip(self.step.arguments, arguments.paths, strict=True))
        self._check_samples()
        self._pinned = self._pin_results()
        self.owner = self._owners()
        self._compile(layers)

    # ---- where things are

    def mesh_of(self, stage: int) -> Mesh:
        return self.meshes[self.schedule.placement[stage]]

    def place(self, row: int, v: Var) -> NamedSharding:
        """The sharding of a variable on a row's mesh."""
        mesh = self.meshes[row]
        source = self._sources.get(v)
        if source is not None:  # an argument, its gradient or its next value
            spec = self._shardings[row](self.paths[source], shape_of(source))
        elif v in self._batch:
            spec = PartitionSpec("data")
        else:
            axis = self.axes.get(v)
            fits = axis is not None and shape_of(v)[axis] % mesh.shape["data"] == 0
            spec = PartitionSpec(*[None] * (axis or 0), "data") if fits else PartitionSpec()
        try:
            sharding = NamedSharding(mesh, spec)
            sharding.check_compatible_aval(shape_of(v))
            sharding.shard_shape(shape_of(v))
        except (TypeError, ValueError) as error:
            name = self.paths.get(source or v, "an array")
            raise PipeshardError(
                f"{name} of shape {shape_of(v)} cannot be sharded as {spec} over {dict(mesh.shape)}"
            ) from error
        return sharding

    def _check_samples(self) -> None:
        for mesh in self.meshes:
            if self.samples % mesh.shape["data"]:
                raise PipeshardError(
                    f"a micro-batch of {self.samples} samples does not divide over {mesh.shape['data']} devices: change the "
                    "batch or microbatches, or give that mesh another shape (data, model)"
                )

    def _pin_results(self) -> dict[Var, Var]:
        """Result -> the argument that it is the next value of, if the step returns its state first, as it takes it."""
        state = [v for v in self.step.arguments if v not in self.step.batch]
        pairs = list(zip(state, self.step.update.outputs, strict=False))
        same = all(shape_of(a) == shape_of(b) for a, b in pairs)
        return {b: a for a, b in pairs if isinstance(b, Var)} if same else {}

    def _owners(self) -> dict[Var, int]:
        """Of parameters (as arguments) and of their gradients: the first stage that reads them."""
        owners: dict[Var, int] = {}
        self.readers: dict[Var, list[int]] = {p: [] for p in self.step.parameters}
        for s, graph in enumerate(self.graphs):
            for p in graph.parameters:
                self.readers[p].append(s)
        for p, stages in self.readers.items():
            owners[self.step.parameters[p]] = owners[self.step.gradients[p]] = (
                stages[0] if stages else 0
            )
        gradients = {self.step.gradients[p]: a for p, a in self.step.parameters.items()}
        self._sources = {
            **{v: v for v in self.step.arguments if v not in self.step.batch},
            **self.step.parameters,
        }
        self._sources.update(gradients)
        self._sources.update({v: a for v, a in self._pinned.items() if v not in self._sources})
        self._batch = set(self.step.batch)
        return owners

    # ---- compiling

    def _compile(self, layers: Sequence[Sequence[int]]) -> None:
        halves = bool(np.isin(self.schedule.columns.kind, (Kind.I, Kind.W)).any())
        counts: dict[Var, int] = {}
        for graph in self.graphs:
            for v in graph.given:
                counts[v] = counts.get(v, 0) + 1
        self.stages = [
            CompiledStage(graph, self._placer(s), counts, halves)
            for s, graph in enumerate(self.graphs)
        ]
        step, shared = self.step, {p for p, stages in self.readers.items() if len(stages) != 1}
        late = {*step.gradient} - {g for p, g in step.gradients.items() if p not in shared}
        homes = {v: self.owner[a] for v, a in self._pinned.items() if a in self.owner}
        tasks = split(step.update, self.owner, late, homes)
        self.tasks = [CompiledTask(task, self._placer(task.stage)) for task in tasks]
        self.plan = Plan(
            self.schedule, tuple(self._stage_plan(s, layers[s]) for s in range(len(layers)))
        )

    def _placer(self, stage: int) -> Place:
        return partial(self.place, self.schedule.placement[stage])

    def _stage_plan(self, s: int, layers: Sequence[int]) -> StagePlan:
        graph, mesh = self.graphs[s], self.mesh_of(s)
        named = {self.paths[self.step.parameters[p]]: shape_of(p) for p in graph.parameters}
        sent = [*graph.made, *graph.telling] if s < len(self.graphs) - 1 else []
        return StagePlan(
            tuple(layers),
            self.schedule.placement[s],
            mesh.devices.shape,
            tuple(mesh.devices.flat),
            named,
            sum(map(bytes_of, graph.parameters)),
            self.stages[s].bytes,
            sum(map(bytes_of, sent)),
            len(graph.equations),
        )

    def optimizer_bytes(self, s: int) -> int:
        """Arguments that a stage's part of the update reads beside parameters: on all devices of its mesh together."""
        place, parameters = self._placer(s), set(self.step.parameters.values())
        read = {v for t in self.tasks if t.task.stage == s for v in t.task.inputs}
        return sum(
            bytes_on_mesh(spec(v, place)) for v in read & set(self.step.arguments) - parameters
        )

    # ---- running

    def run(self, arguments: Arguments) -> Call:
        """One train step. Raises RunError when a stage fails."""
        step, table = self.step, self.schedule
        values = {v: _array(x) for v, x in zip(step.arguments, arguments.values, strict=True)}
        values.update(step.consts)
        placed = _Placed(self, values)
        known: list[dict[Var, Any]] = [{} for _ in self.graphs]  # what each stage's update knows
        own = [
            [t for t in self.tasks if (t.task.level, t.task.stage) == (0, s)]
            for s in range(len(self.graphs))
        ]
        for s, tasks in enumerate(own):
            known[s] = {v: placed.at(s, v) for t in tasks for v in t.task.inputs if v in values}

        def update(s: int, sums: list[Any]) -> list[Any]:
            known[s].update(
                (step.gradients[p], x) for p, x in zip(self.graphs[s].parameters, sums, strict=True)
            )
            return [x for task in own[s] for x in task(known[s])]

        batches = [placed.batch(s) for s in range(len(self.graphs))]
        alone: list[list[int]] = [
            [] for _ in self.graphs
        ]  # no stage's own part of the update waits for another's
        jobs = [
            _Job(table, row, self.meshes[row], alone, None, 0, 1, self, batches, update)
            for row in range(table.devices)
        ]
        outcomes = run_threads(jobs)
        stages = {s: stage for job in jobs for s, stage in job.made.items()}
        everything = {
            **values,
            **{v: x for of_stage in known for v, x in of_stage.items() if v not in values},
        }
        everything.update(self._shared_gradients(stages))
        everything.update(self._results(stages))
        for task in self.tasks:
            if task.task.level:
                task(everything)
        results = [
            jax.numpy.asarray(a.val) if isinstance(a, Literal) else everything[a]
            for a in step.update.outputs
        ]
        return Call(results, [o.record for o in outcomes], [everything[v] for v in step.gradient])

    def _shared_gradients(self, stages: Mapping[int, MeshStage]) -> dict[Var, Any]:
        """Of parameters that several stages read: added up on the first."""
        sums: dict[Var, Any] = {}
        for p, readers in self.readers.items():
            v = self.step.gradients[p]
            to = self._placer(self.owner[v])(v)
            parts = [stages[s].sums_now[self.graphs[s].parameters.index(p)] for s in readers]
            if len(parts) != 1:
                parts = [jax.device_put(x, to) for x in parts]
                sums[v] = (
                    sum(parts[1:], parts[0])
                    if parts
                    else jax.device_put(np.zeros(shape_of(v), dtype_of(v)), to)
                )
        return sums

    def _results(self, stages: Mapping[int, MeshStage]) -> dict[Var, Any]:
        """The loss and what it returns beside, of the whole batch."""
        out = {}
        for i, (v, combine) in enumerate(zip(self.step.gradient, self.combine, strict=False)):
            stage = next(stage for stage in stages.values() if i in stage.results[0])
            out[v] = combine.apply([stage.results[k][i] for k in range(self.microbatches)])
        return out


@dataclass
class Call:
    """What one train step made: flat results, a record per row, and [loss, *aux, *gradients]."""

    results: list[Any]
    records: list[Record]
    gradient: list[Any]


class _Placed:
    """The arrays of one call on the meshes that need them; each is moved to a mesh once."""

    def __init__(self, program: Program, values: Mapping[Var, Any]) -> None:
        self._program, self._values = program, values
        self._at: dict[tuple[int, Var], Any] = {}
        self._pieces: dict[Var, list[Any]] = {}

    def at(self, stage: int, v: Var) -> Any:
        """An argument of the step, or what the loss is differentiated by, on a stage's mesh."""
        row, source = (
            self._program.schedule.placement[stage],
            self._program.step.parameters.get(v, v),
        )
        if (row, source) not in self._at:
            self._at[row, source] = jax.device_put(
                self._values[source], self._program.place(row, source)
            )
        return self._at[row, source]

    def _piece(self, stage: int, v: Var, microbatch: int) -> Any:
        if v not in self._pieces:
            m, value = self._program.microbatches, self._values.get(v)
            if value is None:  # the number of the micro-batch
                self._pieces[v] = list(np.arange(m, dtype=np.uint32))
            else:
                self._pieces[v] = (
                    np.split(value, m) if isinstance(value, np.ndarray) else _split(value, m)
                )
        row = self._program.schedule.placement[stage]
        return jax.device_put(self._pieces[v][microbatch], self._program.place(row, v))

    def batch(self, s: int) -> Batch:
        graph, m = self._program.graphs[s], self._program.microbatches
        whole = NamedSharding(self._program.mesh_of(s), PartitionSpec())
        data = [[self._piece(s, v, k) for v in graph.data] for k in range(m)]
        loss = self._program.step.loss.outputs[0]
        seed = np.asarray(1 / (m if self._program.combine[0].how is How.MEAN else 1))
        parameters, fixed = (
            [self.at(s, v) for v in group] for group in (graph.parameters, graph.fixed)
        )
        return Batch(parameters, fixed, data, jax.device_put(seed.astype(dtype_of(loss)), whole))


@partial(jax.jit, static_argnums=1)
def _split(value: Any, count: int) -> list[Any]:
    return jax.numpy.split(value, count)


def _array(value: Any) -> Any:
    return (
        value if isinstance(value, jax.Array) else np.asarray(value, jax.dtypes.result_type(value))
    )


@dataclass
class _Job(Job):
    """What one worker thread is given."""

    program: Program
    batches: Sequence[Batch]
    update: Callable[[int, list[Any]], Any]
    made: dict[int, MeshStage] = field(default_factory=dict)

    @property
    def where(self) -> str:
        return f"mesh {self.row} ({', '.join(str(d) for d in self.device.devices.flat)})"

    def home(self) -> MeshDevice:
        return MeshDevice(self.device, partial(self.program.place, self.row))

    def stages(self, home: MeshDevice) -> dict[int, MeshStage]:
        graphs = self.program.graphs
        reads = [(*graph.given, *graph.told) for graph in graphs]
        for s in (s for s, row in enumerate(self.schedule.placement) if row == self.row):
            previous = graphs[s - 1].made if s else ()
            own, compiled = self.program.optimizer_bytes(s), self.program.stages[s]
            self.made[s] = MeshStage(
                compiled,
                home,
                self.batches[s],
                reads[s + 1 :],
                previous,
                partial(self.update, s),
                own,
            )
        return self.made
