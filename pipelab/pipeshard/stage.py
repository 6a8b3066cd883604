"""One stage on its mesh: compiled once, then what a worker's actions do to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import Mesh, NamedSharding

from pipelab.executors.jax.device import JaxDevice
from pipelab.executors.worker import Bytes
from pipelab.pipeshard.cut import StageGraph
from pipelab.pipeshard.graph import dtype_of, function, shape_of
from pipelab.pipeshard.halves import Halves
from pipelab.pipeshard.update import Task

Place = Callable[[Var], NamedSharding]


class Parcel(NamedTuple):
    """What one stage hands to the next: what that one needs, and what only passes through it, left where it is.

    Forwards arrays by variable; backwards, by variable, the gradients that its readers found.
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


class CompiledStage:
    """A stage's forward and backward, compiled for its mesh.

    graph    its equations
    place    variable -> sharding in the mesh
    readers  variable -> how many stages send its gradient back
    split    whether the schedule has input and weight gradients apart

    `bytes` is what a forward leaves for its backward, on all devices of the mesh together.
    """

    def __init__(
        self, graph: StageGraph, place: Place, readers: Mapping[Var, int], split: bool
    ) -> None:
        self.graph, self.place, self._halves = graph, place, Halves(graph)
        inputs, made = ([spec(v, place) for v in vs] for vs in (graph.inputs, graph.made))
        placed = [place(v) for v in (*graph.made, *graph.telling)]
        self._ends = [len(graph.made), len(placed), len(placed) + len(graph.results)]
        shardings = [*placed, *[None] * (len(graph.results) + self._halves.saved)]
        lowered = jax.jit(self._halves.forward, out_shardings=shardings).lower(*inputs)
        self._forward = lowered.compile()
        found = list(zip(lowered.out_info, self._forward.output_shardings, strict=True))[
            self._ends[2] :
        ]
        saved = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x, sharding in found]
        self.bytes = sum(map(bytes_on_mesh, [*saved, *self._crossing(inputs, made)]))
        self._compile_backward(self._halves.keep(inputs, made, saved), readers, split)

    def _crossing(self, inputs: list[Any], made: list[Any]) -> list[Any]:
        """What is kept of the inputs from other stages, and of the results."""
        graph, known = self.graph, {"input": inputs, "made": made}
        own = {*graph.parameters, *graph.fixed, *graph.data}
        kept = [(kind, i) for kind, i in self._halves.kept if kind != "saved"]
        return [known[kind][i] for kind, i in kept if kind == "made" or graph.inputs[i] not in own]

    def _compile_backward(self, kept: list[Any], readers: Mapping[Var, int], split: bool) -> None:
        graph, place, halves = self.graph, self.place, self._halves
        sums = [spec(v, place) for v in graph.parameters]
        cotangents = [[spec(v, place)] * readers.get(v, 1) for v in graph.made]
        weights, back = [x.sharding for x in sums], [place(v) for v in graph.given]

        def add(sums: list, cotangents: list[list], kept: list) -> tuple[list, list]:
            gradients, given = halves.backward(cotangents, kept)
            return [a + b for a, b in zip(sums, gradients, strict=True)], given

        both = jax.jit(add, donate_argnums=0, out_shardings=(weights, back))
        self.backward = both.lower(sums, cotangents, kept).compile()
        if split:
            one = jax.jit(
                lambda cotangents, kept: halves.backward(cotangents, kept)[1], out_shardings=back
            )
            self.input_grad = one.lower(cotangents, kept).compile()
            other = jax.jit(lambda *given: add(*given)[0], donate_argnums=0, out_shardings=weights)
            self.weight_grad = other.lower(sums, cotangents, kept).compile()
        zeros = jax.jit(lambda: [jnp.zeros(x.shape, x.dtype) for x in sums], out_shardings=weights)
        self.zeros = zeros.lower().compile()

    def forward(self, inputs: list[Any]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """The graph's inputs on the mesh -> made, telling, results, and what the backward is given."""
        out = jax.block_until_ready(self._forward(*inputs))
        made, telling, results, saved = (out[a:b] for a, b in pairwise([0, *self._ends, len(out)]))
        return made, telling, results, self._halves.keep(inputs, made, saved)


class Batch(NamedTuple):
    """What a stage needs for one call, on its mesh: arrays of the step's arguments, and of each micro-batch."""

    parameters: list[Any]
    fixed: list[Any]
    data: list[list[Any]]
    seed: Any


class MeshStage:
    """One stage during one call, as the worker sees it.

    compiled  its functions
    batch     its arrays
    later     for each later stage, what it reads of earlier ones
    previous  what the stage before makes
    update    does the stage's own part of the update with its gradients; returns what to wait for
    other     bytes of optimizer state
    """

    versions_held = 1
    losses: Mapping[int, Any] = MappingProxyType({})  # the program has the results, see `results`
    steps: Sequence[Any] = ()

    def __init__(
        self,
        compiled: CompiledStage,
        device: MeshDevice,
        batch: Batch,
        later: Sequence[Collection[Var]],
        previous: Collection[Var],
        update: Callable[[list[Any]], Any],
        other: int,
    ) -> None:
        self.compiled, self.graph, self.device, self.batch = compiled, compiled.graph, device, batch
        self._later, self._previous, self._update, self._other = later, set(previous), update, other
        self.sums_now = compiled.zeros()
        self.results: dict[
            int, dict[int, Any]
        ] = {}  # micro-batch -> position among the loss's results -> array
        self._kept: dict[int, list[Any]] = {}
        self._halves: dict[int, list[list[Any]]] = {}
        self._left = len(batch.data)

    # ---- the kinds of action

    def forward(self, microbatch: int, given: Parcel | None) -> Parcel | None:
        graph, arrived = self.graph, {**given.along, **given.use} if given else {}
        given_here, told = (
            [self._here(v, arrived[v]) for v in group] for group in (graph.given, graph.told)
        )
        batch = self.batch
        inputs = [*batch.parameters, *given_here, *batch.fixed, *batch.data[microbatch], *told]
        made, telling, results, self._kept[microbatch] = self.compiled.forward(inputs)
        self.device.ledger.add(self.compiled.bytes)
        self.results[microbatch] = dict(zip(graph.results, results, strict=True))
        if not self._later:
            return None
        arrived.update(zip([*graph.made, *graph.telling], [*made, *telling], strict=True))
        after = {v for reads in self._later[1:] for v in reads}
        return Parcel(
            {v: arrived[v] for v in self._later[0]},
            {v: x for v, x in arrived.items() if v in after},
        )

    def backward(self, microbatch: int, given: Parcel | None) -> Parcel:
        """Add to the parameters' gradients; returns those of what earlier stages made."""
        cotangents = self._cotangents(given)
        out = self.compiled.backward(self.sums_now, cotangents, self._kept.pop(microbatch))
        self.sums_now, gradients = jax.block_until_ready(out)
        self._end()
        return self._parcel(given, gradients)

    def input_grad(self, microbatch: int, given: Parcel | None) -> Parcel:
        self._halves[microbatch] = self._cotangents(given)
        gradients = self.compiled.input_grad(self._halves[microbatch], self._kept[microbatch])
        return self._parcel(given, jax.block_until_ready(gradients))

    def weight_grad(self, microbatch: int, given: Any = None) -> None:
        cotangents, kept = self._halves.pop(microbatch), self._kept.pop(microbatch)
        self.sums_now = jax.block_until_ready(
            self.compiled.weight_grad(self.sums_now, cotangents, kept)
        )
        self._end()

    def update(self, number: int, given: Any = None) -> None:
        jax.block_until_ready(self._update(self.sums_now))

    def _here(self, v: Var, x: Any) -> Any:
        return jax.device_put(
            x, self.compiled.place(v)
        )  # nothing to do unless stages share a device

    def _cotangents(self, given: Parcel | None) -> list[list[Any]]:
        """Per variable made here, its gradients from all stages that read it."""
        if given is None:
            return [[self.batch.seed]]
        return [[self._here(v, x) for x in given.use[v]] for v in self.graph.made]

    def _parcel(self, given: Parcel | None, gradients: list[Any]) -> Parcel:
        found = {v: list(parts) for v, parts in given.along.items()} if given else {}
        for v, gradient in zip(self.graph.given, gradients, strict=True):
            found.setdefault(v, []).append(gradient)
        there = {v: parts for v, parts in found.items() if v in self._previous}
        return Parcel(there, {v: parts for v, parts in found.items() if v not in there})

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
        return self.sums_now

    def replace_sums(self, group: int, sums: list[Any]) -> None:
        self.sums_now = sums

    def news(self) -> Any:
        """Stages tell each other nothing before their updates: what needs others is done after all of them."""

    def held(self) -> Bytes:
        weights = sum(bytes_on_mesh(spec(v, self.compiled.place)) for v in self.graph.parameters)
        return Bytes(weights, 0, weights, self._other)


class CompiledTask:
    """One task of the update on its stage's mesh."""

    def __init__(self, task: Task, place: Place) -> None:
        self.task, self.place = task, place
        fun = jax.jit(
            function(task.inputs, task.outputs, task.equations),
            out_shardings=[place(v) for v in task.outputs],
        )
        self._fun = fun.lower(*(spec(v, place) for v in task.inputs)).compile()

    def __call__(self, known: dict[Var, Any]) -> list[Any]:
        """Add the task's outputs to what is known; returns them."""
        given = jax.device_put(
            [known[v] for v in self.task.inputs], [self.place(v) for v in self.task.inputs]
        )
        made = self._fun(*given)
        known.update(zip(self.task.outputs, made, strict=True))
        return made


def spec(v: Var, place: Place) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape_of(v), dtype_of(v), sharding=place(v))


def bytes_on_mesh(x: jax.ShapeDtypeStruct) -> int:
    """Bytes on all devices of the array's mesh together; what is replicated counts on each."""
    shape = x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize * x.sharding.num_devices
