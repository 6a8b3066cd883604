"""What a stage costs: some layers in a row, compiled for a mesh, and measured where that is fair.

On accelerators the times are measured. Host devices of a CPU share its cores, so that measured
times would say nothing about a machine with so many devices: there they come from the cost model.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.extend.core import DebugInfo, Jaxpr, Var
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipelab.pipeshard.auto.cache import Cache, Key, digest
from pipelab.pipeshard.auto.cost import Cost
from pipelab.pipeshard.auto.flops import as_xla_counts, total
from pipelab.pipeshard.auto.sharded import SCORED_ON_CPU
from pipelab.pipeshard.cut import StageGraph, cut
from pipelab.pipeshard.graph import (
    Arrays,
    Graph,
    PipeshardError,
    Variables,
    bytes_of,
    is_key_type,
    shape_of,
    spec_of,
)
from pipelab.pipeshard.plan import AXES, Shape, StageProblem
from pipelab.pipeshard.stage import CompiledStage
from pipelab.plan.machine import Machine

Specs = Mapping[Var, PartitionSpec]  # parameter -> how it is divided; whole where it is not named
REPEATS = 5


@dataclass(frozen=True)
class Examined:
    """What compiling a stage shows.

    forward, backward  the cost of each, on one device
    activation_bytes   that a forward leaves for its backward, on one device
    seconds            measured, of the forward and the backward; empty where nothing was measured
    """

    forward: Cost
    backward: Cost
    activation_bytes: int
    seconds: tuple[float, ...] = ()

    @classmethod
    def parse(cls, found: Any) -> Examined:
        """What `asdict` made. Raises ValueError, TypeError or KeyError for anything else."""
        forward, backward = Cost(**found["forward"]), Cost(**found["backward"])
        activation_bytes, seconds = found["activation_bytes"], tuple(found["seconds"])
        values = [*asdict(forward).values(), *asdict(backward).values(), *seconds]
        for value in (activation_bytes, *values):
            if isinstance(value, bool) or not 0 <= value < np.inf:
                raise ValueError(f"{value!r} is no number of at least 0")
        return cls(forward, backward, activation_bytes, seconds)


@dataclass(frozen=True)
class StageProfile:
    """One line of the profile table: a possible stage. Bytes are those of one device.

    layers            first and last
    submesh           hosts, and devices of each
    logical           the same devices as a mesh (data, model)
    sharding          path -> PartitionSpec, of the parameters that are divided
    source            where the seconds come from
    forward           seconds of a micro-batch; `backward` likewise
    argument_bytes    of the larger of the two passes, as are the next three
    output_bytes
    temporary_bytes
    peak_bytes        of all these, less what is updated in place
    parameter_bytes
    held_bytes        whatever the schedule does: parameters, their gradients, the optimizer's
                      state, the batch, and what a pass takes beside
    activation_bytes  kept for its backward, of each micro-batch in flight
    available_bytes   for activations: the device's memory less `held_bytes`
    """

    layers: tuple[int, int]
    submesh: Shape
    logical: Shape
    sharding: dict[str, PartitionSpec]
    source: Literal["model", "measured"]
    forward: float
    backward: float
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    peak_bytes: int
    parameter_bytes: int
    held_bytes: int
    activation_bytes: int
    available_bytes: float

    @property
    def seconds(self) -> float:
        """Of a micro-batch, forward and backward."""
        return self.forward + self.backward

    @property
    def in_flight(self) -> float:
        """Micro-batches whose activations fit."""
        return max(self.available_bytes, 0) // max(self.activation_bytes, 1)


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
        outputs = [*graph.outputs, *graph.aux_outputs, *graph.results.values()]
        about = DebugInfo("pipelab.pipeshard", "a stage", None, None)
        text = str(Jaxpr((), graph.arguments, outputs, graph.equations, debug_info=about))
        if "custom_vjp_call" in text:  # whose backward is no part of it yet
            shapes = map(spec_of, (*graph.arguments, *graph.outputs))
            text += str(jax.make_jaxpr(self.both_passes)(*shapes))
        return re.sub(r" at 0x[0-9a-f]+", "", text)  # functions have addresses

    def both_passes(self, *arrays: Any) -> tuple[Arrays, Arrays, Arrays]:
        """Its outputs, and the gradients of its parameters and of its inputs.

        arrays  its arguments, then the gradients of its outputs
        """
        graph = self.graph
        stage = Graph(graph.arguments, graph.outputs, graph.equations)
        count = len(graph.parameters)
        active, end = count + len(graph.inputs), len(graph.arguments)

        def forward(*some: Any) -> Arrays:
            return stage.run(*some, *arrays[active:end])

        outputs, pullback = jax.vjp(forward, *arrays[:active])
        gradients = pullback(list(arrays[end:]))
        return outputs, list(gradients[:count]), list(gradients[count:])

    @cached_property
    def repeats(self) -> float:
        """How many times the FLOPs that XLA counts, which counts a scan's body once."""
        counted = as_xla_counts(self.graph.equations)
        return total(self.graph.equations) / counted if counted else 1.0

    def place(self, mesh: Mesh, specs: Specs, v: Var) -> NamedSharding:
        """The sharding of a variable, as the program will have it."""
        axis = 0 if v in self.problem.batch else self.problem.axes.get(v)
        spec = specs.get(v, PartitionSpec())
        if v not in specs and axis is not None and shape_of(v)[axis] % mesh.shape["data"] == 0:
            spec = PartitionSpec(*[None] * axis, "data")
        return NamedSharding(mesh, spec)

    def compile(self, mesh: Mesh, specs: Specs, runs: bool) -> CompiledStage:
        """To run, or only to look at what it costs."""
        place = partial(self.place, mesh, specs)
        about = (self.graphs, self.number, place, False, (), set())
        if not runs and mesh.devices.flat[0].platform == "cpu":
            with suppress(jax.errors.JaxRuntimeError):  # XLA may drop an option
                return CompiledStage(*about, SCORED_ON_CPU)
        return CompiledStage(*about)

    def key(self, mesh: Mesh, specs: Specs, measured: bool) -> Key:
        """All that a profile depends on."""
        graph = self.graph
        device = mesh.devices.flat[0]
        kinds = (graph.parameters, graph.inputs, graph.fixed, graph.data, graph.aux_inputs)
        outputs = (graph.outputs, graph.aux_outputs, graph.results)
        return {
            "jaxpr": digest(self.text),
            "arguments": [len(kind) for kind in (*kinds, *outputs)],
            "shardings": [str(self.place(mesh, specs, v).spec) for v in graph.arguments],
            "mesh": list(mesh.devices.shape),
            "device": [device.platform, device.device_kind],
            "versions": [jax.__version__, jaxlib.__version__],
            "x64": jax.config.read("jax_enable_x64"),
            "measured": measured,
        }


def profile(
    candidate: Candidate,
    submesh: Shape,
    mesh: Mesh,
    specs: Specs,
    state: Mapping[Var, Variables],
    machine: Machine,
    measured: bool,
    cache: Cache,
) -> StageProfile:
    """Of a stage on a mesh (data, model).

    specs     of the parameters that are divided
    state     parameter -> the optimizer's arrays of its shape, divided as it is
    measured  whether seconds are measured, on the mesh's devices
    """
    # [1] What compiling it shows, unless that is known.
    key = candidate.key(mesh, specs, measured)
    entry = cache.get(
        key, lambda: asdict(_examine(candidate, mesh, specs, measured)), Examined.parse
    )
    if measured:
        forward, backward = entry.seconds
    else:
        costs = (entry.forward, entry.backward)
        both = [replace(cost, flops=cost.flops * candidate.repeats) for cost in costs]
        forward, backward = (cost.seconds(machine) for cost in both)

    # [2] What is held all the time. A pass takes its outputs and temporary arrays beside; of the
    #     forward's, the activations are counted for each micro-batch in flight.
    graph, problem = candidate.graph, candidate.problem
    m = problem.method.microbatches

    def share(v: Var) -> int:
        shape = candidate.place(mesh, specs, v).shard_shape(shape_of(v))
        return bytes_of(v) // max(np.prod(shape_of(v), dtype=int), 1) * int(np.prod(shape))

    parameters = sum(map(share, graph.parameters))
    optimizer = sum(share(p) * len(state.get(p, ())) for p in graph.parameters)
    others = sum(map(share, graph.fixed)) + m * sum(map(share, graph.data))
    beside = [cost.peak_bytes - cost.argument_bytes for cost in (entry.forward, entry.backward)]
    beside[0] -= entry.activation_bytes
    held = 2 * parameters + optimizer + others + max(0, *beside)
    largest = max(entry.forward, entry.backward, key=lambda cost: cost.peak_bytes)
    return StageProfile(
        (candidate.first, candidate.last),
        submesh,
        mesh.devices.shape,
        {problem.paths[problem.parameters[p]]: specs[p] for p in graph.parameters if p in specs},
        "measured" if measured else "model",
        forward,
        backward,
        largest.argument_bytes,
        largest.output_bytes,
        largest.temporary_bytes,
        largest.peak_bytes,
        parameters,
        held,
        entry.activation_bytes,
        machine.memory - held,
    )


def _examine(candidate: Candidate, mesh: Mesh, specs: Specs, measured: bool) -> Examined:
    compiled = candidate.compile(mesh, specs, measured)
    forward, backward = Cost.of(compiled.forward), Cost.of(compiled.backward)
    seconds = _measure(candidate, compiled, mesh, specs) if measured else ()
    return Examined(forward, backward, compiled.bytes // mesh.size, seconds)


def _measure(
    candidate: Candidate, compiled: CompiledStage, mesh: Mesh, specs: Specs
) -> tuple[float, float]:
    """Median seconds of a forward and of a backward, of zeros."""
    graph = candidate.graph

    def zeros(vs: Variables) -> list[Any]:
        return [_zeros(spec_of(v, candidate.place(mesh, specs, v))) for v in vs]

    found: dict[Any, Any] = dict(zip(graph.arguments, zeros(graph.arguments), strict=True))
    cotangents = [[x] for x in zeros(graph.outputs)]
    sums = compiled.zeros()
    times = []
    for _ in range(REPEATS + 1):
        begin = time.perf_counter()
        made = compiled.forward(*(found[v] for v in graph.arguments))
        jax.block_until_ready(made)
        middle = time.perf_counter()
        found.update(zip(compiled.made, made, strict=True))
        kept = [found[v] for v in compiled.kept]
        after = time.perf_counter()
        sums, back = compiled.backward(sums, cotangents, kept)
        jax.block_until_ready((sums, back))
        times.append((middle - begin, time.perf_counter() - after))
    forward, backward = zip(*times[1:], strict=True)  # the first is slow
    return statistics.median(forward), statistics.median(backward)


def _zeros(x: jax.ShapeDtypeStruct) -> Any:
    if is_key_type(x.dtype):
        keys = jax.random.split(jax.random.key(0), max(int(np.prod(x.shape)), 1))
        return jax.device_put(keys.reshape(x.shape), x.sharding)
    return jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding)


def candidates(problem: StageProblem) -> Iterator[Candidate]:
    """Every run of layers that can be a stage."""
    for first in range(problem.layers):
        for last in range(first, problem.layers):
            try:
                yield Candidate(problem, first, last)
            except PipeshardError:  # it would have nothing to do
                continue


def mesh_of(devices: list[Any], logical: Shape) -> Mesh:
    return Mesh(np.array(devices[: int(np.prod(logical))]).reshape(logical), AXES)
