"""One stage, compiled for its mesh: its forward, its backward, and its tasks of the update."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Var
from jax.sharding import NamedSharding

from pipelab.executors.jax.graph import Arrays, Graph, Variables, inline, needed, read_by, variables
from pipelab.executors.jax.split import leave_out, put_in, split
from pipelab.pipeshard.cut import StageGraph
from pipelab.pipeshard.graph import spec_of
from pipelab.pipeshard.update import Task

Place = Callable[[Var], NamedSharding]
Specs = list[jax.ShapeDtypeStruct]


def passes(graph: StageGraph) -> tuple[Callable, Callable, list[Any], Variables]:
    """A stage's forward and backward as two functions, and what goes from one to the other.

    The forward is jax's vjp: beside the stage's outputs it returns the leaves of a pullback, which
    are all that the backward needs. By where they come from, they are treated in three ways:

        an argument or an output of the stage     at hand anyway: kept, but not returned again
        made of parameters and constants alone    (a cast, zeros) not kept: the backward makes it
        anything else                             saved: these are the activations

    A jitted function that returned its arguments would copy them, every parameter for every
    micro-batch.

    Returns

    forward   the stage's arguments -> `made`
    backward  (per output its gradients, one from each stage that reads it; `kept`) -> gradients of
              the parameters, and of the inputs
    made      what the forward returns: variables, and the numbers of the loss's results
    kept      variables of what is kept for the backward
    """
    # [1] Trace the forward together with its pullback.
    stage, count = graph.whole, len(graph.outputs)

    def differentiate(parameters, inputs, others):
        def forward(parameters, inputs):
            out = stage.run(*parameters, *inputs, *others)
            return out[:count], out[count:]

        outputs, pullback, rest = jax.vjp(forward, parameters, inputs, has_aux=True)
        return [*outputs, *rest], pullback

    others = [*graph.fixed, *graph.data, *graph.aux_inputs]
    shapes = [list(map(spec_of, vs)) for vs in (graph.parameters, graph.inputs, others)]
    closed, (_, pullback) = jax.make_jaxpr(differentiate, return_shape=True)(*shapes)
    traced = inline(closed, graph.arguments)
    end = len(stage.outputs)
    results, leaves = traced.outputs[:end], traced.outputs[end:]

    # [2] Sort the pullback's leaves by where they come from.
    #
    #         h = x @ w.astype(bfloat16);  y = tanh(h)      the pullback needs x, the cast w, y
    #
    #     x and y are at hand; the cast is made again of w, which is at hand; nothing is saved.
    arriving = (*graph.inputs, *graph.data, *graph.aux_inputs)
    varying = traced.depending(arriving)  # another one in every micro-batch
    pairs = zip(results[:count], graph.outputs, strict=True)
    at_hand = {atom: v for atom, v in pairs if isinstance(atom, Var)}
    at_hand.update((v, v) for v in graph.arguments)
    steady = [v for v in variables(leaves) if v not in varying and v not in at_hand]
    pure = [eqn for eqn in traced.equations if not eqn.effects]
    again = needed(pure, steady)
    kept = [v for v in read_by(again, leaves) if v not in traced.consts]
    saved = [v for v in kept if v not in at_hand]

    # [3] The forward, and what makes the pullback's leaves of what is kept.
    forward = replace(traced, inputs=graph.arguments, outputs=[*results, *saved]).run
    make_leaves = Graph(kept, leaves, again, traced.consts).run

    def backward(cotangents: list[Arrays], kept: Arrays) -> tuple[Arrays, Arrays]:
        pull = jax.tree.unflatten(jax.tree.structure(pullback), make_leaves(*kept))
        return pull([sum(parts) for parts in cotangents])

    made = [*graph.outputs, *graph.aux_outputs, *graph.results, *saved]
    return forward, backward, made, [at_hand.get(v, v) for v in kept]


class CompiledStage:
    """A stage's forward and backward, compiled for its mesh, with its part of the update.

    graph     its equations
    forward   its arguments -> what is `made`; of it and of these, `kept` is for the backward
    own       of these, what is there with or without a backward: parameters, constants, data
    later     for each later stage, what it reads of earlier ones
    previous  what the stage before makes
    unsplit   parameters whose gradients come with the inputs', and why
    tasks     its tasks of the update
    bytes     what a forward leaves for its backward, on all devices of the mesh together;
              `parameter_bytes` of its parameters, `optimizer_bytes` of the state that tasks read
    """

    def __init__(
        self,
        graphs: list[StageGraph],
        s: int,
        place: Place,
        apart: bool,
        tasks: Iterable[Task],
        state: set[Var],
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Stage `s` of these.

        apart  whether input and weight gradients of the schedule are
        tasks  of all stages
        state  the step's arguments beside parameters
        options  for the compiler
        """
        compiled = partial(_compiled, options=options)
        # [1] What its neighbours need to know.
        self.graph = graph = graphs[s]
        self.later = [[*other.inputs, *other.aux_inputs] for other in graphs[s + 1 :]]
        self.previous = graphs[s - 1].outputs if s else []
        readers = Counter(v for other in graphs for v in other.inputs)
        # [2] The forward. The compiler chooses where results and activations lie.
        run, pull, self.made, self.kept = passes(graph)
        sums, inputs = specs(graph.parameters, place), specs(graph.inputs, place)
        outputs = specs(graph.outputs, place)
        sent = [*outputs, *specs(graph.aux_outputs, place)]
        results = [*sent, *[None] * (len(self.made) - len(sent))]
        self.forward = compiled(run, results, *specs(graph.arguments, place))
        found = dict(zip(self.made, self.forward.output_shardings, strict=True))
        kept = {v: spec_of(v, found.get(v) or place(v)) for v in self.kept}
        self.own = {*graph.parameters, *graph.fixed, *graph.data}
        self.bytes = sum(bytes_on_mesh(x) for v, x in kept.items() if v not in self.own)
        self.parameter_bytes = sum(map(bytes_on_mesh, sums))

        # [3] The backward adds to the sums of the parameters' gradients, in place (donated). It
        #     needs a gradient of every output from each stage that reads it, and one of the loss.
        cotangents = [[x] * (readers[v] or 1) for v, x in zip(graph.outputs, outputs, strict=True)]
        backward = (cotangents, list(kept.values()))

        def add(sums, cotangents, kept):
            gradients, back = pull(cotangents, kept)
            return jax.tree.map(jnp.add, sums, gradients), back

        self.zeros = compiled(lambda: [jnp.zeros(x.shape, x.dtype) for x in sums], sums)
        self.backward = compiled(add, (sums, inputs), sums, *backward, donate=0)
        self.unsplit: dict[Var, str] = {}
        if apart:
            self._compile_apart(pull, compiled, sums, inputs, backward)

        # [4] The update.
        self.tasks = [CompiledTask(task, place) for task in tasks if task.stage == s]
        read = {v for task in self.tasks for v in task.inputs}
        self.optimizer_bytes = sum(map(bytes_on_mesh, specs(read & state, place)))

    def _compile_apart(
        self, pull: Callable, compiled: Callable, sums: Specs, inputs: Specs, operands: Any
    ) -> None:
        """Input and weight gradients: what one leaves for the other lies as the compiler chooses.

        input_grad   operands of `pull` -> gradients of the inputs, and the rest: what the other one
                     reads, without what is an operand
        weight_grad  (sums, rest) -> the sums with the parameters' gradients
        """

        def input_grad(*operands):
            gradients, rest = split(pull, *operands)
            return gradients, leave_out(operands, rest)

        def weight_grad(sums, rest):
            return [a + b for a, b in zip(sums, rest.gradients(), strict=True)]

        self.input_grad = compiled(input_grad, (inputs, None), *operands)
        _, made = jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            self.input_grad.out_info,
            self.input_grad.output_shardings,
        )
        rest = put_in(operands, made)
        pairs = zip(self.graph.parameters, rest.unsplit, strict=True)
        self.unsplit = {v: why for v, why in pairs if why}
        self.weight_grad = compiled(weight_grad, sums, sums, rest, donate=0)


class CompiledTask(Task):
    """A task of the update, compiled for its stage's mesh."""

    def __init__(self, task: Task, place: Place) -> None:
        super().__init__(**vars(task))
        inputs = specs(task.inputs, place)
        self._places = [x.sharding for x in inputs]
        graph = Graph(task.inputs, task.outputs, task.equations)
        donate = [i for i, v in enumerate(task.inputs) if v in task.donated]
        self._run = _compiled(graph.run, specs(task.outputs, place), *inputs, donate=donate)

    def __call__(self, known: MutableMapping[Var, Any]) -> Arrays:
        """Add the task's outputs to what is known; returns them."""
        inputs = jax.device_put([known[v] for v in self.inputs], self._places)
        outputs = self._run(*inputs)
        known.update(zip(self.outputs, outputs, strict=True))
        return outputs


def specs(of: Iterable[Var], place: Place) -> Specs:
    return [spec_of(v, place(v)) for v in of]


def _compiled(
    fun: Callable, results: Any, *arguments: Any, donate: Any = (), options: Any = None
) -> Any:
    """Compiled for arrays like these; None: the results' shardings are the compiler's choice."""
    shardings = jax.tree.map(lambda x: x.sharding, results)
    jitted = jax.jit(fun, donate_argnums=donate, out_shardings=shardings)
    return jitted.lower(*arguments).compile(options)


def bytes_on_mesh(x: jax.ShapeDtypeStruct | jax.Array) -> int:
    """Bytes on all devices of the array's mesh together; what is replicated counts on each."""
    shape = x.sharding.shard_shape(x.shape)
    return math.prod(shape) * x.dtype.itemsize * x.sharding.num_devices
