"""A train step for arguments of certain shapes: traced, cut and compiled once, then run at will."""

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from typing import Any

import jax
from jax.extend.core import Var
from jax.sharding import NamedSharding

from pipelab.jax.host import digest, of_program, of_trees
from pipelab.jax.jaxpr import spec_of, variables
from pipelab.pipeshard.arrays import PipeshardError, bytes_of, on_mesh, shape_of
from pipelab.pipeshard.batch.draws import draw_own, redraw
from pipelab.pipeshard.batch.microbatches import combinations, gradient_of
from pipelab.pipeshard.compiled import CompiledStage
from pipelab.pipeshard.cut import count_layers, cut, mark
from pipelab.pipeshard.end_of_step import EndOfStep
from pipelab.pipeshard.hosts import Hosts, processes_of
from pipelab.pipeshard.method import Pipeshard, Plan, Planner, StagePlan, StageProblem, over_samples
from pipelab.pipeshard.tracing import Arguments, TracedStep, trace, trace_piece
from pipelab.pipeshard.unreduced import Shard, shard_of
from pipelab.pipeshard.update import UpdateTask, donate, split_update
from pipelab.predict.simulate import simulate
from pipelab.table.action import Action


class Program:
    """A train step, compiled for a plan and for arguments of certain shapes.

    step     of one micro-batch, with the update of the whole batch
    loss     of one micro-batch, which draws its own random numbers where these grow with the batch
    batch    its inputs that are the batch, and the number of the micro-batch
    combine  how the micro-batches' results are combined
    exact    whether they add up to those of the batch; else (`reduce` was given for a loss that is
             neither mean nor sum) the pipeline computes what accumulation over them does
    graphs   per stage its equations
    like     variable -> the argument whose sharding it has
    readers  gradient of a parameter -> the stages that read the parameter
    next_values  result -> the argument that it is the next value of
    numbers  of the variables that stages hand on, the same in all processes
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
        connect: Callable[[], Hosts],
    ) -> None:
        """`connect` to the other processes, if the meshes are those of several."""
        self.place = cache(self._place)  # every action asks
        self._trace(step, method, arguments)
        layers, auto = self._divide(method)
        parameters, gradients = self.step.parameters, self.step.gradients
        self.next_values = self._next_values()
        # What becomes the argument, or is added to it, lies as it does: no call moves the state.
        self.like: dict[Var, Var] = {
            **self.next_values,
            **{v: v for v in self._state},
            **parameters,
            **{gradients[p]: argument for p, argument in parameters.items()},
        }
        trees = jax.tree.unflatten(arguments.tree, self.step.arguments)
        given = jax.tree.leaves([trees[i] for i in donate_argnums])
        self.donated = {*self.step.donated, *given}
        # The update's tasks, what rows send each other, and this process's stages.
        self.processes = processes_of(self.meshes)
        self.rows = [row for row, q in enumerate(self.processes) if q == jax.process_index()]
        self.connect = connect if len(self.rows) < len(self.meshes) else None
        self.readers = {
            gradient: [s for s, graph in enumerate(self.graphs) if p in graph.parameters]
            for p, gradient in gradients.items()
        }
        tasks = self._tasks()
        self.end = EndOfStep(
            self.step,
            self.combine,
            self.graphs,
            self.readers,
            tasks,
            self.schedule.placement,
            self.processes,
            self.next_values,
        )
        # Variables are objects of one process: messages name them by their order.
        handed_on = dict.fromkeys(v for g in self.graphs for v in (*g.outputs, *g.aux_outputs))
        self.numbers = {v: number for number, v in enumerate(handed_on)}
        self._begun = False
        # Before compiling, which takes longest: other programs are found out in a second.
        if self.connect:
            self.connect().agree(lambda: self._digests, "a step")
        self.stages = self._compiled(tasks, layers)
        kept: Mapping[int, int] = {s: stage.bytes for s, stage in self.stages.items()}
        if self.connect:
            kept = ChainMap(*self.connect().share(kept, "a step"))
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
        # [1] The step of the batch, and that of a micro-batch.
        whole = self.step = trace(step, arguments, arguments.samples)
        self.shard = cache(partial(self._shard, step, arguments, whole))  # of so many devices
        if m > 1:
            self.step = trace_piece(step, arguments, self.samples, whole)
        self.paths = dict(zip(self.step.arguments, arguments.paths, strict=True))
        self._state = [v for v in self.step.arguments if v not in self.step.batch]
        # [2] How the results of micro-batches come together.
        found = combinations(step, arguments, self.step, whole, method)
        self.combine, self.axes, self.exact = found
        self.axes |= dict.fromkeys(self.step.batch, 0)
        # [3] A loss that draws by that number has new variables, which lie as the old ones.
        self.loss, names = redraw(self.step.loss, whole.loss, draw_own)
        self.batch = [*self.step.batch, self.loss.inputs[-1]]
        for old, v in names.items():
            if old in self.axes and isinstance(v, Var):
                self.axes[v] = self.axes[old]

    def _divide(self, method: Pipeshard) -> tuple[list[list[int]], Any]:
        """The loss into layers and stages, and the devices into meshes.

        Returns the layers of each stage, and what a planner found, if one was asked.
        """
        parameters, batch = self.step.parameters, self.batch
        if callable(method.layers):
            self.loss = mark(self.loss, method.layers, list(parameters), batch)
        count = count_layers(self.loss)
        auto = None
        if isinstance(method.stages, Planner):
            problem = StageProblem(
                loss=self.loss,
                parameters=parameters,
                state=self._state,
                batch=batch,
                axes=self.axes,
                paths=self.paths,
                samples=self.samples,
                layers=count,
                method=method,
                shard=self.shard,
            )
            auto = method.stages.choose(problem)
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
        self.graphs = cut(self.loss, list(parameters), batch, layers)
        return layers, auto

    def _tasks(self) -> list[UpdateTask]:
        """The update as tasks of the stages; and their sharding constraints on their meshes.

        The first stage that reads a parameter owns it (the argument) and its gradient.
        """
        owner: dict[Var, int] = {}
        early = set()  # known to its owner as soon as that has ended its backwards
        for p, gradient in self.step.gradients.items():
            readers = self.readers[gradient]
            first = min(readers, default=0)
            owner.update({self.step.parameters[p]: first, gradient: first})
            if len(readers) == 1:  # else others have parts of it
                early.add(gradient)
        # All else that the loss makes is known when all stages have ended.
        late = {*self.step.gradient} - early
        tasks = split_update(self.step.update, owner, late)
        # What stages read that may not have ended yet, or is returned as it is, has to stay.
        stays = {v for graph in self.graphs for v in graph.fixed}
        stays.update(variables(self.step.update.outputs))
        donate(tasks, self.donated - stays, self.next_values)
        for s, graph in enumerate(self.graphs):
            mesh = self.meshes[self.schedule.placement[s]]
            parts: list[Any] = [graph, *(task for task in tasks if task.stage == s)]
            for part in parts:
                part.equations = on_mesh(part.equations, mesh)
        return tasks

    def _shard(
        self, step: Callable, arguments: Arguments, whole: TracedStep, devices: int
    ) -> Shard | str:
        """The loss of the samples of one of so many devices that share a micro-batch.

        Or why there is none; nothing where it would save nothing.
        """
        if min(devices, self.microbatches) == 1:
            return ""
        try:
            return shard_of(step, arguments, self.loss, whole.loss, self.samples, devices)
        except PipeshardError as error:
            return str(error)

    def _compiled(
        self, tasks: list[UpdateTask], layers: list[list[int]]
    ) -> dict[int, CompiledStage]:
        kinds = {action.kind for row in self.schedule.rows for action in row}
        others = {*self._state} - {*self.step.parameters.values()}
        return {
            s: CompiledStage(
                self.graphs,
                s,
                partial(self.place, row),
                kinds,
                tasks,
                others,
                layers=layers,
                shard=self.shard(self.meshes[row].shape["data"]),
            )
            for s, row in enumerate(self.schedule.placement)
            if row in self.rows
        }

    # ---- where things are

    def _place(self, row: int, v: Var) -> NamedSharding:
        """The sharding of a variable on a row's mesh.

        An argument, its gradient and its next value lie as the plan says; what has a dimension of
        samples is divided over the devices that are parallel over data, if it divides; anything
        else is whole on each of them.
        """
        mesh = self.meshes[row]
        like = self.like.get(v)
        if like is None:
            spec = over_samples(v, self.axes.get(v), mesh)
        else:
            spec = self._shardings[row](self.paths[like], shape_of(like))
        try:
            sharding = NamedSharding(mesh, spec)
            # The first looks at the dimensions, the second whether they divide.
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
        # The loss may stand before the state, or behind it.
        for i in range(len(results)):
            pairs = list(zip(self._state, results[i:], strict=False))
            if all(shape_of(a) == shape_of(b) for a, b in pairs):
                return {b: a for a, b in pairs if isinstance(b, Var)}
        return {}

    def agreed(self, arguments: Arguments) -> Hosts:
        """The processes, when all run this program, the first time on the same arguments."""
        assert self.connect
        processes = self.connect()
        # Looked at once: later calls mostly take what the one before has returned.
        known = {} if self._begun else of_trees(arguments.named)
        processes.agree(lambda: self._digests | known, "a step")
        self._begun = True
        return processes

    @cached_property
    def sequence(self) -> list[tuple[int, Action]]:
        """Rows and actions in an order in which one thread can do all: as a simulation does."""
        start = simulate(self.schedule).start
        pairs = [(row, action) for row, of in enumerate(self.schedule.rows) for action in of]
        return [pairs[i] for i in sorted(range(len(pairs)), key=start.__getitem__)]

    @cached_property
    def _digests(self) -> dict[str, str]:
        """Tell it from other programs; the same in all processes."""
        loss, update = ([*map(spec_of, of.inputs)] for of in (self.loss, self.step.update))
        count = len(self.step.parameters)
        places = [
            (self.paths[source], self.place(row, source).spec)
            for row, reads in enumerate(self.end.reads)
            for source in dict.fromkeys(reads.values())
            if source in self.paths
        ]
        plan = (
            self.schedule.to_csv(),
            [len(graph.equations) for graph in self.graphs],
            [(mesh.devices.shape, [d.id for d in mesh.devices.flat]) for mesh in self.meshes],
            [v in self.donated for v in self.step.arguments],
            self.combine,
            places,
        )
        return {
            "the plan (Pipeshard)": digest(plan),
            "the shape of the arguments": digest(*self.paths.values(), *loss, *update),
            "the loss": of_program(gradient_of(self.loss), loss[:count], loss[count:]),
            "the update": of_program(self.step.update.run, *update),
        }

    def _stage_plan(self, s: int, layers: list[int], kept: int) -> StagePlan:
        graph, row = self.graphs[s], self.schedule.placement[s]
        devices = self.meshes[row].devices
        paths = [self.paths[self.step.parameters[p]] for p in graph.parameters]
        stage = self.stages.get(s)
        unsplit = stage.unsplit if stage else ()
        sent = [*graph.outputs, *graph.aux_outputs] if s < len(self.graphs) - 1 else []
        return StagePlan(
            layers=tuple(layers),
            device=row,
            mesh=devices.shape,
            devices=tuple(devices.flat),
            parameters=dict(zip(paths, map(shape_of, graph.parameters), strict=True)),
            parameter_bytes=sum(map(bytes_of, graph.parameters)),
            activation_bytes=kept,
            sent_bytes=sum(map(bytes_of, sent)),
            unsplit={path: why for path, why in zip(paths, unsplit, strict=False) if why},
            all_reduced=stage.all_reduced if stage else "",
        )
