"""A possible stage: some layers in a row, how a mesh divides it, and what its costs depend on.

The search of `sharding` for every possible stage would take many times as long as all profiles. So
it is done for single layers, on devices along "model" alone, and once for equal layers; a stage of
several layers divides each parameter as its layer does.
"""

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
from jax.extend.core import Var
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipelab.optimize.plan.machine import Machine
from pipelab.pipeshard.arrays import PipeshardError, on_mesh, shape_of
from pipelab.pipeshard.auto.sharded import built
from pipelab.pipeshard.auto.sharding import over_model, search_sharding, unsharded
from pipelab.pipeshard.compiled import CompiledStage
from pipelab.pipeshard.cut import StageGraph, cut
from pipelab.pipeshard.method import StageProblem, over_samples
from pipelab.runtime.jax.host import digest
from pipelab.runtime.jax.jaxpr import Arrays, spec_of
from pipelab.runtime.jax.passes import Groups, differentiate

Cache = MutableMapping[str, Any]
Specs = Mapping[Var, PartitionSpec]  # parameter -> how it is divided; whole where it is not named
EXHAUSTIVE = 30  # assignments of a layer; beyond, one parameter after another


class StageCandidate:
    """Some layers in a row, as a stage of the problem.

    graphs, s  the stages, of which it is the s-th: what is before it and what is after it
    """

    def __init__(self, problem: StageProblem, first: int, last: int) -> None:
        self.problem, self.layers = problem, (first, last)
        # The loss in up to three stages: what is before, these layers, what is after.
        parts = [range(first), range(first, last + 1), range(last + 1, problem.layers)]
        self.stages = [list(part) for part in parts if part]
        parameters = list(problem.parameters)
        self.graphs = cut(problem.loss, parameters, problem.batch, self.stages)
        self.s = 1 if first else 0

    @property
    def graph(self) -> StageGraph:
        return self.graphs[self.s]

    @cached_property
    def text(self) -> str:
        """Its equations, with variables named in their order: equal blocks have equal texts."""
        graph = self.graph
        # A derivative of the user's own is in the backward alone, and another one's result beside
        # the loss in the forward alone.
        shapes = map(spec_of, (*graph.arguments, *graph.outputs))
        passes = jax.make_jaxpr(partial(both_passes, graph))(*shapes)
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
        spec = self.specs[v] if v in self.specs else over_samples(v, axis, self.mesh)
        return NamedSharding(self.mesh, spec)

    def compile(self, runs: bool) -> CompiledStage:
        """To run, or only to look at what it costs."""
        # The others say what the stage has to send and to receive; they are not compiled.
        each = self.candidate
        graphs = list(each.graphs)
        graphs[each.s] = self.graph
        shard = each.problem.shard(self.mesh.shape["data"])
        build = partial(CompiledStage, graphs, each.s, self.place, layers=each.stages, shard=shard)
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


def remembered(cache: Cache, key: Any, find: Callable[[], Any]) -> Any:
    """The value of the cache under a key; else what `find` returns, which it keeps from now on."""
    name = digest(key)
    if name not in cache:
        cache[name] = find()
    return cache[name]


def both_passes(graph: StageGraph, *arrays: Any) -> tuple[Arrays, Arrays, Arrays]:
    """A stage's outputs, and the gradients of its parameters and of its inputs.

    arrays  its arguments, then the gradients of its outputs
    """
    end = len(graph.arguments)  # then come the outputs' gradients
    given = iter(arrays[:end])
    groups = Groups(*([next(given) for _ in vs] for vs in graph.groups))
    (outputs, _), pullback = differentiate(graph.run, groups)
    return outputs, *pullback(list(arrays[end:]))


def candidates(problem: StageProblem) -> Iterator[StageCandidate]:
    """Every run of layers that can be a stage."""
    for first in range(problem.layers):
        for last in range(first, problem.layers):
            try:
                yield StageCandidate(problem, first, last)
            except PipeshardError:  # it would have nothing to do
                continue


def operator_specs(layer: StageCandidate, mesh: Mesh, machine: Machine, cache: Cache) -> Specs:
    """The best division found of a layer's parameters over a mesh (1, model).

    What stays whole has no spec.
    """
    here, graph = Placed(layer, mesh, {}), layer.graph
    parameters, whole_spec = graph.parameters, PartitionSpec()
    # Nothing to search where no parameter can be divided.
    if all(len(over_model(shape_of(p), mesh)) == 1 for p in parameters):
        return {}

    def search() -> tuple[PartitionSpec, ...]:
        arguments = [*graph.arguments, *graph.outputs]
        others = len(arguments) - len(parameters)
        found = search_sharding(
            partial(both_passes, here.graph),
            list(map(spec_of, arguments)),
            mesh,
            machine,
            choices=[over_model] * len(parameters) + [unsharded] * others,
            # What crosses to other stages is whole, and a gradient lies as its parameter.
            outputs=lambda *specs: (
                [whole_spec] * len(graph.outputs),
                list(specs[: len(parameters)]),
                [whole_spec] * len(graph.inputs),
            ),
            limit=EXHAUSTIVE,
            progress=False,  # the planner has a bar of its own
        )
        # The first of the table may be too large: which stages fit is for the planner to say.
        return found.table[0].specs[: len(parameters)]

    # Which division is the best depends on the machine as well: its links against its FLOPs.
    costs = machine.flops, machine.share, machine.latency, machine.memory, machine.link(mesh.size)
    found = remembered(cache, (here.key(measured=False), costs), search)
    return {p: spec for p, spec in zip(parameters, found, strict=True) if spec}
