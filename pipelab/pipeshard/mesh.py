"""A mesh as a device of the schedule, and its stages during one call, as a worker sees them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, NamedTuple

import jax
from jax.extend.core import Var
from jax.sharding import Mesh

from pipelab.pipeshard.arrays import moved
from pipelab.pipeshard.batch.microbatches import add_arrays
from pipelab.pipeshard.compiled import CompiledStage, Place
from pipelab.runtime.jax.device import JaxDevice
from pipelab.runtime.jax.jaxpr import Arrays, Values
from pipelab.runtime.jax.passes import Backwards
from pipelab.runtime.stage import Bytes, Stage
from pipelab.runtime.transport import Aborted, Transport
from pipelab.runtime.worker import Job, Order, RunError


class Parcel(NamedTuple):
    """A payload between stages: by variable an array, or on the way back its gradients.

    use    what the next stage needs, moved to its mesh
    along  what only passes through it, left where it is

    Stage 0 makes x for stage 1 and z for stage 2; stage 1 makes y:

        from stage 0 to 1    use x       along z
        from stage 1 to 2    use y, z
    """

    use: Values
    along: Values


class MeshDevice(JaxDevice):
    """A device of the schedule: a mesh of jax devices.

    numbers  that variables have between devices: other processes have variables of their own
    """

    def __init__(self, mesh: Mesh, place: Place, numbers: dict[Var, int]) -> None:
        super().__init__(mesh.devices.flat[0])
        self.mesh, self.place, self._numbers = mesh, place, numbers
        self._variables = [*numbers]

    def give(self, payload: Parcel) -> Any:
        return [{self._numbers[v]: x for v, x in part.items()} for part in payload]

    def take(self, parcel: Any) -> Parcel:
        use, along = ({self._variables[n]: x for n, x in part.items()} for part in parcel)
        return self.arrived(Parcel(use, along))

    def arrived(self, payload: Parcel) -> Parcel:
        """A payload, with what is used next on this mesh."""
        # What only passes through stays where it is, and is moved once, by the stage that uses it.
        here = {v: self.moved(v, x) for v, x in payload.use.items()}
        self.wait([*here.values()])
        return Parcel(here, payload.along)

    def moved(self, v: Var, x: Any) -> Any:
        """The array of a variable, or its gradients, on this mesh: itself, if it is there."""
        home = self.place(v)
        return [moved(each, home) for each in x] if isinstance(x, list) else moved(x, home)

    def arrays(self, payload: Parcel) -> Iterable[jax.Array]:
        return super().arrays(list(payload.use.values()))


class MeshStage(Stage):
    """One stage during one call, as the worker sees it.

    compiled   its functions
    names      of parameters' gradients in the update
    known      on its mesh: variable -> array of an argument; the update adds what it makes
    pieces     leaf of the batch -> its part in each micro-batch
    seed       the gradient of a micro-batch's loss
    """

    def __init__(
        self,
        compiled: CompiledStage,
        names: Mapping[Var, Var],
        device: MeshDevice,
        known: Values,
        pieces: dict[Var, Arrays],
        seed: Any,
    ) -> None:
        self.compiled, self.graph, self.names = compiled, compiled.graph, names
        self.device, self.known = device, known
        # All at once: half the time of one by one.
        self._data = {v: jax.device_put(pieces[v], device.place(v)) for v in self.graph.data}
        self._seed = None if compiled.later else device.moved(self.graph.outputs[0], seed)
        self.backwards = Backwards(device, id(self))
        self.results: dict[int, dict[int, Any]] = {}  # micro-batch -> number of a result -> array
        self.losses: dict[int, Any] = {}  # they are among the results

    # ---- the kinds of action

    def forward(self, microbatch: int, received: Parcel | None) -> Parcel | None:
        # [1] What this stage reads: some of what arrives, the batch, and arguments.
        compiled, graph = self.compiled, self.graph
        arrived = {**received.along, **received.use} if received else {}
        here = {v: self.device.moved(v, arrived[v]) for v in (*graph.inputs, *graph.aux_inputs)}
        here.update((v, parts[microbatch]) for v, parts in self._data.items())
        found: dict[Any, Any] = {**arrived, **self.known, **here}
        # [2] Compute.
        arguments = [found[v] for v in graph.arguments]
        made = self.device.wait(compiled.forward(*arguments))
        own = [found[v] for v in compiled.own]
        self.backwards.keep(microbatch, compiled, arguments, made, own)
        found.update(zip(graph.made, made, strict=False))
        self.results[microbatch] = {i: found[i] for i in graph.results}
        # [3] Hand on what later stages read.
        if not compiled.later:
            return None
        following, *others = compiled.later
        after = [v for reads in others for v in reads]
        return Parcel({v: found[v] for v in following}, {v: found[v] for v in after if v in found})

    def backward(self, microbatch: int, received: Parcel | None) -> Parcel:
        """Add to the parameters' gradients; returns those of what earlier stages made."""
        return self._pull(self.backwards.backward, microbatch, received)

    def input_grad(self, microbatch: int, received: Parcel | None) -> Parcel:
        return self._pull(self.backwards.input_grad, microbatch, received)

    def weight_grad(self, microbatch: int, received: Any = None) -> None:
        self.backwards.weight_grad(microbatch)

    def update(self, number: int, received: Any = None) -> None:
        total = self.compiled.total
        if total and self.backwards.sums:
            self.backwards.sums, done = total(self.backwards.sums)
            self.device.wait(done)
        self.known.update(self.gradients)
        for task in self.compiled.tasks:
            if not task.level:  # it waits for no other stage
                self.device.wait(task(self.known))

    @property
    def gradients(self) -> Values:
        """After the update: its parameters' gradients, by their names in it."""
        pairs = zip(self.graph.parameters, self.backwards.sums or (), strict=True)
        return {self.names[p]: g for p, g in pairs}

    def _pull(
        self,
        backward: Callable[[int, Arrays], Arrays],
        microbatch: int,
        received: Parcel | None,
    ) -> Parcel:
        """Per output its gradients, from all stages that read it -> those of the inputs."""
        # Nobody sends to the last stage: it starts with its share of the loss.
        use, along = received or Parcel({self.graph.outputs[0]: [self._seed]}, {})
        cotangents = [reduce(add_arrays, self.device.moved(v, use[v])) for v in self.graph.outputs]
        gradients = backward(microbatch, cotangents)
        # They join those that later stages found of the same variables.
        found = {v: list(parts) for v, parts in along.items()}
        for v, gradient in zip(self.graph.inputs, gradients, strict=True):
            found.setdefault(v, []).append(gradient)
        # What the stage before has made ends its way there; the rest goes on to earlier ones.
        previous = {v: found.pop(v) for v in list(found) if v in self.compiled.previous}
        return Parcel(previous, found)

    # ---- what the worker asks of it

    def trained(self) -> dict[str, Any]:
        """The results of the step have the weights."""
        return {}

    def held(self) -> Bytes:
        weights = self.compiled.parameter_bytes
        return Bytes(weights, 0, weights, self.compiled.optimizer_bytes)


@dataclass(kw_only=True)
class MeshJob(Job):
    """A worker's job: the stages of one mesh.

    processes  of all rows
    end_of_step  what is left when the row has ended: (row, its stages, transport), step by step
    """

    mesh_stages: dict[int, MeshStage]
    processes: Sequence[int]
    end_of_step: Callable[[int, Sequence[MeshStage], Transport], Iterator[None]]

    @property
    def where(self) -> str:
        return f"mesh {self.row} ({', '.join(map(str, self.device.mesh.devices.flat))})"

    def home(self) -> MeshDevice:
        return self.device

    def stages(self, home: MeshDevice) -> dict[int, MeshStage]:
        return self.mesh_stages

    def after(self, order: Order, stages: dict[int, MeshStage], transport: Transport) -> None:
        for _ in self.rounds(transport):
            pass

    def rounds(self, transport: Transport) -> Iterator[None]:
        """Do the end of the step; it pauses in each round, when it has sent what others receive."""
        try:
            yield from self.end_of_step(self.row, list(self.mesh_stages.values()), transport)
        except Aborted:
            raise
        except Exception as error:
            text = f"{self.where}, the update's last part: {type(error).__name__}: {error}"
            raise RunError(text, self.row) from error
