"""A train step for arguments of certain shapes: traced, divided, placed and compiled.

Each of the four has what the one before it has, and more. None of it changes.
"""

from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, cached_property, partial
from typing import Any

import jax
from jax.extend.core import Var
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipelab.jax.device import over_samples, sharding_on
from pipelab.jax.host import digest, of_program, of_trees
from pipelab.jax.jaxpr import Graph, spec_of, variables
from pipelab.pipeshard.arrays import PipeshardError, bytes_of, on_mesh, shape_of
from pipelab.pipeshard.batch.draws import draw_own, redraw
from pipelab.pipeshard.batch.microbatches import Combine, combinations, gradient_of
from pipelab.pipeshard.compiled import CompiledStage
from pipelab.pipeshard.cut import StageGraph, count_layers, cut, mark
from pipelab.pipeshard.end_of_step import EndOfStep
from pipelab.pipeshard.hosts import Hosts, processes_of
from pipelab.pipeshard.method import (
    FollowedStages,
    Pipeshard,
    Plan,
    Planner,
    Shape,
    StagePlan,
    StageProblem,
)
from pipelab.pipeshard.tracing import Arguments, TracedStep, trace, trace_piece
from pipelab.pipeshard.unreduced import Shard, shard_of
from pipelab.pipeshard.update import UpdateTask, donate, split_update
from pipelab.predict.simulate import simulate
from pipelab.show.bar import Bar
from pipelab.table.action import Action
from pipelab.table.schedule import Schedule


def program_of(
    train_step: Callable,
    method: Pipeshard,
    arguments: Arguments,
    donate_argnums: Sequence[int],
    connect: Callable[[], Hosts],
) -> "Program":
    """The train step, compiled for a plan and for arguments of these shapes.

    `connect` to the other processes, if the meshes are those of several.
    """
    with Bar("tracing", 1, shown=method.progress) as bar:
        bar.step(0)
        traced = trace_microbatch(train_step, method, arguments)
        bar.step()
        divided = divide(traced, method, bar)
        placed = place(divided, arguments, donate_argnums, connect)
        return compile_stages(placed, bar)


# ---- traced


@dataclass(frozen=True, kw_only=True, eq=False)
class Traced:
    """A train step as its equations, and what makes the batch's results of the micro-batches'.

    step     of one micro-batch, with the update of the whole batch
    loss     of one micro-batch, which draws its own random numbers where these grow with the batch
    batch    its inputs that are the batch, and the number of the micro-batch
    samples  of a micro-batch
    paths    of the arguments' leaves, for messages
    combine  how the micro-batches' results are combined
    axes     of variables, their dimension of samples
    exact    whether they add up to those of the batch; else (`reduce` was given for a loss that is
             neither mean nor sum) the pipeline computes what accumulation over them does
    of_one   (devices, loss) -> the loss of the samples of one of so many devices that share a
             micro-batch; or why there is none ("": it would save nothing)
    """

    step: TracedStep
    loss: Graph
    batch: list[Var]
    samples: int
    microbatches: int
    paths: dict[Var, str]
    combine: list[Combine]
    axes: dict[Var, Any]
    exact: bool
    of_one: Callable[[int, Graph], Shard | str]

    @property
    def state(self) -> list[Var]:
        """The arguments that are not the batch."""
        return [v for v in self.step.arguments if v not in self.step.batch]


def _fields(record: Traced) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def trace_microbatch(train_step: Callable, method: Pipeshard, arguments: Arguments) -> Traced:
    m = method.microbatches
    if arguments.samples % m:
        raise PipeshardError(
            f"a batch of {arguments.samples} samples does not divide into {m} micro-batches: make "
            "every batch a multiple of that, and drop or pad a shorter last one"
        )
    samples = arguments.samples // m
    # [1] The step of the batch, and that of a micro-batch.
    step = whole = trace(train_step, arguments, arguments.samples)
    if m > 1:
        step = trace_piece(train_step, arguments, samples, whole)
    # [2] How the results of micro-batches come together.
    combine, axes, exact = combinations(train_step, arguments, step, whole, method)
    axes |= dict.fromkeys(step.batch, 0)
    # [3] A loss that draws by the micro-batch's number has new variables, which lie as the old.
    loss, names = redraw(step.loss, whole.loss, draw_own)
    for old, v in names.items():
        if old in axes and isinstance(v, Var):
            axes[v] = axes[old]

    def of_one(devices: int, loss: Graph) -> Shard | str:
        if min(devices, m) == 1 or not step.trains:
            return ""
        try:
            return shard_of(train_step, arguments, loss, whole.loss, samples, devices)
        except PipeshardError as error:
            return str(error)

    return Traced(
        step=step,
        loss=loss,
        batch=[*step.batch, loss.inputs[-1]],
        samples=samples,
        microbatches=m,
        paths=dict(zip(step.arguments, arguments.paths, strict=True)),
        combine=combine,
        axes=axes,
        exact=exact,
        of_one=of_one,
    )


# ---- divided


@dataclass(frozen=True, kw_only=True, eq=False)
class Divided(Traced):
    """The loss in stages, and the devices in meshes, a row's each.

    layers     of each stage
    graphs     per stage its equations
    shard      `of_one` of the loss with its layers marked, by the number of devices
    shardings  per row, (path, shape) of an argument -> how its mesh has it
    auto       what a planner found, if one was asked
    """

    layers: list[list[int]]
    shard: Callable[[int], Shard | str]
    graphs: list[StageGraph]
    schedule: Schedule
    meshes: Sequence[Mesh]
    shardings: Sequence[Callable]
    auto: Any


def divide(traced: Traced, method: Pipeshard, bar: Bar) -> Divided:
    parameters, loss = traced.step.parameters, traced.loss
    find, count = method.layers, 0
    if isinstance(method.stages, FollowedStages):
        count = len(method.stages.layers)
        named = {v: parameters.get(v, v) for v in (*parameters, *traced.state)}
        find = partial(method.stages.starts, {v: traced.paths[a] for v, a in named.items()})
    if callable(find):
        bar.phase("layers")
        loss = mark(loss, find, list(parameters), traced.batch)
        bar.step()
    shard = cache(lambda devices: traced.of_one(devices, loss))
    count, auto = count or count_layers(loss), None
    if isinstance(method.stages, Planner):
        problem = StageProblem(
            loss=loss,
            parameters=parameters,
            state=traced.state,
            batch=traced.batch,
            axes=traced.axes,
            paths=traced.paths,
            samples=traced.samples,
            layers=count,
            trains=traced.step.trains,
            method=method,
            bar=bar,
            shard=shard,
        )
        auto = method.stages.choose(problem)
        method = replace(method, stages=auto)
    layers = method.stages_of(count)
    trains = traced.step.trains
    schedule = method.table_for(len(layers), trains)
    meshes = method.meshes_of(schedule.devices)
    for mesh in meshes:
        if traced.samples % mesh.shape["data"]:
            raise PipeshardError(
                f"a micro-batch of {traced.samples} samples does not divide over "
                f"{mesh.shape['data']} devices: change the batch or microbatches, or give that "
                "mesh another shape (data, model)"
            )
    graphs = cut(loss, list(parameters), traced.batch, layers, trains)
    return Divided(
        **_fields(traced) | {"loss": loss},
        layers=layers,
        shard=shard,
        graphs=graphs if trains else [graph.forward_only for graph in graphs],
        schedule=schedule,
        meshes=meshes,
        shardings=method.shardings_of(schedule.devices),
        auto=auto,
    )


def followed(program: "Program") -> FollowedStages:
    """The stages of a program, for another step with the same state."""
    homes: dict[str, tuple[Shape, int]] = {}
    for s, graph in enumerate(program.graphs):
        for v in graph.steady:
            if path := program.paths.get(program.step.parameters.get(v, v)):
                homes.setdefault(path, (shape_of(v), s))
    rows = [mesh.devices for mesh in program.meshes]
    bare = FollowedStages([[s] for s in range(len(program.graphs))], rows, homes=homes)

    def sharding(row: int, path: str, shape: Shape) -> PartitionSpec:
        return program.shardings[row](bare.path_of(path, shape), shape)

    return replace(bare, sharding=[partial(sharding, row) for row in range(len(rows))])


# ---- placed


@dataclass(frozen=True, kw_only=True, eq=False)
class Placed(Divided):
    """The update in parts of the stages, and every array with its devices.

    like         variable -> the argument whose sharding it has
    next_values  result -> the argument that it is the next value of
    readers      gradient of a parameter -> the stages that read the parameter
    donated      arguments whose arrays are given up
    tasks        parts of the update
    numbers      of the variables that stages hand on, the same in all processes
    processes    of all rows
    connect      to the other processes; None if all rows are this one's
    place        (row, variable) -> the variable's sharding on the row's mesh
    end          the end of a step
    """

    like: dict[Var, Var]
    next_values: dict[Var, Var]
    readers: dict[Var, list[int]]
    donated: set[Var]
    tasks: list[UpdateTask]
    numbers: dict[Var, int]
    processes: list[int]
    connect: Callable[[], Hosts] | None
    place: Callable[[int, Var], NamedSharding]
    end: EndOfStep

    @property
    def rows(self) -> list[int]:
        """This process's."""
        return [row for row, q in enumerate(self.processes) if q == jax.process_index()]

    @cached_property
    def digests(self) -> dict[str, str]:
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
            "the loss": of_program(
                gradient_of(self.loss, trains=self.step.trains), loss[:count], loss[count:]
            ),
            "the update": of_program(self.step.update.run, *update),
        }


def place(
    divided: Divided,
    arguments: Arguments,
    donate_argnums: Sequence[int],
    connect: Callable[[], Hosts],
) -> Placed:
    step, graphs = divided.step, divided.graphs
    # [1] What becomes the argument, or is added to it, lies as it does: no call moves the state.
    next_values = _next_values(divided)
    like: dict[Var, Var] = {
        **next_values,
        **{v: v for v in divided.state},
        **step.parameters,
        **{gradient: step.parameters[p] for p, gradient in step.gradients.items()},
    }
    # [2] The update's parts.
    trees = jax.tree.unflatten(arguments.tree, step.arguments)
    donated = {*step.donated, *jax.tree.leaves([trees[i] for i in donate_argnums])}
    readers = {
        gradient: [s for s, graph in enumerate(graphs) if p in graph.parameters]
        for p, gradient in step.gradients.items()
    }
    tasks = _tasks(divided, readers, donated, next_values)
    # [3] What rows send each other. Variables are objects of one process: messages name them by
    #     their order.
    handed_on = dict.fromkeys(v for g in graphs for v in (*g.outputs, *g.aux_outputs))
    processes = processes_of(divided.meshes)
    alone = {*processes} == {jax.process_index()}
    end = EndOfStep(
        step,
        combine=divided.combine,
        graphs=graphs,
        makers=readers,
        tasks=tasks,
        placement=divided.schedule.placement,
        processes=processes,
        next_values=next_values,
    )
    return Placed(
        **_fields(divided),
        like=like,
        next_values=next_values,
        readers=readers,
        donated=donated,
        tasks=tasks,
        numbers={v: number for number, v in enumerate(handed_on)},
        processes=processes,
        connect=None if alone else connect,
        place=cache(partial(_sharding, divided, like)),  # every action asks
        end=end,
    )


def _next_values(traced: Traced) -> dict[Var, Var]:
    """Result -> the argument that it is the next value of.

    That is known if the step returns its state in one piece, in the order in which it takes it.
    """
    results = traced.step.update.outputs if traced.step.trains else []
    # The loss may stand before the state, or behind it.
    for i in range(len(results)):
        pairs = list(zip(traced.state, results[i:], strict=False))
        if all(shape_of(a) == shape_of(b) for a, b in pairs):
            return {b: a for a, b in pairs if isinstance(b, Var)}
    return {}


def _tasks(
    divided: Divided,
    readers: Mapping[Var, list[int]],
    donated: set[Var],
    next_values: dict[Var, Var],
) -> list[UpdateTask]:
    """The update as tasks of the stages; and their sharding constraints on their meshes.

    The first stage that reads a parameter owns it (the argument) and its gradient.
    """
    step = divided.step
    owner: dict[Var, int] = {}
    early = set()  # known to its owner as soon as that has ended its backwards
    for p, gradient in step.gradients.items():
        first = min(readers[gradient], default=0)
        owner.update({step.parameters[p]: first, gradient: first})
        if len(readers[gradient]) == 1:  # else others have parts of it
            early.add(gradient)
    # All else that the loss makes is known when all stages have ended.
    late = {*step.gradient} - early
    tasks = split_update(step.update, owner, late)
    # What stages read that may not have ended yet, or is returned as it is, has to stay.
    stays = {v for graph in divided.graphs for v in graph.fixed}
    stays.update(variables(step.update.outputs))
    donate(tasks, donated - stays, next_values)
    for s, graph in enumerate(divided.graphs):
        mesh = divided.meshes[divided.schedule.placement[s]]
        parts: list[Any] = [graph, *(task for task in tasks if task.stage == s)]
        for part in parts:
            part.equations = on_mesh(part.equations, mesh)
    return tasks


def _sharding(divided: Divided, like: Mapping[Var, Var], row: int, v: Var) -> NamedSharding:
    """The sharding of a variable on a row's mesh.

    An argument, its gradient and its next value lie as the plan says; what has a dimension of
    samples is divided over the devices that are parallel over data, if it divides; anything else is
    whole on each of them.
    """
    mesh, argument = divided.meshes[row], like.get(v)
    if argument is None:
        spec = over_samples(shape_of(v), divided.axes.get(v), mesh)
    else:
        spec = divided.shardings[row](divided.paths[argument], shape_of(argument))
    name = divided.paths.get(argument or v, "an array")
    return sharding_on(mesh, spec, shape_of(v), name, PipeshardError)


# ---- compiled


@dataclass(frozen=True, kw_only=True, eq=False)
class Program(Placed):
    """What a call runs.

    stages  of this process's rows, by number
    plan    what each stage holds
    """

    stages: Mapping[int, CompiledStage]
    plan: Plan

    @cached_property
    def sequence(self) -> list[tuple[int, Action]]:
        """Rows and actions in an order in which one thread can do all: as a simulation does."""
        start = simulate(self.schedule).start
        pairs = [(row, action) for row, of in enumerate(self.schedule.rows) for action in of]
        return [pairs[i] for i in sorted(range(len(pairs)), key=start.__getitem__)]

    def agreed(self, arguments: Arguments) -> Hosts:
        """The processes, when all run this program, the first time on the same arguments."""
        assert self.connect
        processes = self.connect()
        # Looked at once: later calls mostly take what the one before has returned.
        known = {} if self in processes.agreed else of_trees(arguments.named)
        processes.agree(lambda: self.digests | known, "a step")
        processes.agreed.add(self)
        return processes


def compile_stages(placed: Placed, bar: Bar) -> Program:
    # [1] Before compiling, which takes longest: other programs are found out in a second.
    if placed.connect:
        placed.connect().agree(lambda: placed.digests, "a step")
    # [2] The stages of this process.
    kinds = {action.kind for row in placed.schedule.rows for action in row}
    others = {*placed.state} - {*placed.step.parameters.values()}
    mine = [(s, row) for s, row in enumerate(placed.schedule.placement) if row in placed.rows]
    bar.phase("compiling", len(mine))
    stages = {}
    for s, row in mine:
        stages[s] = CompiledStage(
            placed.graphs,
            s,
            partial(placed.place, row),
            kinds,
            placed.tasks,
            others,
            layers=placed.layers,
            shard=placed.shard(placed.meshes[row].shape["data"]),
        )
        bar.step()
    # [3] What all stages hold.
    kept: Mapping[int, int] = {s: stage.bytes for s, stage in stages.items()}
    if placed.connect:
        kept = ChainMap(*placed.connect().share(kept, "a step"))
    plans = tuple(_stage_plan(placed, s, stages.get(s), kept[s]) for s in range(len(placed.graphs)))
    plan = Plan(placed.schedule, plans, placed.auto)
    return Program(**_fields(placed), stages=stages, plan=plan)


def _stage_plan(placed: Placed, s: int, stage: CompiledStage | None, kept: int) -> StagePlan:
    graph, row = placed.graphs[s], placed.schedule.placement[s]
    devices = placed.meshes[row].devices
    arguments = {p: placed.step.parameters.get(p, p) for p in graph.steady}
    every = graph.parameters if placed.step.trains else graph.fixed
    held = [p for p in every if arguments[p] in placed.paths]  # others are constants
    paths = [placed.paths[arguments[p]] for p in held]
    unsplit = stage.unsplit if stage else ()
    sent = [*graph.outputs, *graph.aux_outputs] if s < len(placed.graphs) - 1 else []
    return StagePlan(
        layers=tuple(placed.layers[s]),
        device=row,
        mesh=devices.shape,
        devices=tuple(devices.flat),
        parameters=dict(zip(paths, map(shape_of, held), strict=True)),
        parameter_bytes=sum(map(bytes_of, held)),
        activation_bytes=kept,
        sent_bytes=sum(map(bytes_of, sent)),
        # Of other processes' stages nothing is known.
        unsplit={path: why for path, why in zip(paths, unsplit, strict=False) if why},
        all_reduced=stage.all_reduced if stage else "",
    )
