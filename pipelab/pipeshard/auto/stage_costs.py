"""What a possible stage costs: seconds and bytes, modelled or measured.

On accelerators the times are measured. Host devices of a CPU share its cores, so measured times
would say nothing about a machine with as many devices. There, the cost model gives the times.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import pairwise
from statistics import median
from typing import Any, Literal, NamedTuple

from jax.extend.core import Var
from jax.sharding import PartitionSpec

from pipelab.jax.device import bytes_on_mesh
from pipelab.jax.passes import sum_spec
from pipelab.optimize.plan.machine import Machine
from pipelab.pipeshard.auto.candidate import Cache, Placed, remembered
from pipelab.pipeshard.auto.cost_model import Cost
from pipelab.pipeshard.auto.flops import repeats
from pipelab.pipeshard.auto.sharded import in_turn, ones
from pipelab.pipeshard.compiled import CompiledStage
from pipelab.pipeshard.method import Shape

ROUNDS = 5  # of measured times
REDUCTION = 2  # its place among the costs of a stage


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
    passes            the costs of the compiled forward and backward. Of costs that were summed
                      (`Runs`), arguments, outputs and temporary arrays are not known: 0
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
    passes: tuple[Cost, ...]

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
        unknown = dict.fromkeys(("argument_bytes", "output_bytes", "temporary_bytes"), 0)
        costs.append(replace(cost, peak_bytes=peak, **unknown, **sums))
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
        passes=tuple(costs[:2]),
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
