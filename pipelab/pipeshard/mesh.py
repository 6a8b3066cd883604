"""A mesh as a device of the schedule, and its stages during one call, as a worker sees them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax
from jax.extend.core import Var
from jax.sharding import Mesh

from pipelab.jax.device import JaxDevice, moved
from pipelab.jax.jaxpr import Arrays, Values
from pipelab.jax.passes import Backwards
from pipelab.pipeshard.batch.microbatches import add_arrays
from pipelab.pipeshard.compiled import CompiledStage, Place
from pipelab.runtime.orders import Bytes, Order
from pipelab.runtime.stage import Stage
from pipelab.runtime.transport import Aborted, Transport
from pipelab.runtime.worker import Job, RunError

# What stages send: by variable an array, or on the way back its gradients. Stage 0 makes x for
# stage 1 and z for stage 2; stage 1 makes y:
#
#     from stage 0 to 1    x, which it uses, and z, which only passes through
#     from stage 1 to 2    y and z
Payload = dict[Var, Any]


class MeshDevice(JaxDevice):
    """A device of the schedule: a mesh of jax devices.

    numbers  that variables have between devices: other processes have variables of their own
    uses     variables that its stages read or make: these are moved to its mesh
    """

    def __init__(self, mesh: Mesh, place: Place, numbers: dict[Var, int]) -> None:
        super().__init__(mesh, place)
        self._numbers, self._variables = numbers, [*numbers]
        self.uses: set[Var] = set()

    def give(self, payload: Payload) -> Any:
        return {self._numbers[v]: x for v, x in payload.items()}

    def take(self, parcel: Any) -> Payload:
        return self.arrived({self._variables[n]: x for n, x in parcel.items()})

    def arrived(self, payload: Payload) -> Payload:
        """A payload, with what is used here on this mesh."""
        # What only passes through stays where it is, and is moved once, by the stage that uses it.
        here = {v: self.moved(v, x) for v, x in payload.items() if v in self.uses}
        self.wait([*here.values()])
        return payload | here

    def moved(self, v: Var, x: Any) -> Any:
        """The array of a variable, or its gradients, on this mesh: itself, if it is there."""
        home = self.place(v)
        return [moved(each, home) for each in x] if isinstance(x, list) else moved(x, home)

    def arrays(self, payload: Payload) -> Iterable[jax.Array]:
        return super().arrays([x for v, x in payload.items() if v in self.uses])


class MeshStage(Stage):
    """One stage during one call, as the worker sees it.

    compiled   its functions
    names      of parameters' gradients in the update
    known      on its mesh: variable -> array of an argument; the update adds what it makes
    pieces     leaf of the batch -> its part in each micro-batch
    seed       the gradient of a micro-batch's loss, if the step takes one
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
        device.uses.update((*self.graph.inputs, *self.graph.aux_inputs, *self.graph.outputs))
        # All at once: half the time of one by one.
        self._data = {v: jax.device_put(pieces[v], device.place(v)) for v in self.graph.data}
        starts = compiled.trains and not compiled.later
        self._seed = device.moved(self.graph.outputs[0], seed) if starts else None
        self.backwards = Backwards(device, id(self))
        self.results: dict[int, dict[int, Any]] = {}  # micro-batch -> number of a result -> array
        self.losses: dict[int, Any] = {}  # they are among the results

    # ---- the kinds of action

    def forward(self, microbatch: int, received: Payload | None) -> Payload | None:
        # [1] What this stage reads: some of what arrives, the batch, and arguments.
        compiled, graph = self.compiled, self.graph
        values: dict[Any, Any] = {**(received or {}), **self.known}
        for v in (*graph.inputs, *graph.aux_inputs):
            values[v] = self.device.moved(v, values[v])
        for v, pieces in self._data.items():
            values[v] = pieces[microbatch]
        # [2] Compute. Behind what the stage makes stands what the backward needs besides.
        arguments = [values[v] for v in graph.arguments]
        made = self.device.wait(compiled.forward(*arguments))
        own = [values[v] for v in compiled.own]
        if compiled.trains:
            self.backwards.keep(microbatch, compiled, arguments, made, own)
        values.update(zip(graph.made, made, strict=False))
        self.results[microbatch] = {i: values[i] for i in graph.results}
        # [3] Hand on what later stages read.
        if not compiled.later:
            return None
        return {v: values[v] for v in compiled.later if v in values}

    def backward(self, microbatch: int, received: Payload | None) -> Payload:
        """Add to the parameters' gradients; returns those of what earlier stages made."""
        return self._pull(self.backwards.backward, microbatch, received)

    def input_grad(self, microbatch: int, received: Payload | None) -> Payload:
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
        received: Payload | None,
    ) -> Payload:
        """Gradients of variables, one by each later stage that reads them -> the same for earlier.

        Stage 1 of the example above, which makes y of x:

            received from stage 2    y: [by 2]    z: [by 2]
            handed on to stage 0     x: [by 1]    z: [by 2]    z is not its own, and passes through
        """
        outputs, inputs = self.graph.outputs, self.graph.inputs
        # Nobody sends to the last stage: it starts with its share of the loss.
        gradients = {outputs[0]: [self._seed]} if received is None else received
        sums = [reduce(add_arrays, self.device.moved(v, gradients[v])) for v in outputs]
        mine = backward(microbatch, sums)
        # Its own join those that later stages found of the same variables.
        handed_on = {v: list(of) for v, of in gradients.items() if v not in outputs}
        for v, gradient in zip(inputs, mine, strict=True):
            handed_on.setdefault(v, []).append(gradient)
        return handed_on

    # ---- what the worker asks of it

    def trained(self) -> dict[str, Any]:
        """The results of the step have the weights."""
        return {}

    def held(self) -> Bytes:
        compiled = self.compiled
        return Bytes(compiled.parameter_bytes, 0, compiled.gradient_bytes, compiled.optimizer_bytes)


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

    def make_device(self) -> MeshDevice:
        return self.device

    def stages(self, device: MeshDevice) -> dict[int, MeshStage]:
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
