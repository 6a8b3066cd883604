"""A stage of a JAX model: what a worker's five kinds of action do to it.

Arrays do not change, so that a weight version is just a value that is kept.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pipelab.action import Kind
from pipelab.executors.jax.arguments import Apply
from pipelab.executors.jax.device import JaxDevice
from pipelab.executors.jax.split import Rest, leave_out, put_in, split
from pipelab.executors.jax.trainer import named, names
from pipelab.executors.stage import Feed, Recipe, Stage
from pipelab.executors.worker import Bytes

# Of a stage's forward: its parameters, its input, and on the last stage the target
Arguments = tuple[Any, Any, Any]


class _Kept(NamedTuple):
    """What a forward leaves for its backward.

    x         the input
    pullback  as `passes` has it; None where the forward runs again
    rest      what an I leaves for its W: the two before are None then
    """

    x: Any
    pullback: Any
    rest: Any = None


class JaxStage(Stage):
    """One stage: a pure function, versions of its weights, and what its forwards left.

    apply       (parameters, x) -> y; with seeds (parameters, x, key) -> y
    parameters  a tree of arrays
    recipe      how to train
    feed        what the table and the data hold for it
    """

    def __init__(
        self, apply: Apply, parameters: Any, device: JaxDevice, recipe: Recipe, feed: Feed
    ) -> None:
        super().__init__(device, recipe, feed)
        self.weights = {0: jax.device_put(parameters, device.device)}
        self.state: Any = ()  # of the optimizer
        if recipe.optimizer:
            self.state = jax.device_put(recipe.optimizer.init(parameters), device.device)
        self._sum: Any = None  # of the gradients of the group that is being accumulated
        # Functions of their own: a jitted method would refer to the stage and the stage to it, so
        # that all arrays of a run would be kept until the next garbage collection.
        first, last = feed.inputs is not None, feed.targets is not None
        self._passes = passes(apply, recipe.loss if last else None, first)
        self._step = step_of(recipe.optimizer)

    def compile(self, shapes: tuple[Any, Any], kinds: set[Kind]) -> None:
        """Compile what actions of these kinds run, by doing each once on zeros.

        `shapes` are (x, target) of a micro-batch, as shapes and types. A callback in the stage is
        called once more for it.
        """
        zeros = jax.tree.map(jnp.zeros_like, shapes)
        arguments = (self.weights[0], *jax.device_put(zeros, self.device.device))
        if not self.recipe.training or self.recipe.recompute.any():
            self._passes.forward(arguments, self._seed(0), keep=False)
        if not self.recipe.training:
            return
        y, _, pullback = self._passes.forward(arguments, self._seed(0), keep=True)
        gradient = jax.tree.map(jnp.zeros_like, divide(y)[0])
        if Kind.B in kinds:
            self._passes.backward(arguments, pullback, gradient, self._zeros())
        if Kind.I in kinds:
            operands = arguments, pullback, gradient
            _, rest = self._passes.input_grad(*operands)
            self._passes.weight_grad(put_in(operands, rest), self._zeros())
        mean = _divided(self.weights[0], 1.0)
        if self.recipe.clip is not None:
            _square(mean)
        jax.block_until_ready(self._step(self.weights[0], self.state, mean))

    # ---- forward and update; the backwards are every stage's

    def forward(self, microbatch: int, received: Any) -> Any:
        """The stage's output, or None on the last stage, which computes the loss."""
        x = received if self.feed.inputs is None else self.feed.inputs[microbatch]
        keep = self.recipe.training and not self.recipe.recompute[microbatch]
        y, count, kept = self._compute(microbatch, x, keep)
        if self.recipe.training:
            self._keep(microbatch, kept)
        if self.feed.targets is None:
            return y
        count = self.feed.samples[microbatch] if count is None else count
        self.losses[microbatch] = y, float(count)
        self.check_loss(microbatch)
        return None

    def update(self, number: int, received: dict[int, float] | None = None) -> None:
        """Make version number + 1 from the latest one.

        `received`: by stage, the squared norm of its gradient.
        """
        squares = received.values() if received else ()
        divisor = self.divisor(number, lambda: sum(squares) if squares else self.news())
        mean = _divided(self._total(), divisor)
        self._sum = None
        latest = self.weights[number]
        new, self.state = jax.block_until_ready(self._step(latest, self.state, mean))
        if self.recipe.keep:
            self.stepped = mean
        self.weights[number + 1] = new
        if not self.readers[number]:
            del self.weights[number]

    # ---- what is asked of it between actions and afterwards

    def news(self) -> float:
        """The squared norm of the accumulated gradient."""
        return float(_square(self._total()))

    def held(self) -> Bytes:
        size = self.device.size
        others = [weights for v, weights in self.weights.items() if v != self.latest]
        latest = self.weights[self.latest]
        return Bytes(size(latest), size(others), size(self._sum), size(self.state))

    def trained(self) -> Any:
        """The latest weights, on the host."""
        return jax.device_get(self.weights[self.latest])

    def on_host(self, weights: Any) -> dict[str, np.ndarray]:
        return named(weights)

    # ---- pieces of the actions

    def _arguments(self, microbatch: int, x: Any) -> Arguments:
        target = None if self.feed.targets is None else self.feed.targets[microbatch]
        return self.weights[self.feed.versions[microbatch]], x, target

    def _compute(self, microbatch: int, x: Any, keep: bool) -> tuple[Any, Any, _Kept]:
        arguments = self._arguments(microbatch, x)
        found = self._passes.forward(arguments, self._seed(microbatch), keep=keep)
        y, count, pullback = jax.block_until_ready(found)
        return y, count, _Kept(x, pullback)

    def _keep(self, microbatch: int, kept: _Kept) -> None:
        """Keep it for the backward, and count it: data only where a gradient needs them."""
        self._kept[microbatch] = kept
        arrays = jax.tree.leaves(kept.pullback)
        if self.feed.inputs is None or arrays:
            arrays += jax.tree.leaves(kept.x)
        self.device.ledger.hold(self.key(microbatch), {id(x): x.nbytes for x in arrays})

    def _prepare(self, microbatch: int, received: Any) -> tuple[_Kept, Any, float]:
        if self.recipe.recompute[microbatch]:
            self.device.ledger.drop(self.key(microbatch))
            _, _, kept = self._compute(microbatch, self._kept[microbatch].x, True)
            self._keep(microbatch, kept)
        kept = self._kept.pop(microbatch)
        if self.feed.targets is None:
            count, gradient = received
            return kept, gradient, count
        mean, count = self.losses[microbatch]
        of_mean = np.full(mean.shape, count, mean.dtype)
        return kept, jax.device_put(of_mean, self.device.device), count

    def _pull(self, microbatch: int, kept: _Kept, gradient: Any, count: float, kind: Kind) -> Any:
        if not count:
            return jax.tree.map(jnp.zeros_like, divide(kept.x)[0])
        if kind is Kind.W:
            self._sum = self._passes.weight_grad(kept.rest, self._total())
            return jax.block_until_ready(self._sum)
        operands = self._arguments(microbatch, kept.x), kept.pullback, gradient
        if kind is Kind.B:
            found = self._passes.backward(*operands, self._total())
            self._sum, of_input = jax.block_until_ready(found)
            return of_input
        of_input, rest = jax.block_until_ready(self._passes.input_grad(*operands))
        self._keep_rest(microbatch, put_in(operands, rest))
        return of_input

    def _keep_rest(self, microbatch: int, rest: Rest) -> None:
        """Keep for W what it reads, and count it, in the place of what the forward kept."""
        self._split[microbatch] = _Kept(None, None, rest), None, self._split[microbatch][2]
        weights, _, target = self._arguments(microbatch, None)
        if any(rest.unsplit):
            pairs = zip(names(weights), rest.unsplit, strict=True)
            self.unsplit = {name: why for name, why in pairs if why}
        others = {id(x) for x in jax.tree.leaves((weights, target))}
        arrays = {id(x): x.nbytes for x in jax.tree.leaves(rest) if id(x) not in others}
        self.device.ledger.drop(self.key(microbatch))
        self.device.ledger.hold(self.key(microbatch), arrays)

    def _total(self) -> Any:
        """The accumulated gradient, which begins as zeros."""
        if self._sum is None:
            self._sum = self._zeros()
        return self._sum

    def _zeros(self) -> Any:
        return jax.tree.map(jnp.zeros_like, self.weights[self.latest])


# ---- the functions that are jitted


class Passes(NamedTuple):
    """A stage's forward and backward, jitted: once per shape of the data.

    forward      (arguments, seed, keep=) -> y, what the loss counted, pullback. With a loss y is
                 its mean. The pullback is that of `jax.vjp`, without the leaves that are arguments
    backward     (arguments, pullback, gradient of y, total) -> total with the parameters' gradients
                 added, gradient of x
    input_grad   (arguments, pullback, gradient of y) -> gradient of x, rest. The rest is what
                 `split` leaves for the parameters' gradients, without what is an operand
    weight_grad  (rest, total) -> total with the parameters' gradients added

    Gradients are trees of the floating leaves, with None where others are; a first stage's x has
    no gradient, since nobody asks for that of the data.
    """

    forward: Callable
    backward: Callable
    input_grad: Callable
    weight_grad: Callable


def passes(apply: Apply, loss: Callable | None, first: bool) -> Passes:
    """The passes of a stage; a last one has the loss."""

    def forward(arguments: Arguments, seed: Any, keep: bool) -> tuple[Any, Any, Any]:
        parameters, x, target = arguments
        floats, others = (None, x) if first else divide(x)
        key = () if seed is None else (jax.random.key(seed),)

        def function(parameters: Any, floats: Any) -> tuple[Any, tuple[Any, Any]]:
            y, count = apply(parameters, join(floats, others), *key), None
            if loss:
                value = loss(y, target)
                y, count = value if isinstance(value, tuple) else (value, None)
                _check_mean(y)
            return divide(y)[0], (y, count)

        if not keep:
            _, (y, count) = function(parameters, floats)
            return y, count, None
        _, pullback, (y, count) = jax.vjp(function, parameters, floats, has_aux=True)
        return y, count, leave_out(arguments, pullback)

    def pull(arguments: Arguments, pullback: Any, gradient: Any) -> tuple[Any, Any]:
        return put_in(arguments, pullback)(gradient)

    def backward(arguments: Arguments, pullback: Any, gradient: Any, total: Any) -> tuple[Any, Any]:
        of_parameters, of_x = pull(arguments, pullback, gradient)
        return jax.tree.map(jnp.add, total, of_parameters), of_x

    def input_grad(*operands: Any) -> tuple[Any, Any]:
        of_x, rest = split(pull, *operands)
        return of_x, leave_out(operands, rest)

    def weight_grad(rest: Any, total: Any) -> Any:
        leaves, tree = jax.tree.flatten(total)
        return jax.tree.unflatten(tree, map(jnp.add, leaves, rest.gradients()))

    return Passes(
        jax.jit(forward, static_argnames="keep"),
        jax.jit(backward, donate_argnames="total"),
        jax.jit(input_grad),
        jax.jit(weight_grad, donate_argnames="total"),
    )


def step_of(optimizer: optax.GradientTransformation) -> Callable:
    """The optimizer's jitted step: (weights, state, gradient) -> (weights, state)."""

    def step(weights: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
        change, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, change), state

    return jax.jit(step)


@jax.jit
def _divided(total: Any, count: Any) -> Any:
    """A jit of its own: fused with the step, the mean would go in unrounded, come out rounded."""
    return jax.tree.map(lambda g: (g / count).astype(g.dtype), total)


@jax.jit
def _square(tree: Any) -> jax.Array:
    return sum((jnp.vdot(g, g).real for g in jax.tree.leaves(tree)), jnp.zeros(()))


# ---- trees in two: what is differentiated, and what is not


def divide(tree: Any) -> tuple[Any, Any]:
    """Its floating leaves and its others, as trees with None where a leaf is in the other one."""
    floats = jax.tree.map(lambda leaf: leaf if _floating(leaf) else None, tree)
    return floats, jax.tree.map(lambda leaf: None if _floating(leaf) else leaf, tree)


def join(floats: Any, others: Any) -> Any:
    """The inverse of `divide`."""
    return jax.tree.map(
        lambda leaf, other: other if leaf is None else leaf,
        floats,
        others,
        is_leaf=lambda leaf: leaf is None,
    )


def _floating(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _check_mean(mean: Any) -> None:
    if jnp.shape(mean) or not _floating(mean):
        raise ValueError(
            f"the loss is {jnp.result_type(mean)} of shape {jnp.shape(mean)}: give the mean over "
            "the samples, one floating-point number"
        )
