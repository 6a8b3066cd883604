"""The costs of a stage, layers in a row: compiled for a mesh, and measured where that is fair.

On accelerators the times are measured. Host devices of a CPU share its cores, so that measured
times would say nothing about a machine with so many devices: there they come from the cost model.
"""

import math
from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import numpy as np
from jax.extend.core import Var
from jax.sharding import Mesh, PartitionSpec

from pipelab.optimize.plan.machine import Machine
from pipelab.pipeshard.auto.candidate import Cache, Placed, remembered
from pipelab.pipeshard.auto.cost_model import Cost
from pipelab.pipeshard.auto.flops import repeats
from pipelab.pipeshard.auto.sharded import in_turn, ones
from pipelab.pipeshard.compiled import CompiledStage
from pipelab.pipeshard.method import AXES, Shape
from pipelab.runtime.jax.passes import bytes_on_mesh

ROUNDS = 5


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


def profile_stage(
    stage: Placed,
    submesh: Shape,
    state: Counter[Var],
    machine: Machine,
    measured: bool,
    cache: Cache,
) -> StageProfile:
    """The profile of a stage.

    state     parameter -> how many of the optimizer's arrays have its shape, divided as it is
    measured  whether seconds are measured, on the mesh's devices
    """
    # [1] What compiling it shows, unless that is known.
    key = stage.key(measured)
    costs, activations, seconds = remembered(cache, key, lambda: _examine(stage, measured))
    forward, backward, *reduction = seconds or [cost.seconds(machine) for cost in costs]

    # [2] What is held all the time: weights with their gradients, the optimizer's state, the batch.
    def share(v: Var) -> int:
        return bytes_on_mesh(stage.spec(v)) // stage.mesh.size

    graph, problem = stage.candidate.graph, stage.candidate.problem
    parameters = sum(map(share, graph.parameters))
    held = 2 * parameters + sum(share(p) * state[p] for p in graph.parameters)
    held += sum(map(share, graph.fixed)) + problem.method.microbatches * sum(map(share, graph.data))
    # A pass takes its outputs and temporary arrays beside. Of the forward's outputs, activations
    # are counted for each micro-batch in flight.
    beside = [cost.peak_bytes - cost.argument_bytes for cost in costs[:2]]
    held += max(0, beside[0] - activations, beside[1])
    return StageProfile(
        layers=stage.candidate.layers,
        submesh=submesh,
        logical=stage.mesh.devices.shape,
        sharding={problem.paths[problem.parameters[p]]: spec for p, spec in stage.specs.items()},
        source="measured" if measured else "model",
        forward=forward,
        backward=backward,
        reduction=sum(reduction),
        microbatches=problem.method.microbatches,
        parameter_bytes=parameters,
        held_bytes=held,
        activation_bytes=activations,
        available_bytes=machine.memory - held,
    )


def _examine(stage: Placed, measured: bool) -> tuple[list[Cost], int, list[float]]:
    """The findings of compiling a stage, on one device.

    The costs of the forward, of the backward and of the reduction, if there is one; the bytes that
    a forward leaves for its backward; and the seconds of these, if they are measured.
    """
    compiled = stage.compile(measured)
    times = repeats(stage.candidate.graph.equations)
    # The backward adds to the gradients' sums.
    costs = [Cost.of(each, times) for each in (compiled.forward, compiled.backward)]
    costs += [Cost.of(compiled.total)] if compiled.total else []
    seconds = _measure(stage, compiled) if measured else []
    return costs, compiled.bytes // stage.mesh.size, seconds


def _measure(stage: Placed, compiled: CompiledStage) -> list[float]:
    """Median seconds of a forward, a backward and the reduction, if there is one, of ones."""
    graph = stage.candidate.graph
    arguments = ones(list(map(stage.spec, graph.arguments)))
    cotangents = ones(list(map(stage.spec, graph.outputs)))
    # What the backward needs: some of the arguments, and some of what the forward made.
    made = [*arguments, *compiled.forward(*arguments)]
    operands = [*cotangents, *(made[i] for i in compiled.kept)]
    sums = compiled.zeros()

    def backward() -> Any:
        nonlocal sums  # in whose place the new ones are made
        sums, *others = compiled.backward(sums, operands)
        return sums, others

    programs = [lambda: compiled.forward(*arguments), backward]
    if total := compiled.total:
        # It gives up the sums, so each turn needs new ones: that is in its time.
        programs.append(lambda: total(compiled.zeros()))
    return [median(seconds) for seconds in in_turn(programs, ROUNDS)]


def mesh_of(devices: list[Any], logical: Shape) -> Mesh:
    return Mesh(np.array(devices[: math.prod(logical)]).reshape(logical), AXES)
