"""A possible stage: some layers in a row, and what its profile depends on."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import jax
import jaxlib
from jax.extend.core import Var
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipelab.executors.jax.graph import Arrays
from pipelab.pipeshard.auto.cache import Key, digest
from pipelab.pipeshard.auto.sharded import built
from pipelab.pipeshard.cut import StageGraph, cut
from pipelab.pipeshard.graph import PipeshardError, on_mesh, spec_of
from pipelab.pipeshard.plan import StageProblem, over_samples
from pipelab.pipeshard.stage import CompiledStage, passes

Specs = Mapping[Var, PartitionSpec]  # parameter -> how it is divided; whole where it is not named


class Candidate:
    """Some layers in a row, as a stage of the problem.

    graphs, number  the stage among what is before and what is after it
    """

    def __init__(self, problem: StageProblem, first: int, last: int) -> None:
        self.problem, self.first, self.last = problem, first, last
        parts = [range(first), range(first, last + 1), range(last + 1, problem.layers)]
        stages = [list(part) for part in parts if part]
        self.number = 1 if first else 0
        parameters = list(problem.parameters)
        self.graphs = cut(problem.loss, parameters, problem.batch, stages, problem.number)

    @property
    def graph(self) -> StageGraph:
        return self.graphs[self.number]

    @cached_property
    def text(self) -> str:
        """Its equations, with variables named in their order: equal blocks have equal texts."""
        graph = self.graph
        text = str(graph.whole.jaxpr)
        if "custom_vjp_call" in text or "custom_jvp_call" in text:  # it has no derivatives yet
            shapes = map(spec_of, (*graph.arguments, *graph.outputs))
            text += str(jax.make_jaxpr(partial(both_passes, graph))(*shapes))
        return re.sub(r" at 0x[0-9a-f]+", "", text)  # functions have addresses


@dataclass
class Placed:
    """A candidate on a mesh (data, model).

    specs  of the parameters that are divided
    """

    candidate: Candidate
    mesh: Mesh
    specs: Specs

    @property
    def graph(self) -> StageGraph:
        """With the user's sharding constraints on this mesh."""
        graph = self.candidate.graph
        return replace(graph, equations=[on_mesh(eqn, self.mesh) for eqn in graph.equations])

    def spec(self, v: Var) -> jax.ShapeDtypeStruct:
        return spec_of(v, self.place(v))

    def place(self, v: Var) -> NamedSharding:
        """The sharding of a variable, as the program will have it."""
        axis = self.candidate.problem.axes.get(v)
        spec = self.specs[v] if v in self.specs else over_samples(v, axis, self.mesh)
        return NamedSharding(self.mesh, spec)

    def compile(self, runs: bool) -> CompiledStage:
        """To run, or only to look at what it costs."""
        graphs, number = list(self.candidate.graphs), self.candidate.number
        graphs[number] = self.graph
        build = partial(CompiledStage, graphs, number, self.place, False, (), set())
        return built(build, self.mesh, scored=not runs)

    def key(self, measured: bool) -> Key:
        """All that a profile depends on."""
        graph = self.candidate.graph
        device = self.mesh.devices.flat[0]
        kinds = (graph.parameters, graph.inputs, graph.fixed, graph.data, graph.aux_inputs)
        outputs = (graph.outputs, graph.aux_outputs, graph.results)
        return {
            "equations": digest(self.candidate.text),
            "arguments": [len(kind) for kind in (*kinds, *outputs)],
            "shardings": [str(self.place(v).spec) for v in graph.arguments],
            "mesh": list(self.mesh.devices.shape),
            "device": [device.platform, device.device_kind],
            "versions": [jax.__version__, jaxlib.__version__],
            "x64": jax.config.read("jax_enable_x64"),
            "measured": measured,
        }


def both_passes(graph: StageGraph, *arrays: Any) -> tuple[Arrays, Arrays, Arrays]:
    """A stage's outputs, and the gradients of its parameters and of its inputs.

    arrays  its arguments, then the gradients of its outputs
    """
    forward, backward, made, kept = passes(graph)
    end = len(graph.arguments)
    known = dict(zip(graph.arguments, arrays[:end], strict=True))
    known.update(zip(made, forward(*arrays[:end]), strict=True))
    gradients = backward([[x] for x in arrays[end:]], [known[v] for v in kept])
    return [known[v] for v in graph.outputs], *gradients


def candidates(problem: StageProblem) -> Iterator[Candidate]:
    """Every run of layers that can be a stage."""
    for first in range(problem.layers):
        for last in range(first, problem.layers):
            try:
                yield Candidate(problem, first, last)
            except PipeshardError:  # it would have nothing to do
                continue
