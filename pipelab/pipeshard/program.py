"""A train step for arguments of certain shapes: traced, cut and compiled once, then run at will."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from hashlib import sha256
from typing import Any

import jax
from jax.extend.core import Literal, Var
from jax.sharding import NamedSharding

from pipelab.action import Kind
from pipelab.executors.jax.graph import variables
from pipelab.pipeshard.batch.draws import draw_own, draws_grow, redraw
from pipelab.pipeshard.batch.microbatches import combinations
from pipelab.pipeshard.cut import count_layers, cut, mark
from pipelab.pipeshard.finish import Finish
from pipelab.pipeshard.graph import PipeshardError, bytes_of, on_mesh, shape_of
from pipelab.pipeshard.plan import Pipeshard, Plan, Planner, StagePlan, StageProblem, over_samples
from pipelab.pipeshard.processes import Processes, processes_of
from pipelab.pipeshard.stage import CompiledStage
from pipelab.pipeshard.trace import Arguments, trace, trace_piece
from pipelab.pipeshard.update import Task, donate, split


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
        self._trace(step, method, arguments)
        layers, auto = self._divide(method)
        self._find_owners()
        trees = jax.tree.unflatten(arguments.tree, self.step.arguments)
        given = jax.tree.leaves([trees[i] for i in donate_argnums])
        self.donated = {*self.step.donated, *given}
        # The update's tasks, what rows tell each other, and this process's stages.
        self.processes = processes_of(self.meshes)
        self.rows = [row for row, q in enumerate(self.processes) if q == jax.process_index()]
        self.connect = connect if len(self.rows) < len(self.meshes) else None
        tasks = self._tasks()
        self.finish = Finish(self, tasks, self._following)
        self.stages = self._compiled(tasks)
        kept = {s: stage.bytes for s, stage in self.stages.items()}
        if self.connect:
            shares = self.agreed().share(kept)
            kept = {s: size for share in shares for s, size in share.items()}
        plans = [self._stage_plan(s, of, kept[s]) for s, of in enumerate(layers)]
        self.plan = Plan(self.schedule, tuple(plans), auto)

    def _trace(self, step: Callable, method: Pipeshard, arguments: Arguments) -> None:
        """The step for the batch and for one micro-batch, and what makes one of the other."""
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
        self.paths = dict(zip(self.step.arguments, arguments.paths, strict=True))
        self._state = [v for v in self.step.arguments if v not in self.step.batch]
        found = combinations(step, arguments, self.step, whole, method)
        self.combine, self.axes, self.exact = found
        self.axes |= dict.fromkeys(self.step.batch, 0)
        self.loss = self.step.loss
        self.number: Var | None = None
        if method.own_draws and draws_grow(self.loss, whole.loss):
            self.loss, names = redraw(self.loss, whole.loss, draw_own)
            self.number = self.loss.inputs[-1]
            for old, v in names.items():
                if old in self.axes and isinstance(v, Var):
                    self.axes[v] = self.axes[old]

    def _divide(self, method: Pipeshard) -> tuple[list[list[int]], Any]:
        """The loss into layers and stages, and the devices into meshes.

        Returns the layers of each stage, and what a planner found, if one was asked.
        """
        parameters, batch = self.step.parameters, self.step.batch
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
        for mesh in self.meshes:
            if self.samples % mesh.shape["data"]:
                raise PipeshardError(
                    f"a micro-batch of {self.samples} samples does not divide over "
                    f"{mesh.shape['data']} devices: change the batch or microbatches, or give that "
                    "mesh another shape (data, model)"
                )
        self._shardings = method.shardings_of(self.schedule.devices)
        self.graphs = cut(self.loss, list(parameters), batch, layers, self.number)
        return layers, auto

    def _find_owners(self) -> None:
        """The first stage that reads a parameter owns it; and whose sharding a variable has."""
        parameters, gradients = self.step.parameters, self.step.gradients
        self._following = self._next_values()
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
            s: CompiledStage(self.graphs, s, partial(self.place, row), apart, tasks, others)
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
        if like is None:
            spec = over_samples(v, self.axes.get(v), mesh)
        else:
            spec = self._shardings[row](self.paths[like], shape_of(like))
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

    def agreed(self) -> Processes:
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
        unsplit = self.stages[s].unsplit if s in self.stages else {}
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
            {self.paths[self.step.parameters[p]]: why for p, why in unsplit.items()},
        )
