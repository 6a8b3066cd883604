"""A stage's forward and backward: traced once, compiled for its arrays' placement, and run.

A stage of the jax backend is one on a single device; pipeshard's is one on a mesh of devices.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Var

from pipelab.jax.device import JaxDevice, bytes_on_mesh
from pipelab.jax.jaxpr import Arrays, Graph, inline, needed, read_by, spec_of, variables
from pipelab.jax.split import split_backward
from pipelab.table.action import Kind

Specs = list[jax.ShapeDtypeStruct]
# Numbers have the digits that their types say, whatever is computed in one go: else another way to
# compile the same, such as on one device, rounds elsewhere.
EXACT: dict[str, str | bool] = {"xla_allow_excess_precision": False}
# A number that a backward returns beside its sums: these are gone when the next one adds to them.
DONE = np.int8(0)


class Groups(NamedTuple):
    """A stage's arguments: trees of arrays, or of their shapes and where they lie.

                  the same for all micro-batches      another for each
    gradient      parameters                          inputs
    none          fixed                               data
    """

    parameters: Any
    fixed: Any
    inputs: Any
    data: Any


class Passes(NamedTuple):
    """A stage's forward and backward as equations, and what passes between them.

    forward   arguments -> outputs, other results, saved
    backward  gradients of the outputs, then kept -> gradients of the parameters, of the inputs
    kept      what the backward reads, by its number in [*arguments, *what the forward returns]
    results   the trees of the outputs and of the other results
    """

    forward: Graph
    backward: Callable[..., tuple[Arrays, Arrays]]
    kept: list[int]
    results: tuple[Any, Any]

    @property
    def sent(self) -> int:
        """How many outputs and other results the forward has."""
        return sum(tree.num_leaves for tree in self.results)

    @property
    def operands(self) -> list[Any]:
        """Variables like what the backward is given."""
        every = [*self.forward.inputs, *self.forward.outputs]
        outputs = self.forward.outputs[: self.results[0].num_leaves]
        return [*outputs, *(every[i] for i in self.kept)]


def differentiate(run: Callable, arguments: Groups) -> tuple[tuple[Any, Any], Callable]:
    """The results of `run`, and its pullback: outputs' gradients -> parameters' and inputs'."""

    def forward(parameters: Any, inputs: Any) -> Any:
        return run(parameters, arguments.fixed, inputs, arguments.data)

    parameters, inputs = arguments.parameters, arguments.inputs
    outputs, pullback, others = jax.vjp(forward, parameters, inputs, has_aux=True)
    return (outputs, others), pullback


def passes(run: Callable, shapes: Groups) -> Passes:
    """Trace a stage with its pullback, by jax's own vjp.

    run  (*groups) -> outputs, which have gradients, and other results

    The leaves of the pullback are all that the backward needs. Their origin decides their
    treatment:

        an argument or a result of the forward    at hand anyway: kept, but not returned again
        made of parameters and constants alone    (a cast, zeros) not kept: the backward makes it
        anything else                             saved: these are the activations

    A jitted function that returned its arguments would copy every parameter for every micro-batch.
    """
    # [1] Trace the forward together with its pullback.
    trace = jax.make_jaxpr(lambda *of: differentiate(run, Groups(*of)), return_shape=True)
    closed, (results, pullback) = trace(*shapes)
    traced = inline(closed)
    end = len(jax.tree.leaves(results))
    made, leaves = traced.outputs[:end], traced.outputs[end:]

    # [2] Sort the pullback's leaves by where they come from.
    #
    #         h = x @ w.astype(bfloat16);  y = tanh(h)      the pullback needs x, the cast w, y
    #
    #     x and y are at hand; the cast is made again of w, which is at hand; nothing is saved.
    at_hand = {*traced.inputs, *variables(made)}
    steady = len(jax.tree.leaves((shapes.parameters, shapes.fixed)))
    varying = traced.depending(traced.inputs[steady:])  # another one in every micro-batch
    pure = [eqn for eqn in traced.equations if not eqn.effects]
    again = needed(pure, [v for v in variables(leaves) if v not in varying and v not in at_hand])
    kept = [v for v in read_by(again, leaves) if v not in traced.consts]
    saved = [v for v in kept if v not in at_hand]

    # [3] The forward, and the backward: it makes the pullback's leaves of what is kept.
    forward = replace(traced, outputs=[*made, *saved])
    number: dict[Any, int] = {}
    # By its first number: an output that is an argument is at hand as that.
    for i, v in enumerate([*traced.inputs, *forward.outputs]):
        if isinstance(v, Var):
            number.setdefault(v, i)
    make_leaves = Graph(kept, leaves, again, traced.consts).run
    trees: list[Any] = [jax.tree.structure(part) for part in (*results, pullback)]

    def backward(*operands: Any) -> tuple[Arrays, Arrays]:
        count = trees[0].num_leaves
        pull = jax.tree.unflatten(trees[2], make_leaves(*operands[count:]))
        parameters, inputs = pull(jax.tree.unflatten(trees[0], operands[:count]))
        return jax.tree.leaves(parameters), jax.tree.leaves(inputs)

    return Passes(forward, backward, [number[v] for v in kept], (trees[0], trees[1]))


class Pullback:
    """How devices share a backward: here they run it together, and the compiler divides it.

    passes    of a device
    operands  the ways of what its backward is given, `back` of the gradients of the inputs
    own       the way of an array that is each device's own. There are ways for those that devices
              run apart (`pipeshard.unreduced`); here all are None
    """

    own: Any = None

    def __init__(self, passes: Passes, inputs: int) -> None:
        self.passes, self.back = passes, [self.own] * inputs
        self.operands = [self.own] * len(passes.operands)

    def sums(self, parameters: Specs) -> Specs:
        """The sums of the parameters' gradients."""
        return parameters

    def each(self, run: Callable, given: Sequence[Any], made: Sequence[Any]) -> Callable:
        """`run`, on each device: arrays that go there by their ways -> arrays."""
        return run


class Compiled:
    """A stage's passes, compiled for arguments that lie as their shapes say.

    forward      arguments -> outputs, other results, saved
    backward     (sums, operands) -> the sums with the parameters' gradients added, in place, the
                 gradients of the inputs, and `DONE`; operands: gradients of the outputs, then kept
    input_grad   (*operands) -> the gradients of the inputs, then what crosses to
    weight_grad  (sums, what it reads: `read` of [*operands, *crossing]) -> the sums, and `DONE`
    zeros        () -> the sums to begin with
    sums         of the parameters' gradients, as shapes
    kept         as `Passes` has it; `kept_shapes` of these
    unsplit      for each parameter None, or why I computes its gradient, which W should
    """

    def __init__(
        self,
        passes: Passes,
        arguments: Groups,
        kinds: Collection[Kind] = (Kind.B,),
        sent: Sequence[Any] = (),
        options: Mapping[str, Any] | None = None,
        pullback: Pullback | None = None,
    ) -> None:
        """The compiler chooses where results lie that have no sharding in `sent`.

        kinds     of actions: B is compiled, or I and W
        options   for the compiler
        pullback  how devices share the backward; default: the compiler divides it
        """
        # [1] The forward.
        self.passes, self.kept = passes, passes.kept
        self.unsplit: Sequence[str | None] = ()
        flat, build = jax.tree.leaves(arguments), partial(compile_passes, options=options)
        results = [*sent, *[None] * (len(passes.forward.outputs) - len(sent))]
        self.forward = build(passes.forward.run, results, *flat)
        made = _lying(self.forward, passes.forward.outputs)
        self.kept_shapes = [[*flat, *made][i] for i in self.kept]
        # [2] The backward adds to sums, whose memory it takes (donated).
        parameters, self.inputs = map(jax.tree.leaves, (arguments.parameters, arguments.inputs))
        shared = pullback or Pullback(passes, len(self.inputs))
        self.sums = sums = list(map(sum_spec, shared.sums(parameters)))
        operands = [*made[: passes.results[0].num_leaves], *self.kept_shapes]
        run = shared.each(
            lambda *operands: list(chain(*shared.passes.backward(*operands))),
            shared.operands,
            [*[shared.own] * len(sums), *shared.back],
        )

        def backward(sums: Arrays, operands: Arrays) -> Any:
            made = run(*operands)
            return _added(sums, made), made[len(sums) :], DONE

        where = [x.sharding for x in sums], [x.sharding for x in self.inputs], None
        self.zeros = _zeros(tuple(sums), jax.config.read("jax_enable_x64"))
        if Kind.B in kinds:
            self.backward = build(backward, where, sums, operands, donate=0)
        if Kind.I in kinds:
            self._build_in_two(build, shared, operands, sums)

    def _build_in_two(
        self, build: Callable, shared: Pullback, operands: Specs, sums: Specs
    ) -> None:
        """I and W; what I leaves for W lies as the compiler chooses."""
        back, mine = shared.back, map(spec_of, shared.passes.operands)
        halves = split_backward(shared.passes.backward, *mine)
        self.read, self.unsplit, crossing = halves.read, halves.unsplit, len(halves.crossing)
        first = shared.each(halves.now.run, shared.operands, [*back, *[shared.own] * crossing])
        places = [*(x.sharding for x in self.inputs), *[None] * crossing]
        self.input_grad = build(first, places, *operands)
        made = _lying(self.input_grad, jax.eval_shape(first, *operands))
        whole = [*operands, *made[len(back) :]]
        ways = [*shared.operands, *[shared.own] * crossing]
        second = shared.each(
            halves.later.run, [ways[i] for i in self.read], [shared.own] * len(sums)
        )

        def weight_grad(sums: Arrays, read: Arrays) -> Any:
            return _added(sums, second(*read)), DONE

        read, where = [whole[i] for i in self.read], ([x.sharding for x in sums], None)
        self.weight_grad = build(weight_grad, where, sums, read, donate=0)

    def results(self, made: Arrays) -> tuple[Any, Any]:
        """The outputs and the other results, as trees, of what the forward returned."""
        outputs, others = self.passes.results
        count = outputs.num_leaves
        return outputs.unflatten(made[:count]), others.unflatten(made[count : self.passes.sent])


def compile_passes(
    fun: Callable, results: Any, *arguments: Any, donate: Any = (), options: Any = None
) -> Any:
    """Compile for arrays like these; None in `results`: the compiler chooses their sharding."""
    jitted = jax.jit(fun, donate_argnums=donate, out_shardings=results)
    return jitted.lower(*arguments).compile(options)


@lru_cache(maxsize=64)
def _zeros(like: tuple[jax.ShapeDtypeStruct, ...], double: bool) -> Any:
    """The program that makes zeros like these: equal stages share it, also in later runs.

    double  whether there are types of 64 bits
    """
    return compile_passes(
        lambda: [jnp.zeros(x.shape, x.dtype) for x in like], [x.sharding for x in like]
    )


def _lying(program: Any, results: Iterable[Any]) -> Specs:
    """The shapes of what a program returns, and where it lies."""
    return list(map(spec_of, results, program.output_shardings))


def sum_type(dtype: Any) -> Any:
    """The type in which gradients or losses of this type are added up: no float below float32."""
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if narrow else dtype


def sum_spec(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The sum of gradients of a parameter like this."""
    return x.update(dtype=sum_type(x.dtype))


def _added(sums: Arrays, gradients: Arrays) -> Arrays:
    return [total + g.astype(total.dtype) for total, g in zip(sums, gradients, strict=False)]


class Kept(NamedTuple):
    """Arrays kept of a micro-batch for its backward, or between I and W.

    own  addresses of arrays that are there with or without it, and not counted as activations
    """

    stage: Compiled
    arrays: Arrays
    own: set[int]


class Backwards:
    """The backwards to come of a stage: what is kept for each, and the sums of the gradients.

    sums  of the parameters' gradients; None before the first
    """

    def __init__(self, device: JaxDevice, owner: int) -> None:
        self.ledger, self.wait, self.owner = device.ledger, device.wait, owner
        self.sums: Arrays | None = None
        self._kept: dict[int, Kept] = {}  # by micro-batch

    def keep(
        self, microbatch: int, stage: Compiled, arguments: Arrays, made: Arrays, own: Arrays
    ) -> None:
        """Keep of a forward what its backward reads."""
        every = [*arguments, *made]
        self._hold(microbatch, Kept(stage, [every[i] for i in stage.kept], set(map(id, own))))

    def backward(self, microbatch: int, cotangents: Arrays) -> Arrays:
        """Add to the sums; returns the gradients of the inputs."""
        stage, kept, _ = self._kept[microbatch]
        operands = [*cotangents, *kept]
        self.sums, gradients, done = stage.backward(self._total(stage), operands)
        self.wait(done)
        self._drop(microbatch)
        return gradients

    def input_grad(self, microbatch: int, cotangents: Arrays) -> Arrays:
        """Gradients of the inputs; keeps what `weight_grad` reads, and no more."""
        stage, kept, own = self._kept[microbatch]
        operands = [*cotangents, *kept]
        found = self.wait(stage.input_grad(*operands))
        gradients, crossing = found[: len(stage.inputs)], found[len(stage.inputs) :]
        every = [*operands, *crossing]
        self._drop(microbatch)
        self._hold(microbatch, Kept(stage, [every[i] for i in stage.read], own))
        return gradients

    def weight_grad(self, microbatch: int) -> None:
        """Add to the sums what `input_grad` left out."""
        stage, read, _ = self._kept[microbatch]
        self.sums, done = stage.weight_grad(self._total(stage), read)
        self.wait(done)
        self._drop(microbatch)

    def skip(self, microbatch: int) -> Arrays:
        """Zero gradients of the inputs, for a micro-batch that counts nothing."""
        if microbatch not in self._kept:  # it is a W, and I was skipped
            return []
        inputs = self._kept[microbatch].stage.inputs
        self._drop(microbatch)
        return [jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding) for x in inputs]

    def _total(self, stage: Compiled) -> Arrays:
        return stage.zeros() if self.sums is None else self.sums

    def _hold(self, microbatch: int, kept: Kept) -> None:
        self._kept[microbatch] = kept
        sizes = {id(x): bytes_on_mesh(x) for x in kept.arrays if id(x) not in kept.own}
        self.ledger.hold((self.owner, microbatch), sizes)

    def _drop(self, microbatch: int) -> None:
        del self._kept[microbatch]
        self.ledger.drop((self.owner, microbatch))
