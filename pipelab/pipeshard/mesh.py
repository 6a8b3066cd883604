"""A mesh as a device of the schedule, and its stages during one call, as a worker sees them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.extend.core import Var
from jax.sharding import Mesh

from pipelab.executors.jax_device import JaxDevice
from pipelab.executors.job import Job
from pipelab.executors.worker import Bytes
from pipelab.pipeshard.graph import spec_of
from pipelab.pipeshard.stage import CompiledStage, Place, bytes_on_mesh


class Parcel(NamedTuple):
    """What one stage hands to the next: by variable an array, or on the way back its gradients.

    use    what the next stage needs, moved to its mesh
    along  what only passes through it, left where it is

        stage 0: x, z      stage 1 reads x, stage 2 reads z: (use x, along z) to stage 1,
                           and there (use y and z, along nothing) to stage 2
    """

    use: dict[Var, Any]
    along: dict[Var, Any]


class Ledger:
    """Bytes of activations kept on a mesh: now, and the most since `most` was last set."""

    def __init__(self) -> None:
        self.held = self.most = 0

    def add(self, count: int) -> None:
        self.held += count
        self.most = max(self.most, self.held)


class MeshDevice(JaxDevice):
    """A device of the schedule: a mesh of jax devices, with one thread."""

    def __init__(self, mesh: Mesh, place: Place) -> None:
        super().__init__(mesh.devices.flat[0])
        self.ledger: Any = Ledger()
        self._place = place

    def take(self, payload: Parcel) -> Parcel:
        moved = {v: jax.device_put(x, self._place(v)) for v, x in payload.use.items()}
        jax.block_until_ready(list(moved.values()))
        return Parcel(moved, payload.along)

    def size(self, payload: Parcel) -> int:
        return super().size(list(payload.use.values()))

    def describe(self, payload: Parcel) -> str:
        return super().describe(list(payload.use.values()))


class Batch(NamedTuple):
    """What a stage needs for one call, on its mesh.

    parameters, fixed  arrays of the step's arguments
    data               per micro-batch its arrays
    seed               the gradient of the loss
    """

    parameters: list[Any]
    fixed: list[Any]
    data: list[list[Any]]
    seed: Any


class MeshStage:
    """One stage during one call, as the worker sees it.

    compiled   its functions
    batch      its arrays
    later      for each later stage, what it reads of earlier ones
    previous   what the stage before makes
    update     does the stage's own part of the update with its gradients; returns what to wait for
    optimizer  bytes of optimizer state
    """

    versions_held = 1
    losses: Mapping[int, Any] = MappingProxyType({})  # they are among `results`
    steps: Sequence[Any] = ()

    def __init__(
        self,
        compiled: CompiledStage,
        device: MeshDevice,
        batch: Batch,
        later: Sequence[Collection[Var]],
        previous: Collection[Var],
        update: Callable[[list[Any]], Any],
        optimizer: int,
    ) -> None:
        self.compiled, self.graph, self.device, self.batch = compiled, compiled.graph, device, batch
        self._later, self._previous, self._update = later, set(previous), update
        self._optimizer = optimizer
        self.gradients = compiled.zeros()  # of the parameters, added up
        self.results: dict[int, dict[int, Any]] = {}  # micro-batch -> number of a result -> array
        self._kept: dict[int, list[Any]] = {}
        self._split: dict[int, list[list[Any]]] = {}  # between input and weight gradients
        self._left = len(batch.data)

    # ---- the kinds of action

    def forward(self, microbatch: int, received: Parcel | None) -> Parcel | None:
        # [1] What arrives is what this stage reads, and what passes through it.
        graph, batch = self.graph, self.batch
        arrived = {**received.along, **received.use} if received else {}
        inputs = [self._here(v, arrived[v]) for v in graph.inputs]
        aux_inputs = [self._here(v, arrived[v]) for v in graph.aux_inputs]
        # [2] Compute, in the order of `graph.arguments`.
        arguments = [
            *batch.parameters,
            *inputs,
            *batch.fixed,
            *batch.data[microbatch],
            *aux_inputs,
        ]
        outputs, aux_outputs, results, kept = self.compiled.forward(arguments)
        self._kept[microbatch] = kept
        self.device.ledger.add(self.compiled.bytes)
        self.results[microbatch] = dict(zip(graph.results, results, strict=True))
        # [3] Hand on what later stages read.
        if not self._later:
            return None
        arrived.update(zip(graph.outputs, outputs, strict=True))
        arrived.update(zip(graph.aux_outputs, aux_outputs, strict=True))
        after = {v for reads in self._later[1:] for v in reads}
        return Parcel(
            {v: arrived[v] for v in self._later[0]},
            {v: x for v, x in arrived.items() if v in after},
        )

    def backward(self, microbatch: int, received: Parcel | None) -> Parcel:
        """Add to the parameters' gradients; returns those of what earlier stages made."""
        cotangents, kept = self._cotangents(received), self._kept.pop(microbatch)
        found = self.compiled.backward(self.gradients, cotangents, kept)
        self.gradients, gradients = jax.block_until_ready(found)
        self._end()
        return self._parcel(received, gradients)

    def input_grad(self, microbatch: int, received: Parcel | None) -> Parcel:
        cotangents, kept = self._cotangents(received), self._kept[microbatch]
        self._split[microbatch] = cotangents
        gradients = jax.block_until_ready(self.compiled.input_grad(cotangents, kept))
        return self._parcel(received, gradients)

    def weight_grad(self, microbatch: int, received: Any = None) -> None:
        cotangents, kept = self._split.pop(microbatch), self._kept.pop(microbatch)
        found = self.compiled.weight_grad(self.gradients, cotangents, kept)
        self.gradients = jax.block_until_ready(found)
        self._end()

    def update(self, number: int, received: Any = None) -> None:
        jax.block_until_ready(self._update(self.gradients))

    def _here(self, v: Var, x: Any) -> Any:
        """Nothing is moved, unless stages share a device."""
        return jax.device_put(x, self.compiled.place(v))

    def _cotangents(self, received: Parcel | None) -> list[list[Any]]:
        """Per output its gradients, from all stages that read it."""
        if received is None:
            return [[self.batch.seed]]
        return [[self._here(v, x) for x in received.use[v]] for v in self.graph.outputs]

    def _parcel(self, received: Parcel | None, gradients: list[Any]) -> Parcel:
        """Gradients of the inputs join those that later stages found of the same variables."""
        found = {v: list(parts) for v, parts in received.along.items()} if received else {}
        for v, gradient in zip(self.graph.inputs, gradients, strict=True):
            found.setdefault(v, []).append(gradient)
        use = {v: found.pop(v) for v in list(found) if v in self._previous}
        return Parcel(use, found)

    def _end(self) -> None:
        self.device.ledger.add(-self.compiled.bytes)
        self._left -= 1

    # ---- what the worker asks of it

    def snapshot(self) -> None: ...

    def trained(self) -> dict[str, Any]:
        """The results of the step have the weights."""
        return {}

    def complete(self, group: int) -> bool:
        return not self._left

    def sums(self, group: int) -> list[Any]:
        return self.gradients

    def replace_sums(self, group: int, sums: list[Any]) -> None:
        self.gradients = sums

    def news(self) -> Any:
        """Stages send each other nothing before their updates.

        What needs all of them is done afterwards.
        """

    def held(self) -> Bytes:
        graph, place = self.graph, self.compiled.place
        weights = sum(bytes_on_mesh(spec_of(v, place(v))) for v in graph.parameters)
        return Bytes(weights, 0, weights, self._optimizer)


@dataclass
class MeshJob(Job):
    """What one worker thread does: the stages of one mesh."""

    mesh_device: MeshDevice
    mesh_stages: dict[int, MeshStage]

    @property
    def where(self) -> str:
        return f"mesh {self.row} ({', '.join(map(str, self.device.devices.flat))})"

    def home(self) -> MeshDevice:
        return self.mesh_device

    def stages(self, home: MeshDevice) -> dict[int, MeshStage]:
        return self.mesh_stages
