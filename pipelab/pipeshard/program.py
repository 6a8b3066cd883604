"""A train step for arguments of certain shapes: traced, cut and compiled once, then run at will."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from hashlib import sha256
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
from pipelab.pipeshard.draws import draws_grow, with_own_draws
from pipelab.pipeshard.finish import Finish
from pipelab.pipeshard.graph import (
    Arrays,
    Atom,
    PipeshardError,
    Values,
    bytes_of,
    dtype_of,
    is_weak,
    on_mesh,
    shape_of,
    variables,
)
from pipelab.pipeshard.mesh import MeshDevice, MeshJob, MeshStage
from pipelab.pipeshard.microbatches import combinations, share_of
from pipelab.pipeshard.plan import Pipeshard, Plan, Planner, StagePlan, StageProblem
from pipelab.pipeshard.processes import Processes, processes_of
from pipelab.pipeshard.stage import CompiledStage, Place
from pipelab.pipeshard.trace import Arguments, trace, trace_piece
from pipelab.pipeshard.update import Task, donate, split

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
    loss     of one micro-batch, which draws its own random numbers where these grow with the batch
    number   its input that is the number of the micro-batch, if it draws such numbers
    combine  how the micro-batches' results are combined
    exact    whether they add up to those of the batch; else (`reduce` was given for a loss that is
             neither mean nor sum) the pipeline computes what accumulation over them does
    graphs   per stage its equations
    readers  parameter -> the stages that read it
    owner    of a parameter (the argument) and of its gradient: the first stage that reads it
    donated  arguments whose arrays are given up
    rows     of this process; `processes` of all rows
    stages   of these rows, by number
    plan     what each stage holds
    """

    def __init__(
        self,
        step: Callable,
        method: Pipeshard,
        arguments: Arguments,
        donate_argnums: Sequence[int],
        connect: Callable[[], Processes],
    ) -> None:
        """`connect` to the other processes, if the meshes are those of several."""
        # [1] The step for the batch and for one micro-batch, and what makes one of the other.
        m = method.microbatches
        if arguments.samples % m:
            raise PipeshardError(
                f"a batch of {arguments.samples} samples does not divide into {m} micro-batches: "
                "make every batch a multiple of that, and leave out or fill up a last one that is "
                "shorter"
            )
        self.samples, self.microbatches = arguments.samples // m, m
        whole = self.step = trace(step, arguments, arguments.samples)
        if m > 1:
            self.step = trace_piece(step, arguments, self.samples, whole)
        found = combinations(step, arguments, self.step, whole, method)
        self.combine, self.axes, self.exact = found
        self.loss = self.step.loss
        self.number: Var | None = None
        if method.own_draws and draws_grow(self.loss, whole.loss):
            self.loss, names = with_own_draws(self.step, whole)
            self.number = self.loss.inputs[-1]
            for old, v in names.items():
                if old in self.axes and isinstance(v, Var):
                    self.axes[v] = self.axes[old]

        # [2] The layers, the schedule, a mesh for each of its devices, and the stages.
        parameters, batch = self.step.parameters, self.step.batch
        self.paths = dict(zip(self.step.arguments, arguments.paths, strict=True))
        self._state = [v for v in self.step.arguments if v not in batch]
        if callable(method.layers):
            self.loss = mark(self.loss, method.layers, list(parameters), batch)
        count = count_layers(self.loss)
        auto = None
        if isinstance(method.stages, Planner):
            equations = (self.loss, parameters, self._state, batch, self.number)
            about = (self.axes, self.paths, self.samples, count, method)
            auto = method.stages.choose(StageProblem(*equations, *about))
            method = replace(method, stages=auto)
        layers = method.stages_of(count)
        self.schedule = method.table_for(len(layers))
        self.meshes = method.meshes_of(self.schedule.devices)
        self.processes = processes_of(self.meshes)
        self.rows = [row for row, q in enumerate(self.processes) if q == jax.process_index()]
        self.connect = connect if len(self.rows) < len(self.meshes) else None
        self._shardings = method.shardings_of(self.schedule.devices)
        self.graphs = cut(self.loss, list(parameters), batch, layers, self.number)
        for mesh in self.meshes:
            if self.samples % mesh.shape["data"]:
                raise PipeshardError(
                    f"a micro-batch of {self.samples} samples does not divide over "
                    f"{mesh.shape['data']} devices: change the batch or microbatches, or give that "
                    "mesh another shape (data, model)"
                )

        # [3] Which stage owns which parameter, and what is donated.
        self._following = self._next_values()
        self._find_owners()
        trees = jax.tree.unflatten(arguments.tree, self.step.arguments)
        given = jax.tree.leaves([trees[i] for i in donate_argnums])
        self.donated = {*self.step.donated, *given}

        # [4] The update's tasks, what rows tell each other, and this process's stages.
        tasks = self._tasks()
        self.finish = Finish(self, tasks, self._following)
        self.stages = self._compiled(tasks)
        kept = {s: stage.bytes for s, stage in self.stages.items()}
        if self.connect:
            shares = self._agreed().share(kept)
            kept = {s: size for share in shares for s, size in share.items()}
        plans = [self._stage_plan(s, of, kept[s]) for s, of in enumerate(layers)]
        self.plan = Plan(self.schedule, tuple(plans), auto)

    def _find_owners(self) -> None:
        """The first stage that reads a parameter owns it; and whose sharding a variable has."""
        parameters, gradients = self.step.parameters, self.step.gradients
        self.readers = {
            p: [s for s, graph in enumerate(self.graphs) if p in graph.parameters]
            for p in parameters
        }
        self._like: dict[Var, Var] = {
            **self._following,
            **{v: v for v in self._state},
            **parameters,
        }
        self.owner: dict[Var, int] = {}
        for p, argument in parameters.items():
            first = min(self.readers[p], default=0)
            self.owner.update({argument: first, gradients[p]: first})
            self._like[gradients[p]] = argument

    def _tasks(self) -> list[Task]:
        """The update as tasks of the stages; and their sharding constraints on their meshes."""
        # A gradient is known to its owner as soon as that has ended its backwards, unless others
        # have parts of it; all else that the loss makes is known when all stages have ended.
        early = {g for p, g in self.step.gradients.items() if len(self.readers[p]) == 1}
        late = {*self.step.gradient} - early
        homes = {v: self.owner[a] for v, a in self._following.items() if a in self.owner}
        tasks = split(self.step.update, self.owner, late, homes)
        # What stages read that may not have ended yet, or is returned as it is, has to stay.
        stays = {v for graph in self.graphs for v in graph.fixed}
        stays.update(variables(self.step.update.outputs))
        donate(tasks, self.donated - stays, self._following)
        for s, graph in enumerate(self.graphs):
            mesh = self.meshes[self.schedule.placement[s]]
            parts: list[Any] = [graph, *(task for task in tasks if task.stage == s)]
            for part in parts:
                part.equations = [on_mesh(eqn, mesh) for eqn in part.equations]
        return tasks

    def _compiled(self, tasks: list[Task]) -> dict[int, CompiledStage]:
        apart = Kind.W in self.schedule.columns.kind
        others = {*self._state} - {*self.step.parameters.values()}
        return {
            s: CompiledStage(self.graphs, s, self._place_on(s), apart, tasks, others)
            for s, row in enumerate(self.schedule.placement)
            if row in self.rows
        }

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

    def _next_values(self) -> dict[Var, Var]:
        """Result -> the argument that it is the next value of.

        That is known if the step returns its state in one piece, in the order in which it takes it.
        """
        results = self.step.update.outputs
        for i in range(len(results)):
            pairs = list(zip(self._state, results[i:], strict=False))
            if all(shape_of(a) == shape_of(b) for a, b in pairs):
                return {b: a for a, b in pairs if isinstance(b, Var)}
        return {}

    def _agreed(self) -> Processes:
        """The processes, when all run this program."""
        assert self.connect
        processes = self.connect()
        processes.agree(self._digest)
        return processes

    @cached_property
    def _digest(self) -> str:
        """Tells it from other programs; the same in all processes."""
        equations = [*self.loss.equations, *self.step.update.equations]
        text = []
        for eqn in equations:
            numbers = [str(x.val) for x in eqn.invars if isinstance(x, Literal)]
            text.append((eqn.primitive.name, numbers, [str(v.aval) for v in eqn.outvars]))
        return sha256(f"{text} {self.schedule.to_csv()}".encode()).hexdigest()

    def _stage_plan(self, s: int, layers: list[int], kept: int) -> StagePlan:
        graph, row = self.graphs[s], self.schedule.placement[s]
        devices = self.meshes[row].devices
        sent = [*graph.outputs, *graph.aux_outputs] if s < len(self.graphs) - 1 else []
        return StagePlan(
            tuple(layers),
            row,
            devices.shape,
            tuple(devices.flat),
            {self.paths[self.step.parameters[p]]: shape_of(p) for p in graph.parameters},
            sum(map(bytes_of, graph.parameters)),
            kept,
            sum(map(bytes_of, sent)),
            len(graph.equations),
        )

    # ---- running

    def run(self, arguments: Arguments) -> Call:
        """One train step. Raises RunError when a stage fails."""
        step = self.step
        pairs = zip(step.arguments, arguments.values, strict=True)
        values = {v: _array(x, v) for v, x in pairs}
        values.update({**step.update.consts, **step.loss.consts})
        uses = Counter(map(id, values.values()))
        for v in self.donated:
            if isinstance(values[v], jax.Array) and uses[id(values[v])] > 1:
                raise PipeshardError(
                    f"{self.paths[v]} is donated, but the step reads the same array elsewhere, "
                    "too: pass a copy (jax.numpy.copy)"
                )

        # [1] Every stage on its mesh.
        share = share_of(self.combine, self.microbatches)
        seed = np.asarray(share).astype(dtype_of(self.loss.outputs[0]))
        pieces, known = self._pieces(values), self._on_meshes(values)
        devices = {row: MeshDevice(self.meshes[row], partial(self.place, row)) for row in self.rows}
        stages = {}
        for s, compiled in self.stages.items():
            row = self.schedule.placement[s]
            names = [step.gradients[p] for p in compiled.graph.parameters]
            stages[s] = MeshStage(compiled, names, devices[row], known[row], pieces, seed)

        # [2] A worker for each mesh carries out its row of the schedule, and ends the update.
        partners: list[tuple[int, ...]] = [()] * len(self.graphs)  # no stage waits for news
        jobs = []
        for row, device in devices.items():
            mine = {s: stage for s, stage in stages.items() if stage.device is device}
            about = (self.schedule, row, device, partners, None, 0, 1)
            jobs.append(MeshJob(*about, mine, self.finish))
        outcomes = self._agreed().run(jobs) if self.connect else run_threads(jobs)
        outcomes.sort(key=attrgetter("row"))

        # [3] The results, each from the row that made it.
        def find(v: Var) -> Any:
            row = self.finish.rows.get(v, 0)
            for here in (values, known.get(row, {}), *known.values()):
                if v in here:
                    return here[v]
            # It is on another process's devices.
            return jax.make_array_from_single_device_arrays(
                shape_of(v), self.place(row, v), [], dtype=dtype_of(v)
            )

        results = [
            _array(a.val, a) if isinstance(a, Literal) else find(a) for a in step.update.outputs
        ]
        for v in self.donated:
            if isinstance(values[v], jax.Array) and not any(x is values[v] for x in results):
                values[v].delete()
        records = [outcome.record for outcome in outcomes]
        tree = jax.tree.unflatten(step.results, results)
        return Call(tree, records, [find(v) for v in step.gradient])

    def _on_meshes(self, values: Values) -> dict[int, Values]:
        """By row, the arguments that its stages and their parts of the update read."""
        known: dict[int, Values] = {row: {} for row in self.rows}
        for row, mine in known.items():
            for v, source in self.finish.reads[row].items():
                if source not in values:  # the step makes it
                    continue
                if source not in mine:
                    array = values[source]
                    if isinstance(array, jax.Array) and not array.is_fully_addressable:
                        raise PipeshardError(
                            f"{self.paths[source]} is on another process's devices: pass it as a "
                            "host array (`fetch` makes one), or return the state in the order in "
                            "which the step takes it, so that it stays where it is read"
                        )
                    mine[source] = jax.device_put(array, self.place(row, source))
                mine[v] = mine[source]
        return known

    def _pieces(self, values: Values) -> dict[Var, Arrays]:
        """Per micro-batch its number, and its part of the leaves of the batch that stages read."""
        m = self.microbatches
        cut: dict[Var, Arrays] = {}
        for v in {v for stage in self.stages.values() for v in stage.graph.data}:
            if v not in values:
                cut[v] = list(np.arange(m, dtype=np.uint32))
            elif isinstance(values[v], np.ndarray):
                cut[v] = np.split(values[v], m)
            else:
                cut[v] = split_array(values[v], m)
        return cut


def _array(value: Any, of: Atom) -> Any:
    """An argument, or a number of the step's own, as an array of the type that it is traced by."""
    if isinstance(value, jax.Array):
        return value
    array = np.asarray(value, dtype_of(of))
    return jax.numpy.asarray(array.item()) if is_weak(of) else array
