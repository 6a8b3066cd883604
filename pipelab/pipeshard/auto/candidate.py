"""A possible stage: some layers in a row, and how a mesh divides it."""

import math
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

import jax
import numpy as np
from jax.extend.core import Var
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipelab.jax.device import AXES, over_samples
from pipelab.jax.host import digest
from pipelab.jax.jaxpr import Arrays, Variables, contains, spec_of
from pipelab.jax.passes import Groups, Passes, differentiate, passes
from pipelab.pipeshard.arrays import CONSTRAINT, PipeshardError, on_mesh, shape_of
from pipelab.pipeshard.auto.sharded import built
from pipelab.pipeshard.compiled import CompiledStage
from pipelab.pipeshard.cut import StageGraph, cut
from pipelab.pipeshard.method import Shape, StageProblem
from pipelab.table.action import Kind

Cache = MutableMapping[str, Any]
Specs = Mapping[Var, PartitionSpec]  # parameter -> how it is divided; whole where it is not named


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


def mesh_of(devices: list[Any], logical: Shape) -> Mesh:
    return Mesh(np.array(devices[: math.prod(logical)]).reshape(logical), AXES)
