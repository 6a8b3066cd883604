"""A mesh as a device of the schedule, and its stages during one call, as a worker sees them."""

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.extend.core import Var
from jax.sharding import Mesh

from pipelab.executors.jax.device import JaxDevice
from pipelab.executors.jax.graph import Arrays, Values, Variables
from pipelab.executors.jax.split import put_in
from pipelab.executors.job import Job
from pipelab.executors.transport import Aborted, Transport
from pipelab.executors.worker import Bytes, RunError
from pipelab.pipeshard.stage import CompiledStage, Place, bytes_on_mesh


class Parcel(NamedTuple):
    """What one stage hands to the next: by variable an array, or on the way back its gradients.

    use    what the next stage needs, moved to its mesh
    along  what only passes through it, left where it is

    Stage 0 makes x for stage 1 and z for stage 2; stage 1 makes y:

        from stage 0 to 1    use x       along z
        from stage 1 to 2    use y, z
    """

    use: Values
    along: Values


class MeshDevice(JaxDevice):
    """A device of the schedule: a mesh of jax devices, with one thread.

    numbers  that variables have between devices: other processes have variables of their own
    """

    def __init__(self, mesh: Mesh, place: Place, numbers: dict[Var, int]) -> None:
        super().__init__(mesh.devices.flat[0])
        self.mesh, self.place, self._numbers = mesh, place, numbers

    def give(self, payload: Parcel) -> Any:
        return [{self._numbers[v]: x for v, x in part.items()} for part in payload]

    def take(self, parcel: Any) -> Parcel:
        variables = [*self._numbers]
        use, along = ({variables[n]: x for n, x in part.items()} for part in parcel)
        moved = {v: jax.device_put(x, self.place(v)) for v, x in use.items()}
        jax.block_until_ready(list(moved.values()))
        return Parcel(moved, along)

    def arrays(self, payload: Parcel) -> Iterable[jax.Array]:
        return super().arrays(list(payload.use.values()))


class MeshStage:
    """One stage during one call, as the worker sees it.

    compiled   its functions
    names      of its parameters' gradients in the update
    known      on its mesh: variable -> array of an argument; the update adds what it makes
    pieces     leaf of the batch -> its part in each micro-batch
    seed       the gradient of a micro-batch's loss
    """

    versions_held = 1
    steps: Sequence[Any] = ()
    unsplit: Mapping[int, Any] = MappingProxyType({})  # the plan has it

    def __init__(
        self,
        compiled: CompiledStage,
        names: Variables,
        device: MeshDevice,
        known: Values,
        pieces: dict[Var, Arrays],
        seed: Any,
    ) -> None:
        self.compiled, self.graph, self.names = compiled, compiled.graph, names
        self.device, self.known = device, known
        self._data = {v: [self._here(v, x) for x in pieces[v]] for v in self.graph.data}
        self._seed = None if compiled.later else self._here(self.graph.outputs[0], seed)
        self.gradients = compiled.zeros()  # of the parameters, added up
        self.results: dict[int, dict[int, Any]] = {}  # micro-batch -> number of a result -> array
        self.losses: dict[int, Any] = {}  # they are among the results
        self._kept: dict[int, Arrays] = {}
        self._split: dict[int, Any] = {}  # what input gradients leave for weight gradients

    # ---- the kinds of action

    def forward(self, microbatch: int, received: Parcel | None) -> Parcel | None:
        # [1] What this stage reads: some of what arrives, the batch, and arguments.
        compiled, graph = self.compiled, self.graph
        arrived = {**received.along, **received.use} if received else {}
        here = {v: self._here(v, arrived[v]) for v in (*graph.inputs, *graph.aux_inputs)}
        here.update((v, parts[microbatch]) for v, parts in self._data.items())
        found: ChainMap[Any, Any] = ChainMap(here, self.known, arrived)
        # [2] Compute.
        made = jax.block_until_ready(compiled.forward(*(found[v] for v in graph.arguments)))
        found.update(zip(compiled.made, made, strict=True))
        self.results[microbatch] = {i: found[i] for i in graph.results}
        self._kept[microbatch] = kept = [found[v] for v in compiled.kept]
        self.device.ledger.hold(id(kept), {id(kept): compiled.bytes})
        # [3] Hand on what later stages read.
        if not compiled.later:
            return None
        following, *others = compiled.later
        after = [v for reads in others for v in reads]
        return Parcel({v: found[v] for v in following}, {v: found[v] for v in after if v in found})

    def backward(self, microbatch: int, received: Parcel | None) -> Parcel:
        """Add to the parameters' gradients; returns those of what earlier stages made."""
        cotangents, kept = self._cotangents(received), self._kept.pop(microbatch)
        found = self.compiled.backward(self.gradients, cotangents, kept)
        self.gradients, gradients = jax.block_until_ready(found)
        self.device.ledger.drop(id(kept))
        return self._parcel(received, gradients)

    def input_grad(self, microbatch: int, received: Parcel | None) -> Parcel:
        """Gradients of what earlier stages made; keeps what `weight_grad` reads, and no more."""
        compiled, kept = self.compiled, self._kept.pop(microbatch)
        operands = self._cotangents(received), kept
        gradients, rest = jax.block_until_ready(compiled.input_grad(*operands))
        self._split[microbatch] = rest = put_in(operands, rest)
        own = {id(x) for v, x in zip(compiled.kept, kept, strict=True) if v in compiled.own}
        arrays = {id(x): bytes_on_mesh(x) for x in jax.tree.leaves(rest) if id(x) not in own}
        self.device.ledger.drop(id(kept))
        self.device.ledger.hold((id(self), microbatch), arrays)
        return self._parcel(received, gradients)

    def weight_grad(self, microbatch: int, received: Any = None) -> None:
        """Add to the parameters' gradients what `input_grad` left out."""
        found = self.compiled.weight_grad(self.gradients, self._split.pop(microbatch))
        self.gradients = jax.block_until_ready(found)
        self.device.ledger.drop((id(self), microbatch))

    def update(self, number: int, received: Any = None) -> None:
        self.known.update(zip(self.names, self.gradients, strict=True))
        for task in self.compiled.tasks:
            if not task.level:  # it waits for no other stage
                jax.block_until_ready(task(self.known))

    def _here(self, v: Var, x: Any) -> Any:
        """Nothing is moved, unless stages share a device."""
        return jax.device_put(x, self.device.place(v))

    def _cotangents(self, received: Parcel | None) -> list[Arrays]:
        """Per output its gradients, from all stages that read it."""
        if received is None:
            return [[self._seed]]
        return [[self._here(v, x) for x in received.use[v]] for v in self.graph.outputs]

    def _parcel(self, received: Parcel | None, gradients: Arrays) -> Parcel:
        """Gradients of the inputs join those that later stages found of the same variables."""
        found = {v: list(parts) for v, parts in received.along.items()} if received else {}
        for v, gradient in zip(self.graph.inputs, gradients, strict=True):
            found.setdefault(v, []).append(gradient)
        use = {v: found.pop(v) for v in list(found) if v in self.compiled.previous}
        return Parcel(use, found)

    # ---- what the worker asks of it (no sums and no news: there are no replicas and no partners)

    def snapshot(self) -> None: ...

    def trained(self) -> dict[str, Any]:
        """The results of the step have the weights."""
        return {}

    def complete(self, group: int) -> bool:
        return False  # nobody waits for that

    def held(self) -> Bytes:
        weights = self.compiled.parameter_bytes
        return Bytes(weights, 0, weights, self.compiled.optimizer_bytes)


@dataclass
class MeshJob(Job):
    """What one worker thread does: the stages of one mesh.

    finish  a `finish.Finish`: what is left when the row has ended
    """

    mesh_stages: dict[int, MeshStage]
    finish: Any

    @property
    def where(self) -> str:
        return f"mesh {self.row} ({', '.join(map(str, self.device.mesh.devices.flat))})"

    def home(self) -> MeshDevice:
        return self.device

    def stages(self, home: MeshDevice) -> dict[int, MeshStage]:
        return self.mesh_stages

    def after(self, stages: dict[int, MeshStage], transport: Transport) -> None:
        try:
            self.finish(self.row, list(stages.values()), transport)
        except Aborted:
            raise
        except Exception as error:
            text = f"{self.where}, the update's last part: {type(error).__name__}: {error}"
            raise RunError(text, self.row) from error
