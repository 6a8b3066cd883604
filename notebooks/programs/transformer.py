"""The model of lectures 8 to 11, a small transformer in flax's nnx, and its train step.

On a machine with few cores no pipeline can show its speed. With `pause` a block is a stand-in for a
device that computes for so long: the cores are free meanwhile.
"""

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding

from pipelab.pipeshard import mark_pipeline_boundary

PAUSE = 5e-3 / 4  # of a stand-in: 5 ms for the forward of a micro-batch of four samples
if "PIPELAB_HURRY" in os.environ:  # as in teach.machines
    PAUSE /= 10


class Block(nnx.Module):
    """Attention and an MLP, each added to its input: [samples, length, width] -> the same.

    pause  seconds that a device sleeps in the forward, for each sample of which it has all columns
    """

    def __init__(self, width: int, rngs: nnx.Rngs, pause: float = 0) -> None:
        self.pause = pause
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(2)])
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        place = place_of(x)
        heads = self.qkv(self.norms[0](x)).reshape(*x.shape[:2], 4, -1)  # of 4 heads
        attended = jax.nn.dot_product_attention(*jnp.split(heads, 3, axis=-1), is_causal=True)
        x = x + self.out(attended.reshape(x.shape), out_sharding=place)
        hidden = nnx.gelu(self.up(self.norms[1](x)))
        if self.pause:
            hidden = sleep(self.pause * hidden.shape[0] / hidden.size, hidden)
        return x + self.down(hidden, out_sharding=place)


class Transformer(nnx.Module):
    """Words [samples, length] -> for each place, scores of the next word. Marked between blocks."""

    def __init__(
        self,
        blocks: int = 4,
        width: int = 32,
        words: int = 1024,
        length: int = 8,
        pause: float = 0,
    ) -> None:
        rngs = nnx.Rngs(0)
        self.words = nnx.Embed(words, width, rngs=rngs)
        self.places = nnx.Param(0.1 * rngs.params.normal((length, width)))
        self.blocks = nnx.List([Block(width, rngs, pause) for _ in range(blocks)])
        self.head = nnx.Linear(width, words, use_bias=False, rngs=rngs)

    def __call__(self, words: jax.Array) -> jax.Array:
        x = self.words(words, out_sharding=place_of(words)) + self.places[...]
        for i, block in enumerate(self.blocks):
            if i > 0:
                mark_pipeline_boundary()  # for a pipeline; it computes nothing
            x = block(x)
        return self.head(x)


def place_of(x: jax.Array) -> NamedSharding | None:
    """The sharding in an array's type, on explicit axes: there JAX asks where results lie."""
    sharding = jax.typeof(x).sharding
    return sharding if AxisType.Explicit in sharding.mesh.axis_types else None


def loss_of(scores: jax.Array, following: jax.Array) -> jax.Array:
    """The mean cross entropy of the words that follow."""
    return optax.softmax_cross_entropy_with_integer_labels(scores, following).mean()


def train_step(
    model: nnx.Module,
    tx: optax.GradientTransformation,
    value_and_grad: Callable,
    loss: Callable = loss_of,
) -> tuple[Callable, nnx.State]:
    """A pure step (state, (words, following)) -> (state, loss), and the state to begin with."""
    graph, start = nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))

    def step(state: nnx.State, batch: tuple) -> tuple[nnx.State, jax.Array]:
        model, optimizer = nnx.merge(graph, state, copy=True)
        inner, parameters = nnx.split(model)

        def of(parameters: nnx.State) -> jax.Array:
            words, following = batch
            return loss(nnx.merge(inner, parameters, copy=True)(words), following)

        value, gradients = value_and_grad(of)(parameters)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), value

    return step, start


# ---- stand-ins


def sleep(seconds: float, x: jax.Array) -> jax.Array:
    """x, so many seconds later for each of its numbers; its gradient takes twice as long.

    Where x is sharded, every device sleeps for its own part.
    """
    spec = jax.typeof(x).sharding.spec
    if not any(spec):
        return _late(seconds, x)
    return jax.shard_map(partial(_late, seconds), in_specs=spec, out_specs=spec)(x)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _late(seconds: float, x: jax.Array) -> jax.Array:
    return _paused(seconds * x.size, x)


def _forward(seconds: float, x: jax.Array) -> tuple[jax.Array, None]:
    return _late(seconds, x), None


def _backward(seconds: float, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (_paused(2 * seconds * gradient.size, gradient),)


_late.defvjp(_forward, _backward)


def _paused(seconds: float, x: jax.Array) -> jax.Array:
    # Callbacks read no sample, so a batch may be cut into micro-batches around them. They wait for
    # x all the same: XLA starts no loop before what it carries is there, and takes nothing out of a
    # loop past a barrier.
    def half(_: Any, carried: tuple) -> tuple:
        x, one = carried
        like = jax.ShapeDtypeStruct((), x.dtype)
        one = one * jax.pure_callback(partial(_pause, seconds / 2), like, one)
        return x * one, one

    start = lax.optimization_barrier((x, jnp.ones((), x.dtype)))
    return lax.fori_loop(0, 2, half, start)[0]


def _pause(seconds: float, one: Any) -> Any:
    time.sleep(seconds)
    return one
