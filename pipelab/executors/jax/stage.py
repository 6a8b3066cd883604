"""A stage of a JAX model: what a worker's five kinds of action do to it.

Values are immutable, so versions fall out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pipelab.action import Kind
from pipelab.executors.jax.device import JaxDevice
from pipelab.executors.jax.trainer import named
from pipelab.executors.stage import Feed, Recipe, Stage
from pipelab.executors.worker import Bytes

# (parameters, x) -> y, or (parameters, x, key) -> y where forwards draw random numbers
Apply = Callable[..., Any]


class _Kept(NamedTuple):
    """What a forward leaves for its backward.

    x          the input
    residuals  what `jax.vjp` saved beside the input and the weights
    shapes     of input and target
    counted    by the loss, on the last stage
    """

    x: Any
    residuals: list[jax.Array]
    shapes: Any
    counted: float


class _Parts(NamedTuple):
    """How a tree divides into floating leaves, which are differentiated, and others."""

    spec: Any
    floating: tuple[bool, ...]

    @classmethod
    def of(cls, tree: Any) -> _Parts:
        leaves, spec = jax.tree.flatten(tree)
        types = (jnp.result_type(leaf) for leaf in leaves)
        return cls(spec, tuple(bool(jnp.issubdtype(t, jnp.inexact)) for t in types))

    @classmethod
    def of_data(cls, tree: Any) -> _Parts:
        """Of the first stage's input: nobody asks for its gradient."""
        leaves, spec = jax.tree.flatten(tree)
        return cls(spec, (False,) * len(leaves))

    def cut(self, tree: Any) -> tuple[list, list]:
        """The floating leaves, and the others."""
        found: tuple[list, list] = [], []
        for leaf, floating in zip(jax.tree.leaves(tree), self.floating, strict=True):
            found[not floating].append(leaf)
        return found

    def join(self, floats: Sequence[Any], others: Sequence[Any]) -> Any:
        """The inverse of `cut`."""
        sides = iter(floats), iter(others)
        return self.spec.unflatten([next(sides[not floating]) for floating in self.floating])


class JaxStage(Stage):
    """One stage: a pure function, versions of its weights, and what its forwards left.

    apply       (parameters, x) -> y; with seeds (parameters, x, key) -> y
    parameters  a tree of arrays
    recipe      how to train
    feed        what the table and the data hold for it

    Forward and backward are jitted, once per shape. Returning a vjp from a jitted function would
    copy every weight for every micro-batch: the leaves that are arguments are left out and put in
    again, so that what is kept are the true activations.
    """

    def __init__(
        self, apply: Apply, parameters: Any, device: JaxDevice, recipe: Recipe, feed: Feed
    ) -> None:
        super().__init__(device, recipe, feed)
        self.weights = {0: jax.device_put(parameters, device.device)}
        self.state: Any = ()  # of the optimizer
        if recipe.optimizer:
            self.state = jax.device_put(recipe.optimizer.init(parameters), device.device)
        self._kept: dict[int, _Kept] = {}  # by micro-batch
        self._split: dict[int, tuple[_Kept, list]] = {}  # between I and W
        self._sum: Any = None  # of the gradients of the group that is being accumulated
        self._apply = apply
        # By shapes: how what `jax.vjp` saved goes together, and the parts of outputs.
        self._saved: dict[Any, tuple[Any, list[int | None]]] = {}
        self._outputs: dict[Any, _Parts] = {}
        self._forward = jax.jit(self._run, static_argnames=("keep",))
        self._backward = jax.jit(
            self._pull, static_argnames=("shapes", "of"), donate_argnames="total"
        )
        self._mean, self._square = jax.jit(_mean), jax.jit(_square)
        self._step = jax.jit(self._stepper)

    def compile(self, shapes: tuple[Any, Any], kinds: Iterable[Kind]) -> None:
        """Compile what actions of these kinds run, by doing each once on zeros.

        `shapes` are (x, target) of a micro-batch, as shapes and types. A callback in the stage is
        so called once more than it trains.
        """
        zeros = jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes)
        x, target = jax.device_put(zeros, self.device.device)
        weights = self.weights[0]
        if not self.recipe.training or self.recipe.recompute.any():
            self._forward(weights, x, target, *self._key(0), keep=False)
        if not self.recipe.training:
            return
        floats, _, residuals = self._forward(weights, x, target, *self._key(0), keep=True)
        seed = [jnp.zeros_like(leaf) for leaf in floats]
        pulls = {Kind.B: "both", Kind.I: "input", Kind.W: "weights"}
        for of in {pulls[kind] for kind in kinds if kind in pulls}:
            total = None if of == "input" else jax.tree.map(jnp.zeros_like, weights)
            shape = _shapes((x, target))
            self._backward(weights, x, target, residuals, seed, total, shapes=shape, of=of)
        gradient = self._mean(jax.tree.map(jnp.zeros_like, weights), 1.0)
        if self.recipe.clip is not None:
            self._square(gradient)
        jax.block_until_ready(self._step(weights, self.state, gradient))

    # ---- the five kinds of action

    def forward(self, microbatch: int, received: Any) -> Any:
        """The stage's output, or None on the last stage, which computes the loss."""
        x = received if self.feed.inputs is None else self.feed.inputs[microbatch]
        again = bool(self.recipe.recompute[microbatch])
        output, kept = self._compute(microbatch, x, keep=self.recipe.training and not again)
        if self.recipe.training:
            self._kept[microbatch] = kept
            self._hold(microbatch, kept)
        if self.feed.targets is None:
            return output
        self.losses[microbatch] = output
        self.check_loss(microbatch)
        return None

    def backward(self, microbatch: int, received: Any) -> Any:
        """Accumulate the weights' gradients; returns the input's."""
        kept, seed, count = self._prepare(microbatch, received)
        self._sum, gradient = self._pull_back(microbatch, kept, seed, of="both")
        self.finish(microbatch, count)
        return count, gradient

    def input_grad(self, microbatch: int, received: Any) -> Any:
        """The input's gradient alone; what is kept stays for `weight_grad`."""
        kept, seed, count = self._prepare(microbatch, received)
        _, gradient = self._pull_back(microbatch, kept, seed, of="input")
        self._split[microbatch] = kept._replace(counted=count), seed
        return count, gradient

    def weight_grad(self, microbatch: int, received: Any = None) -> None:
        """Accumulate the weights' gradients, which `input_grad` left out."""
        kept, seed = self._split.pop(microbatch)
        self._sum, _ = self._pull_back(microbatch, kept, seed, of="weights")
        self.finish(microbatch, kept.counted)

    def update(self, number: int, received: dict[int, float] | None = None) -> None:
        """Make version number + 1 from the latest one.

        `received`: by stage, the squared norm of its gradient.
        """
        squares = received.values() if received else ()
        divisor = self.divisor(number, lambda: sum(squares) if squares else self.news())
        latest, total = self.weights[number], self._sum
        if total is None:
            total = jax.tree.map(jnp.zeros_like, latest)
        mean = self._mean(total, divisor)
        new, self.state = jax.block_until_ready(self._step(latest, self.state, mean))
        self._sum = None
        if self.recipe.keep:
            self.stepped = mean
        self.weights[number + 1] = new
        if not self.readers[number]:
            del self.weights[number]

    # ---- what is asked of it between actions and afterwards

    def news(self) -> float:
        """The squared norm of the accumulated gradient."""
        return float(self._square(self._sum)) if self._sum is not None else 0.0

    def held(self) -> Bytes:
        others = (weights for v, weights in self.weights.items() if v != self.latest)
        return Bytes(
            _bytes(self.weights[self.latest]),
            sum(map(_bytes, others)),
            _bytes(self._sum),
            _bytes(self.state),
        )

    def trained(self) -> Any:
        """The latest weights, on the host."""
        return jax.device_get(self.weights[self.latest])

    def on_host(self, weights: Any) -> dict[str, np.ndarray]:
        return named(weights)

    # ---- pieces of the actions

    def _key(self, microbatch: int) -> tuple:
        return () if self.feed.seeds is None else (jax.random.key(self.feed.seeds[microbatch]),)

    def _target(self, microbatch: int) -> Any:
        return None if self.feed.targets is None else self.feed.targets[microbatch]

    def _read_by(self, microbatch: int) -> Any:
        return self.weights[self.feed.versions[microbatch]]

    def _input_parts(self, x: Any) -> _Parts:
        return _Parts.of(x) if self.feed.inputs is None else _Parts.of_data(x)

    def _compute(self, microbatch: int, x: Any, keep: bool) -> tuple[Any, _Kept]:
        """Run the stage, and the loss behind the last one.

        Returns its output, or mean and count, and what a backward needs.
        """
        target = self._target(microbatch)
        shapes = _shapes((x, target))
        weights = self._read_by(microbatch)
        found = self._forward(weights, x, target, *self._key(microbatch), keep=keep)
        floats, (others, count), residuals = jax.block_until_ready(found)
        if self.feed.targets is None:
            output = self._outputs[shapes].join(floats, others)
            return output, _Kept(x, residuals, shapes, 0.0)
        count = float(self.feed.samples[microbatch] if count is None else count)
        return (floats[0], count), _Kept(x, residuals, shapes, count)

    def _function(self, x: Any, target: Any, *key: Any) -> tuple[Callable, list]:
        """The stage as a function of floating numbers alone, and those of x.

        (parameters, floats of x) -> (floats of the output, (its other leaves, count)); on the last
        stage the output is the loss.
        """
        inputs, shapes = self._input_parts(x), _shapes((x, target))
        floats_of_x, others_of_x = inputs.cut(x)

        def function(parameters: Any, floats: list) -> tuple[list, tuple[list, Any]]:
            y = self._apply(parameters, inputs.join(floats, others_of_x), *key)
            if self.feed.targets is not None:
                value = self.recipe.loss(y, target)
                mean, count = value if isinstance(value, tuple) else (value, None)
                return [mean], ([], count)
            self._outputs[shapes] = _Parts.of(y)
            floats_of_y, others_of_y = self._outputs[shapes].cut(y)
            return floats_of_y, (others_of_y, None)

        return function, floats_of_x

    def _run(
        self, parameters: Any, x: Any, target: Any, *key: Any, keep: bool
    ) -> tuple[list, tuple, list]:
        """Traced by `_forward`: output, aux, and what the backward needs beside the arguments."""
        function, floats = self._function(x, target, *key)
        if not keep:
            return *function(parameters, floats), []
        outputs, pull, aux = jax.vjp(function, parameters, floats, has_aux=True)
        # [1] the closure `pull` is a tree: its leaves are all that it saved
        saved, spec = jax.tree.flatten(pull)
        # [2] leaves that are arguments are put in again by the backward: note which they are
        arguments = jax.tree.leaves((parameters, x, target))
        number = {id(leaf): i for i, leaf in enumerate(arguments)}
        places = [number.get(id(leaf)) for leaf in saved]
        self._saved[_shapes((x, target))] = spec, places
        # [3] the others are this micro-batch's activations
        residuals = [leaf for leaf, place in zip(saved, places, strict=True) if place is None]
        return outputs, aux, residuals

    def _pull(
        self,
        parameters: Any,
        x: Any,
        target: Any,
        residuals: list,
        seed: list,
        total: Any,
        *,
        shapes: Any,
        of: str,
    ) -> tuple[Any, list]:
        """Traced by `_backward`: (total + the weights' gradients, those of the input's floats).

        of="input" leaves the total alone, of="weights" has no gradient of the input.
        """
        spec, places = self._saved[shapes]
        arguments, rest = jax.tree.leaves((parameters, x, target)), iter(residuals)
        saved = [next(rest) if place is None else arguments[place] for place in places]
        of_weights, of_input = jax.tree.unflatten(spec, saved)(seed)
        if of != "input":
            total = jax.tree.map(jnp.add, total, of_weights)
        return total, [] if of == "weights" else of_input

    def _prepare(self, microbatch: int, received: Any) -> tuple[_Kept, list, float]:
        """What was kept, the gradients of the output's floats, and the count."""
        kept = self._kept.pop(microbatch)
        if self.recipe.recompute[microbatch]:
            self.device.ledger.drop(self.key(microbatch))
            _, kept = self._compute(microbatch, kept.x, keep=True)
            self._hold(microbatch, kept)
        if self.feed.targets is None:
            count, gradients = received
            return kept, gradients, count
        mean = self.losses[microbatch][0]
        return kept, [jnp.full_like(mean, kept.counted)], kept.counted

    def _pull_back(self, microbatch: int, kept: _Kept, seed: list, of: str) -> tuple[Any, list]:
        if self.feed.targets is not None and not kept.counted:
            # Nothing was counted, so that there is no gradient, whatever the mean is.
            floats, _ = self._input_parts(kept.x).cut(kept.x)
            return self._sum, jax.tree.map(jnp.zeros_like, floats)
        weights, target = self._read_by(microbatch), self._target(microbatch)
        if of != "input" and self._sum is None:
            self._sum = jax.tree.map(jnp.zeros_like, weights)
        total = self._sum if of != "input" else None
        arguments = (weights, kept.x, target, kept.residuals, seed, total)
        return jax.block_until_ready(self._backward(*arguments, shapes=kept.shapes, of=of))

    def _hold(self, microbatch: int, kept: _Kept) -> None:
        arrays = list(kept.residuals)
        if self.feed.inputs is None or arrays:
            arrays += [x for x in jax.tree.leaves(kept.x) if isinstance(x, jax.Array)]
        self.device.ledger.hold(self.key(microbatch), {id(x): x.nbytes for x in arrays})

    def _stepper(self, weights: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
        change, state = self.recipe.optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, change), state


def _mean(total: Any, count: Any) -> Any:
    """A jit of its own: fused with the step, the mean would go in unrounded, but come out rounded."""
    return jax.tree.map(lambda g: (g / count).astype(g.dtype), total)


def _square(tree: Any) -> jax.Array:
    return sum((jnp.vdot(g, g).real for g in jax.tree.leaves(tree)), jnp.zeros(()))


def _shapes(tree: Any) -> tuple:
    leaves, spec = jax.tree.flatten(tree)
    return spec, tuple((jnp.result_type(leaf).name, jnp.shape(leaf)) for leaf in leaves)


def _bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
