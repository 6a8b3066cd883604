"""One stage, compiled for its mesh: its forward, its backward, and its tasks of the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import NamedSharding

from pipelab.pipeshard.cut import StageGraph
from pipelab.pipeshard.graph import (
    depending,
    function,
    inline,
    needed,
    read_by,
    spec_of,
    variables,
)
from pipelab.pipeshard.update import Task

Place = Callable[[Var], NamedSharding]


class Passes:
    """A stage's forward and backward as two functions, and what goes from one to the other.

    The forward is jax's vjp: beside the stage's outputs it returns the leaves of a pullback, which
    are all that the backward needs. By where they come from, they are treated in three ways:

        an argument or an output of the stage     at hand anyway: kept, but not returned again
        made of parameters and constants alone    (a cast, zeros) not kept: the backward makes it
        anything else                             saved: these are the activations

    A jitted function that returned its arguments would copy them, every parameter for every
    micro-batch.

    saved  variables of the third kind, which the forward returns
    kept   variables of all values that are kept for the backward
    """

    def __init__(self, graph: StageGraph) -> None:
        # [1] Trace the forward together with its pullback.
        results = [*graph.outputs, *graph.aux_outputs, *graph.results.values()]
        groups = (graph.outputs, graph.aux_outputs, graph.results)
        self._ends = list(accumulate(map(len, groups)))
        run = function(graph.arguments, results, graph.equations)
        count = len(graph.outputs)

        def differentiate(parameters: list, inputs: list, others: list) -> tuple[list, Any]:
            def forward(parameters: list, inputs: list) -> tuple[list, list]:
                out = run(*parameters, *inputs, *others)
                return out[:count], out[count:]

            outputs, pullback, rest = jax.vjp(forward, parameters, inputs, has_aux=True)
            return [*outputs, *rest], pullback

        others = [*graph.fixed, *graph.data, *graph.aux_inputs]
        specs = [list(map(spec_of, vs)) for vs in (graph.parameters, graph.inputs, others)]
        closed, (_, pullback) = jax.make_jaxpr(differentiate, return_shape=True)(*specs)
        self._pullback = jax.tree.structure(pullback)
        traced = inline(closed)
        self._consts = list(traced.consts.values())
        results, leaves = traced.outputs[: len(results)], traced.outputs[len(results) :]
        self._at_hand = [*results[:count], *traced.inputs]

        # [2] Sort the pullback's leaves by where they come from.
        names = dict(zip(graph.arguments, traced.inputs, strict=True))
        arriving = [names[v] for v in (*graph.inputs, *graph.data, *graph.aux_inputs)]
        varying = depending(traced.equations, arriving)
        at_hand = set(variables(self._at_hand))
        steady = [v for v in variables(leaves) if v not in varying and v not in at_hand]
        pure = [eqn for eqn in traced.equations if not eqn.effects]
        again = needed(pure, steady)
        self.kept = [v for v in read_by(again, leaves) if v not in traced.consts]
        self.saved = [v for v in self.kept if v not in at_hand]
        self._own = {names[v] for v in (*graph.parameters, *graph.fixed, *graph.data)}

        # [3] The two functions.
        self._forward = function(traced.sources, [*results, *self.saved], traced.equations)
        self._leaves = function([*self.kept, *traced.consts], leaves, again)

    def forward(self, *arguments: Any) -> tuple[list[Any], ...]:
        """The stage's arguments -> outputs, aux_outputs, results, saved."""
        out = self._forward(*arguments, *self._consts)
        a, b, c = self._ends
        return out[:a], out[a:b], out[b:c], out[c:]

    def keep(self, arguments: Sequence[Any], outputs: Sequence[Any], saved: Sequence[Any]) -> list:
        """What a backward needs beside the gradients of the outputs."""
        pairs = zip([*self._at_hand, *self.saved], [*outputs, *arguments, *saved], strict=True)
        known = {atom: value for atom, value in pairs if isinstance(atom, Var)}
        return [known[v] for v in self.kept]

    def activations(self, kept: Sequence[Any]) -> list[Any]:
        """Of what is kept, what would be gone without the backward: no parameters, no data."""
        return [value for v, value in zip(self.kept, kept, strict=True) if v not in self._own]

    def backward(
        self, cotangents: Sequence[Sequence[Any]], kept: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Gradients of the parameters and of the inputs.

        cotangents  per output its gradients, one from each stage that reads it
        """
        leaves = self._leaves(*kept, *self._consts)
        pullback = jax.tree.unflatten(self._pullback, leaves)
        return pullback([sum(parts[1:], parts[0]) for parts in cotangents])


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
        def specs(vs: Sequence[Var]) -> list[jax.ShapeDtypeStruct]:
            return [spec_of(v, place(v)) for v in vs]

        def places(vs: Sequence[Var]) -> list[NamedSharding]:
            return [place(v) for v in vs]

        self.graph, self.place = graph, place
        self._passes = passes = Passes(graph)
        arguments, outputs = specs(graph.arguments), specs(graph.outputs)
        shardings = (places(graph.outputs), places(graph.aux_outputs), None, None)
        self._forward = _compiled(passes.forward, shardings, *arguments)
        found = zip(passes.saved, self._forward.output_shardings[3], strict=True)
        kept = passes.keep(arguments, outputs, [spec_of(v, sharding) for v, sharding in found])
        self.bytes = sum(map(bytes_on_mesh, passes.activations(kept)))

        # The backward adds to the sums of the parameters' gradients, in place (donated).
        sums = specs(graph.parameters)
        cotangents = [[spec_of(v, place(v))] * readers.get(v, 1) for v in graph.outputs]
        weights, back = places(graph.parameters), places(graph.inputs)

        def add(sums: list, cotangents: list[list], kept: list) -> tuple[list, list]:
            gradients, inputs = passes.backward(cotangents, kept)
            return [a + b for a, b in zip(sums, gradients, strict=True)], inputs

        def only_inputs(cotangents: list[list], kept: list) -> list:
            return passes.backward(cotangents, kept)[1]

        def only_weights(sums: list, cotangents: list[list], kept: list) -> list:
            return add(sums, cotangents, kept)[0]

        self.backward = _compiled(add, (weights, back), sums, cotangents, kept, donate=0)
        if split:
            self.input_grad = _compiled(only_inputs, back, cotangents, kept)
            self.weight_grad = _compiled(only_weights, weights, sums, cotangents, kept, donate=0)
        self.zeros = _compiled(lambda: [jnp.zeros(x.shape, x.dtype) for x in sums], weights)

    def forward(self, arguments: list[Any]) -> tuple[list[Any], list[Any], list[Any], list[Any]]:
        """On the mesh: outputs, aux_outputs, results, and what is kept for the backward."""
        found = jax.block_until_ready(self._forward(*arguments))
        outputs, aux_outputs, results, saved = found
        return outputs, aux_outputs, results, self._passes.keep(arguments, outputs, saved)


class CompiledTask:
    """One task of the update on its stage's mesh."""

    def __init__(self, task: Task, place: Place) -> None:
        self.task = task
        self._places = [place(v) for v in task.inputs]
        self._run = _compiled(
            function(task.inputs, task.outputs, task.equations),
            [place(v) for v in task.outputs],
            *map(spec_of, task.inputs, self._places),
        )

    def __call__(self, known: dict[Var, Any]) -> list[Any]:
        """Add the task's outputs to what is known; returns them."""
        inputs = jax.device_put([known[v] for v in self.task.inputs], self._places)
        outputs = self._run(*inputs)
        known.update(zip(self.task.outputs, outputs, strict=True))
        return outputs


def _compiled(fun: Callable, shardings: Any, *specs: Any, donate: Any = ()) -> Any:
    jitted = jax.jit(fun, donate_argnums=donate, out_shardings=shardings)
    return jitted.lower(*specs).compile()


def bytes_on_mesh(x: jax.ShapeDtypeStruct) -> int:
    """Bytes on all devices of the array's mesh together; what is replicated counts on each."""
    shape = x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize * x.sharding.num_devices
