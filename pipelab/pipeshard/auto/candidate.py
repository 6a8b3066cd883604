"""A possible stage: some layers in a row, how a mesh divides it, and what it costs.

Running the search of `sharding` for every possible stage would take many times as long as all
profiles. So it runs only for single layers and along "model", and only once for equal layers. A
stage of several layers divides each parameter as that parameter's layer does.

On accelerators the times are measured. Host devices of a CPU share its cores, so measured times
would say nothing about a machine with as many devices. There, the cost model gives the times.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import chain, pairwise
from statistics import median
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from jax.extend.core import Var
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipelab.jax.device import AXES, bytes_on_mesh, over_samples
from pipelab.jax.host import digest
from pipelab.jax.jaxpr import Arrays, Variables, contains, spec_of, variables
from pipelab.jax.passes import Groups, Passes, differentiate, passes, sum_spec
from pipelab.optimize.plan.machine import Machine
from pipelab.pipeshard.arrays import CONSTRAINT, PipeshardError, on_mesh, shape_of
from pipelab.pipeshard.auto.cost_model import Cost
from pipelab.pipeshard.auto.flops import repeats
from pipelab.pipeshard.auto.sharded import built, in_turn, ones
from pipelab.pipeshard.auto.sharding import Choices, over_model, search_sharding, unsharded
from pipelab.pipeshard.compiled import CompiledStage
from pipelab.pipeshard.cut import StageGraph, cut
from pipelab.pipeshard.method import Shape, StageProblem
from pipelab.table.action import Kind

Cache = MutableMapping[str, Any]
Specs = Mapping[Var, PartitionSpec]  # parameter -> how it is divided; whole where it is not named
ROUNDS = 5  # of measured times
REDUCTION = 2  # its place among the costs of a stage
EXHAUSTIVE = 30  # assignments of a layer; beyond that, one parameter after another


class StageCandidate:
    """Some layers in a row, as a stage of the problem.

    stages  the layers before it, its own, and those after it, as up to three stages
    s       the number of its own stage among these
    """

    def __init__(
        self,
        problem: StageProblem,
        first: int,
        last: int,
        parts: Sequence["StageCandidate"] = (),
    ) -> None:
        """`parts`: its layers as candidates, if each of them can be a stage."""
        self.problem, self.layers, self._parts = problem, (first, last), parts
        stages = [range(first), range(first, last + 1), range(last + 1, problem.layers)]
        self.stages = [list(part) for part in stages if part]
        self.s = 1 if first else 0

    @cached_property
    def graphs(self) -> list[StageGraph]:
        """The loss in these stages. PipeshardError where one of them has nothing to do."""
        problem = self.problem
        parameters = list(problem.parameters)
        return cut(problem.loss, parameters, problem.batch, self.stages, problem.trains)

    @property
    def graph(self) -> StageGraph:
        return self.graphs[self.s]

    @cached_property
    def reads(self) -> tuple[Variables, Variables, Variables]:
        """Its parameters, what else is the same for all micro-batches, and its data."""
        # Cutting the loss would take much longer, and most runs of many layers are never compiled.
        if not self._parts:
            return self.graph.parameters, self.graph.fixed, self.graph.data
        several = zip(*(part.reads for part in self._parts), strict=True)
        parameters, fixed, data = (list(dict.fromkeys(chain(*of))) for of in several)
        return parameters, fixed, data

    @cached_property
    def passes(self) -> Passes:
        graph = self.graph if self.problem.trains else self.graph.forward_only
        return passes(graph.run, Groups(*(list(map(spec_of, vs)) for vs in graph.groups)))

    @cached_property
    def text(self) -> str:
        """Its equations, with variables named in their order: equal blocks have equal texts."""
        graph = self.graph
        # A custom derivative shows only in the backward, a result beside the loss only in the
        # forward.
        shapes = map(spec_of, (*graph.arguments, *graph.outputs))
        passes = jax.make_jaxpr(partial(both_passes, graph, self.problem.trains))(*shapes)
        return re.sub(r" at 0x[0-9a-f]+", "", f"{graph.whole.jaxpr} {passes}")  # of functions


@dataclass
class Placed:
    """A candidate on a mesh (data, model).

    specs  of the parameters that are divided
    """

    candidate: StageCandidate
    mesh: Mesh
    specs: Specs

    @property
    def graph(self) -> StageGraph:
        """With the user's sharding constraints on this mesh."""
        graph = self.candidate.graph
        return replace(graph, equations=on_mesh(graph.equations, self.mesh))

    def spec(self, v: Var) -> jax.ShapeDtypeStruct:
        return spec_of(v, self.place(v))

    def place(self, v: Var) -> NamedSharding:
        """The sharding of a variable, as the program will have it."""
        axis = self.candidate.problem.axes.get(v)
        spec = self.specs[v] if v in self.specs else over_samples(shape_of(v), axis, self.mesh)
        return NamedSharding(self.mesh, spec)

    def compile(self, runs: bool) -> CompiledStage:
        """Compile it to run, or only to see its cost."""
        # The other stages tell what this one sends and receives; they are not compiled.
        each = self.candidate
        graphs = list(each.graphs)
        graphs[each.s] = self.graph
        kinds: tuple[Kind, ...] = (Kind.B,) if each.problem.trains else (Kind.F,)
        if not each.problem.trains:
            graphs = [graph.forward_only for graph in graphs]
        # Only the user's sharding constraints make the passes differ between meshes.
        constrained = any(contains(eqn, [CONSTRAINT]) for eqn in each.graph.equations)
        shard = each.problem.shard(self.mesh.shape["data"])
        build = partial(
            CompiledStage,
            graphs,
            each.s,
            self.place,
            kinds,
            layers=each.stages,
            shard=shard,
            traced=None if constrained else each.passes,
        )
        return built(lambda options: build(options=options), self.mesh, scored=not runs)

    def key(self, measured: bool) -> tuple[Any, ...]:
        """All that a profile depends on."""
        graph = self.candidate.graph
        device = self.mesh.devices.flat[0]
        kinds = (*graph.groups, graph.data, graph.outputs, graph.aux_outputs, graph.results)
        return (
            self.candidate.text,
            [len(kind) for kind in kinds],
            [str(self.place(v).spec) for v in graph.arguments],
            self.mesh.devices.shape,
            bool(self.candidate.problem.shard(self.mesh.shape["data"])),
            (device.platform, device.device_kind, jax.__version__),
            measured,
        )


def remembered(memory: Cache, key: Any, find: Callable[[], Any]) -> Any:
    """The value of a cache under a key; if there is none, what `find` returns, which it then keeps.

    A file may be damaged, or written by two processes at once, so the key is kept beside the value.
    """
    name = digest(key)
    try:
        known, value = memory[name]
    except Exception:
        known, value = None, None
    if known != name:
        value = find()
        memory[name] = name, value
    return value


def both_passes(graph: StageGraph, trains: bool, *arrays: Any) -> tuple[Arrays, Arrays, Arrays]:
    """A stage's outputs, and, if it trains, the gradients of its parameters and of its inputs.

    arrays  its arguments, then the gradients of its outputs
    """
    end = len(graph.arguments)  # then come the outputs' gradients
    given = iter(arrays[:end])
    groups = Groups(*([next(given) for _ in vs] for vs in graph.groups))
    if not trains:
        outputs, others = graph.run(*groups)
        return [*outputs, *others], [], []
    (outputs, _), pullback = differentiate(graph.run, groups)
    return outputs, *pullback(list(arrays[end:]))


def candidates(problem: StageProblem) -> Iterator[StageCandidate]:
    """Every run of layers that can be a stage."""
    single: list[StageCandidate | None] = []
    for k in range(problem.layers):
        layer = StageCandidate(problem, k, k)
        single.append(layer if _has_work(layer) else None)
    for first in range(problem.layers):
        for last in range(first, problem.layers):
            parts = [each for each in single[first : last + 1] if each]
            if len(parts) == last - first + 1:  # a run has work if all its layers have
                yield StageCandidate(problem, first, last, parts) if last > first else parts[0]
            elif last > first and _has_work(run := StageCandidate(problem, first, last)):
                yield run


def _has_work(run: StageCandidate) -> bool:
    """Whether a run, what is before it and what is after it have something to do."""
    try:
        return bool(run.graphs)
    except PipeshardError:
        return False


def operator_specs(
    layer: StageCandidate, mesh: Mesh, machine: Machine, memory: Cache, known: Specs
) -> Specs:
    """The best division found of a layer's parameters over a mesh (1, model).

    known  the divisions of some of them, from equal parts of other layers
    """
    here, graph, trains = Placed(layer, mesh, {}), layer.graph, layer.problem.trains
    parameters, whole_spec = graph.parameters, PartitionSpec()
    # Nothing to search where no parameter can be divided.
    if all(len(over_model(shape_of(p), mesh)) == 1 for p in parameters):
        return {}

    def choices(p: Var) -> Choices:
        return (lambda shape, mesh: [known[p]]) if p in known else over_model

    def search() -> tuple[PartitionSpec, ...]:
        arguments = [*graph.arguments, *graph.outputs]
        others = len(arguments) - len(parameters)
        found = search_sharding(
            partial(both_passes, here.graph, trains),
            list(map(spec_of, arguments)),
            mesh,
            machine,
            choices=[*map(choices, parameters), *[unsharded] * others],
            # What crosses to other stages is whole; a gradient is divided as its parameter.
            outputs=lambda *specs: (
                [whole_spec] * len(graph.outputs if trains else graph.made),
                list(specs[: len(parameters)]) if trains else [],
                [whole_spec] * len(graph.inputs if trains else ()),
            ),
            tied=[*siblings(graph), *range(others)],
            limit=EXHAUSTIVE,
            progress=False,  # the planner has a bar of its own
        )
        # The table's first may be too large: the planner decides which stages fit.
        return found.table[0].specs[: len(parameters)]

    # Which division is the best depends on the machine as well: its links against its FLOPs.
    costs = machine.flops, machine.share, machine.latency, machine.memory, machine.link(mesh.size)
    fixed = [str(known.get(p)) for p in parameters]
    found = remembered(memory, (here.key(measured=False), costs, fixed), search)
    return dict(zip(parameters, found, strict=True))


def siblings(graph: StageGraph) -> list[Any]:
    """Per parameter a key, equal for those with the same operations and the same other operands.

    Examples are the projections to queries, keys and values, and parameters that are all added.
    """
    uses: dict[Var, list[Any]] = {p: [p.aval] for p in graph.parameters}
    for eqn in graph.equations:
        for p in uses.keys() & {*variables(eqn.invars)}:
            others = [v for v in variables(eqn.invars) if v is not p]
            uses[p].append((eqn.primitive.name, others))
    return [str(use) for use in uses.values()]


def roles(layer: StageCandidate) -> dict[Any, Var]:
    """A layer's parameters by their uses: equal parts of layers have equal roles."""
    graph, uses = layer.graph, dict[Var, list[Any]]()
    for eqn in graph.equations:
        for i, v in enumerate(eqn.invars):
            if isinstance(v, Var):
                made = tuple(str(out.aval) for out in eqn.outvars)
                uses.setdefault(v, []).append((eqn.primitive.name, i, made))
    found: dict[Any, Var] = {}
    for p in graph.parameters:
        role = str(p.aval), *uses.get(p, ())
        found[role, sum(other == role for other, _ in found)] = p  # the first, the second of these
    return found


# ---- what it costs


@dataclass(frozen=True)
class StageProfile:
    """One line of the profile table: a possible stage. Bytes are those of one device.

    layers            first and last
    submesh           hosts, and devices of each
    logical           the same devices as a mesh (data, model)
    sharding          path -> PartitionSpec, of the parameters that are divided
    source            where the seconds come from
    forward           seconds of a micro-batch; `backward` likewise
    reduction         seconds, once a batch: the gradients' sum over the devices along "data"
    microbatches      of a batch
    parameter_bytes
    held_bytes        with any schedule: parameters, their gradients, the optimizer's state, the
                      batch, and a pass's temporary memory
    activation_bytes  kept for the backward, for each micro-batch in flight
    available_bytes   for activations: the device's memory less `held_bytes`
    """

    layers: tuple[int, int]
    submesh: Shape
    logical: Shape
    sharding: dict[str, PartitionSpec]
    source: Literal["model", "measured"]
    forward: float
    backward: float
    reduction: float
    microbatches: int
    parameter_bytes: int
    held_bytes: int
    activation_bytes: int
    available_bytes: float

    @property
    def seconds(self) -> float:
        """The seconds of a micro-batch: forward, backward, and its share of the reduction."""
        return self.forward + self.backward + self.reduction / self.microbatches


class Findings(NamedTuple):
    """What compiling a stage shows, on one device.

    costs        of the forward, the backward and the reduction, as far as the stage has them
    activations  bytes that a forward leaves for its backward
    seconds      of each, if measured
    """

    costs: list[Cost]
    activations: int
    seconds: list[float]


class Runs:
    """All runs of layers on one mesh, and what compiling them shows.

    Where equal layers follow each other, modelled costs are summed over all pairs of neighbours,
    less the layers that two pairs share. So planning 24 equal blocks takes no longer than four:

        a b b c    |  a b  +  b b  +  b c  -  b  -  b
    """

    def __init__(
        self, stages: Mapping[tuple[int, int], Placed], measured: bool, memory: Cache
    ) -> None:
        """No stage is compiled yet.

        stages    by their first and last layer
        measured  whether seconds are measured, on the mesh's devices
        memory    what compiling has shown before
        """
        self.stages, self.measured, self.memory = stages, measured, memory
        self.find, self._key = cache(self._find), cache(self._key_of)
        self._held = cache(self._bytes_of)

    def _key_of(self, layer: int) -> Any:
        return self.stages[layer, layer].key(measured=False)

    def _find(self, first: int, last: int) -> Findings:
        """What is known of a run, or found by compiling it."""
        neighbours = [*pairwise(range(first, last + 1))]
        parts = {(k, k) for k in range(first, last + 1)} | {*neighbours}
        if (
            self.measured
            or len(neighbours) < 2
            or not parts <= self.stages.keys()
            or all(self._key(a) != self._key(b) for a, b in neighbours)
        ):
            stage = self.stages[first, last]
            key = stage.key(self.measured)
            return remembered(self.memory, key, lambda: _examine(stage, self.measured))
        inner = [(a, a) for a, _ in neighbours[1:]]
        summed = sum(self._held(*run) for run in neighbours)
        summed -= sum(self._held(*run) for run in inner)
        once = self._held(first, last) / summed if summed else 1.0
        pairs = [self.find(*run) for run in neighbours]
        return _joined(pairs, [self.find(*run) for run in inner], once)

    def _bytes_of(self, first: int, last: int) -> int:
        """Bytes of a run's parameters."""
        stage = self.stages[first, last]
        return sum(bytes_on_mesh(stage.spec(p)) for p in stage.candidate.reads[0])


def _joined(pairs: list[Findings], inner: list[Findings], once: float) -> Findings:
    """The findings of a run of layers.

    pairs  of each layer and the next
    inner  of each layer but the first and the last
    once   the bytes of the run's parameters over those summed from the pairs: layers that are not
           neighbours may share parameters, whose gradients are reduced only once
    """
    activations = sum(each.activations for each in pairs)
    activations -= sum(each.activations for each in inner)
    costs = []
    longest = max(pairs, key=lambda each: len(each.costs))
    for i, cost in enumerate(longest.costs):
        several = [each.costs[i] for each in pairs if i < len(each.costs)]
        twice = [each.costs[i] for each in inner if i < len(each.costs)]
        sums: dict[str, Any] = {}
        for name in ("flops", "ring_bytes", "collectives"):
            sums[name] = sum(getattr(each, name) for each in several)
            sums[name] -= sum(getattr(each, name) for each in twice)
        if i == REDUCTION:
            sums |= {name: sums[name] * once for name in ("flops", "ring_bytes")}
        # Beside its arguments, a pass needs memory for one layer at a time; only what a forward
        # leaves is held for all layers.
        beside = [each.peak_bytes - each.argument_bytes for each in several]
        if i == 0:
            left = [each.activations for each in pairs]
            beside = [b - a + activations for b, a in zip(beside, left, strict=True)]
        peak = max(beside)
        costs.append(replace(cost, argument_bytes=0, output_bytes=0, peak_bytes=peak, **sums))
    return Findings(costs, activations, [])


def profile_stage(
    stage: Placed, found: Findings, submesh: Shape, state: Counter[Var], machine: Machine
) -> StageProfile:
    """The profile of a stage.

    found  by compiling it
    state  parameter -> how many of the optimizer's arrays belong to it, and are divided as it is
    """
    # [1] How long it takes.
    costs, activations, seconds = found
    (weights, fixed, data), problem = stage.candidate.reads, stage.candidate.problem
    times = seconds or [cost.seconds(machine) for cost in costs]
    forward, backward, *reduction = times if problem.trains else [*times, 0.0]

    # [2] What is held all the time: weights with their gradients, the optimizer's state, the batch.
    def share(v: Var) -> int:
        return bytes_on_mesh(stage.spec(v)) // stage.mesh.size

    parameters = held = sum(map(share, weights))
    if problem.trains:
        held += sum(bytes_on_mesh(sum_spec(stage.spec(p))) // stage.mesh.size for p in weights)
        held += sum(share(p) * state[p] for p in weights)
    held += sum(map(share, fixed)) + problem.method.microbatches * sum(map(share, data))
    # A pass also needs its outputs and temporary arrays. The activations among the forward's
    # outputs are counted apart, for each micro-batch in flight.
    beside = [cost.peak_bytes - cost.argument_bytes for cost in costs[:2]]
    held += max(0, beside[0] - activations, *beside[1:])
    return StageProfile(
        layers=stage.candidate.layers,
        submesh=submesh,
        logical=stage.mesh.devices.shape,
        sharding={problem.paths[problem.parameters[p]]: spec for p, spec in stage.specs.items()},
        source="measured" if seconds else "model",
        forward=forward,
        backward=backward,
        reduction=sum(reduction),
        microbatches=problem.method.microbatches,
        parameter_bytes=parameters,
        held_bytes=held,
        activation_bytes=activations,
        available_bytes=machine.memory - held,
    )


def _examine(stage: Placed, measured: bool) -> Findings:
    compiled = stage.compile(measured)
    times = repeats(stage.candidate.graph.equations)
    # The backward adds to the gradients' sums.
    run = [compiled.forward, *([compiled.backward] if compiled.trains else [])]
    costs = [Cost.of(each, times) for each in run]
    costs += [Cost.of(compiled.total)] if compiled.total else []
    seconds = _measure(stage, compiled) if measured else []
    return Findings(costs, compiled.bytes // stage.mesh.size, seconds)


def _measure(stage: Placed, compiled: CompiledStage) -> list[float]:
    """Median seconds of a forward, a backward and the reduction, if any, on arrays of ones."""
    graph = stage.candidate.graph
    arguments = ones(list(map(stage.spec, graph.arguments)))
    forward = partial(compiled.forward, *arguments)
    if not compiled.trains:
        return [median(seconds) for seconds in in_turn([forward], ROUNDS)]
    cotangents = ones(list(map(stage.spec, graph.outputs)))
    # What the backward needs: some of the arguments, and some of what the forward made.
    made = [*arguments, *forward()]
    operands = [*cotangents, *(made[i] for i in compiled.kept)]
    sums = compiled.zeros()

    def backward() -> Any:
        nonlocal sums  # the new ones take their place
        sums, *others = compiled.backward(sums, operands)
        return sums, others

    programs: list[Callable[[], Any]] = [forward, backward]
    if total := compiled.total:
        # It donates the sums, so each turn makes new ones, which its time includes.
        programs.append(lambda: total(compiled.zeros()))
    return [median(seconds) for seconds in in_turn(programs, ROUNDS)]


def mesh_of(devices: list[Any], logical: Shape) -> Mesh:
    return Mesh(np.array(devices[: math.prod(logical)]).reshape(logical), AXES)
