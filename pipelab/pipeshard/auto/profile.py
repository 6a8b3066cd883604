"""What a stage costs: some layers in a row, compiled for a mesh, and measured where that is fair.

On accelerators the times are measured. Host devices of a CPU share its cores, so that measured
times would say nothing about a machine with so many devices: there they come from the cost model.
"""

import math
import statistics
import time
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var
from jax.sharding import Mesh, PartitionSpec

from pipelab.pipeshard.auto.cache import Cache
from pipelab.pipeshard.auto.candidate import Placed
from pipelab.pipeshard.auto.cost import Cost
from pipelab.pipeshard.auto.flops import repeats
from pipelab.pipeshard.plan import AXES, Shape
from pipelab.pipeshard.stage import CompiledStage, bytes_on_mesh
from pipelab.plan.machine import Machine

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
    def parse(cls, found: Any, measured: bool) -> "Examined":
        """What `asdict` made. Raises an error for anything else."""
        forward, backward = Cost(**found["forward"]), Cost(**found["backward"])
        activation_bytes, seconds = found["activation_bytes"], tuple(found["seconds"])
        if len(seconds) != (2 if measured else 0):
            raise ValueError(f"it has {len(seconds)} measured times")
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


def profile(
    stage: Placed,
    submesh: Shape,
    state: Counter[Var],
    machine: Machine,
    measured: bool,
    cache: Cache,
) -> StageProfile:
    """Of a stage.

    state     parameter -> how many of the optimizer's arrays have its shape, divided as it is
    measured  whether seconds are measured, on the mesh's devices
    """
    # [1] What compiling it shows, unless that is known.
    entry = cache.get(
        stage.key(measured),
        lambda: asdict(_examine(stage, measured)),
        lambda found: Examined.parse(found, measured),
    )
    if measured:
        forward, backward = entry.seconds
    else:
        forward, backward = entry.forward.seconds(machine), entry.backward.seconds(machine)

    # [2] What is held, and what remains for activations.
    parameters, held = _held_bytes(stage, state, entry)
    candidate, problem = stage.candidate, stage.candidate.problem
    largest = max(entry.forward, entry.backward, key=lambda cost: cost.peak_bytes)
    return StageProfile(
        (candidate.first, candidate.last),
        submesh,
        stage.mesh.devices.shape,
        {problem.paths[problem.parameters[p]]: spec for p, spec in stage.specs.items()},
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


def _held_bytes(stage: Placed, state: Counter[Var], entry: Examined) -> tuple[int, int]:
    """Bytes on one device: of the parameters, and of all that is held all the time."""
    graph, m = stage.candidate.graph, stage.candidate.problem.method.microbatches

    def share(v: Var) -> int:
        return bytes_on_mesh(stage.spec(v)) // stage.mesh.size

    parameters = sum(map(share, graph.parameters))
    optimizer = sum(share(p) * state[p] for p in graph.parameters)
    others = sum(map(share, graph.fixed)) + m * sum(map(share, graph.data))
    # A pass takes its outputs and temporary arrays beside. Of the forward's outputs, activations
    # are counted for each micro-batch in flight.
    beside = [cost.peak_bytes - cost.argument_bytes for cost in (entry.forward, entry.backward)]
    beside[0] -= entry.activation_bytes
    return parameters, 2 * parameters + optimizer + others + max(0, *beside)


def _examine(stage: Placed, measured: bool) -> Examined:
    compiled = stage.compile(measured)
    times = repeats(stage.candidate.graph.equations)
    forward, backward = Cost.of(compiled.forward, times), Cost.of(compiled.backward, times)
    seconds = _measure(stage, compiled) if measured else ()
    return Examined(forward, backward, compiled.bytes // stage.mesh.size, seconds)


def _measure(stage: Placed, compiled: CompiledStage) -> tuple[float, float]:
    """Median seconds of a forward and of a backward, of zeros."""
    graph = stage.candidate.graph
    found = {v: _zeros(stage.spec(v)) for v in graph.arguments}
    cotangents = [[_zeros(stage.spec(v))] for v in graph.outputs]
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
    return jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding)


def mesh_of(devices: list[Any], logical: Shape) -> Mesh:
    return Mesh(np.array(devices[: math.prod(logical)]).reshape(logical), AXES)
