"""One stage on its mesh: compiled once, then what a worker's actions do to it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import Mesh, NamedSharding

from pipelab.executors.jax_device import JaxDevice
from pipelab.executors.worker import Bytes
from pipelab.pipeshard.cut import StageGraph
from pipelab.pipeshard.graph import dtype_of, function, shape_of
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
    """A stage's forward and backward on its mesh.

    graph    its equations
    place    variable -> sharding in the mesh
    readers  variable -> how many stages send its gradient back
    split    whether the schedule has input and weight gradients apart

    The forward is jax's vjp with its arguments hoisted: of what the backward needs, it returns only what is neither an
    argument nor a result (a jitted function would copy every parameter for every micro-batch otherwise).
    """

    def __init__(self, graph: StageGraph, mesh: Mesh, place: Place, readers: Mapping[Var, int],
                 split: bool) -> None:  # fmt: skip
        self.graph, self.place = graph, place
        self._fun = function(graph.inputs, [*graph.made, *graph.telling, *graph.results.values()], graph.equations)
        groups = (graph.parameters, graph.given, graph.fixed, graph.data, graph.told)
        inputs = [[spec(v, place) for v in group] for group in groups]
        shardings = ([place(v) for v in graph.made], [place(v) for v in graph.telling], None, None)
        lowered = jax.jit(self._forward, out_shardings=shardings).lower(*inputs)
        self.forward = lowered.compile()
        self.saved = _with_shardings(lowered.out_info[3], self.forward.output_shardings[3])
        kept = self.kept([x for group in inputs for x in group], [spec(v, place) for v in graph.made], self.saved)
        self.bytes = self._bytes()
        cotangents = [[spec(v, place)] * readers.get(v, 1) for v in graph.made]
        back = ([place(v) for v in graph.parameters], [place(v) for v in graph.given])
        both = jax.jit(self._backward, donate_argnums=0, out_shardings=back)
        self.backward = both.lower(inputs[0], cotangents, kept).compile()
        if split:
            one = jax.jit(lambda c, k: self._pull(c, k)[1], out_shardings=back[1])
            self.input_grad = one.lower(cotangents, kept).compile()
            other = jax.jit(lambda s, c, k: self._backward(s, c, k)[0], donate_argnums=0, out_shardings=back[0])
            self.weight_grad = other.lower(inputs[0], cotangents, kept).compile()
        zeros = jax.jit(lambda: [jnp.zeros(x.shape, x.dtype) for x in inputs[0]], out_shardings=back[0])
        self.zeros = zeros.lower().compile()

    def _forward(self, parameters: list, given: list, fixed: list, data: list, told: list) -> tuple:
        a = len(self.graph.made)
        b = a + len(self.graph.telling)

        def run(parameters: list, given: list) -> tuple[list, tuple[list, list]]:
            out = self._fun(*parameters, *given, *fixed, *data, *told)
            return out[:a], (out[a:b], out[b:])

        made, pullback, (telling, results) = jax.vjp(run, parameters, given, has_aux=True)
        leaves, self._tree = jax.tree.flatten(pullback)
        inputs = [*parameters, *given, *fixed, *data, *told]
        where: dict[int, tuple[str, int]] = {id(x): ("made", i) for i, x in enumerate(made)}
        where.update({id(x): ("input", i) for i, x in enumerate(inputs)})
        saved: list[Any] = []
        for x in leaves:
            if id(x) not in where:
                where[id(x)] = ("saved", len(saved))
                saved.append(x)
        self._where = [where[id(x)] for x in leaves]
        return made, telling, results, saved

    def kept(self, inputs: Sequence[Any], made: Sequence[Any], saved: Sequence[Any]) -> list[Any]:
        """What a backward starts from beside the gradients."""
        known = {"input": inputs, "made": made, "saved": saved}
        return [known[kind][i] for kind, i in dict.fromkeys(self._where)]

    def _pull(self, cotangents: list[list], kept: list) -> tuple[list, list]:
        known = dict(zip(dict.fromkeys(self._where), kept, strict=True))
        pullback = jax.tree.unflatten(self._tree, [known[where] for where in self._where])
        return pullback([sum(parts[1:], parts[0]) for parts in cotangents])

    def _backward(self, sums: list, cotangents: list[list], kept: list) -> tuple[list, list]:
        gradients, given = self._pull(cotangents, kept)
        return [a + b for a, b in zip(sums, gradients, strict=True)], given

    def _bytes(self) -> int:
        """What a forward leaves for its backward on the mesh, without arguments of the step."""
        graph, total = self.graph, sum(bytes_on_mesh(x) for x in self.saved)
        inputs = graph.inputs
        known = {"input": inputs, "made": graph.made}
        for kind, i in dict.fromkeys(self._where):
            if kind != "saved" and (v := known[kind][i]) in (*graph.given, *graph.told, *graph.made):
                total += bytes_on_mesh(spec(v, self.place))
        return total


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
        self, compiled: CompiledStage, device: MeshDevice, batch: Batch, later: Sequence[Collection[Var]],
        previous: Collection[Var], update: Callable[[list[Any]], Any], other: int,
    ) -> None:  # fmt: skip
        self.compiled, self.graph, self.device, self.batch = compiled, compiled.graph, device, batch
        self._later, self._previous, self._update, self._other = later, set(previous), update, other
        self.sums_now = compiled.zeros()
        self.results: dict[int, dict[int, Any]] = {}  # micro-batch -> position among the loss's results -> array
        self._kept: dict[int, list[Any]] = {}
        self._halves: dict[int, list[list[Any]]] = {}
        self._left = len(batch.data)

    # ---- the kinds of action

    def forward(self, microbatch: int, given: Parcel | None) -> Parcel | None:
        graph, arrived = self.graph, {**given.along, **given.use} if given else {}
        own = [[self._here(v, arrived[v]) for v in group] for group in (graph.given, graph.told)]
        data = self.batch.data[microbatch]
        arguments = (self.batch.parameters, own[0], self.batch.fixed, data, own[1])
        out = self.compiled.forward(*arguments)
        made, telling, results, saved = jax.block_until_ready(out)
        self._kept[microbatch] = self.compiled.kept([x for group in arguments for x in group], made, saved)
        self.device.ledger.add(self.compiled.bytes)
        self.results[microbatch] = dict(zip(graph.results, results, strict=True))
        if not self._later:
            return None
        arrived.update(zip([*graph.made, *graph.telling], [*made, *telling], strict=True))
        after = {v for reads in self._later[1:] for v in reads}
        return Parcel({v: arrived[v] for v in self._later[0]}, {v: x for v, x in arrived.items() if v in after})

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
        self.sums_now = jax.block_until_ready(self.compiled.weight_grad(self.sums_now, cotangents, kept))
        self._end()

    def update(self, number: int, given: Any = None) -> None:
        jax.block_until_ready(self._update(self.sums_now))

    def _here(self, v: Var, x: Any) -> Any:
        return jax.device_put(x, self.compiled.place(v))  # nothing to do unless stages share a device

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
        fun = jax.jit(function(task.inputs, task.outputs, task.equations), out_shardings=[place(v) for v in task.outputs])
        self._fun = fun.lower(*(spec(v, place) for v in task.inputs)).compile()

    def __call__(self, known: dict[Var, Any]) -> list[Any]:
        """Add the task's outputs to what is known; returns them."""
        given = jax.device_put([known[v] for v in self.task.inputs], [self.place(v) for v in self.task.inputs])
        made = self._fun(*given)
        known.update(zip(self.task.outputs, made, strict=True))
        return made


def spec(v: Var, place: Place) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape_of(v), dtype_of(v), sharding=place(v))


def _with_shardings(shapes: Iterable[Any], shardings: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in zip(shapes, shardings, strict=True)]


def bytes_on_mesh(x: jax.ShapeDtypeStruct) -> int:
    """Bytes on all devices of the array's mesh together; what is replicated counts on each."""
    shape = x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize * x.sharding.num_devices
