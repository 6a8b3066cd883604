"""The model of lectures 8 to 11, a small transformer in flax's nnx, and its train step.

On a machine with few cores no pipeline can show its speed. `sleep` makes of a stage a stand-in for
a device that computes for so long: the cores are free meanwhile.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from pipelab.pipeshard import mark_pipeline_boundary


class Block(nnx.Module):
    """Attention and an MLP, each added to its input: [samples, length, width] -> the same."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.norms = nnx.List([nnx.RMSNorm(width, rngs=rngs) for _ in range(2)])
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.qkv, self.out = linear(width, 3 * width), linear(width, width)
        self.up, self.down = linear(width, 4 * width), linear(4 * width, width)

    def __call__(self, x: jax.Array) -> jax.Array:
        heads = self.qkv(self.norms[0](x)).reshape(*x.shape[:2], 2, -1)  # of 2 heads
        attended = jax.nn.dot_product_attention(*jnp.split(heads, 3, axis=-1), is_causal=True)
        x = x + self.out(attended.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norms[1](x))))


class Transformer(nnx.Module):
    """Words [samples, length] -> for each place, scores of the next word. Marked between blocks."""

    def __init__(
        self, blocks: int = 4, width: int = 32, words: int = 1024, length: int = 8
    ) -> None:
        rngs = nnx.Rngs(0)
        self.words = nnx.Embed(words, width, rngs=rngs)
        self.places = nnx.Param(0.1 * rngs.params.normal((length, width)))
        self.blocks = nnx.List([Block(width, rngs) for _ in range(blocks)])
        self.head = nnx.Linear(width, words, use_bias=False, rngs=rngs)

    def __call__(self, words: jax.Array) -> jax.Array:
        x = self.words(words) + self.places[...]
        for i, block in enumerate(self.blocks):
            if i > 0:
                mark_pipeline_boundary()  # for a pipeline; it computes nothing
            x = block(x)
        return self.head(x)


def loss_of(scores: jax.Array, following: jax.Array) -> jax.Array:
    """The mean cross entropy of the words that follow."""
    return optax.softmax_cross_entropy_with_integer_labels(scores, following).mean()


def train_step(
    model: nnx.Module, tx: optax.GradientTransformation, value_and_grad: Callable
) -> tuple[Callable, nnx.State]:
    """A pure step (state, (words, following)) -> (state, loss), and the state to begin with."""
    graph, start = nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))

    def step(state: nnx.State, batch: tuple) -> tuple[nnx.State, jax.Array]:
        model, optimizer = nnx.merge(graph, state, copy=True)
        inner, parameters = nnx.split(model)

        def loss(parameters: nnx.State) -> jax.Array:
            words, following = batch
            return loss_of(nnx.merge(inner, parameters, copy=True)(words), following)

        value, gradients = value_and_grad(loss)(parameters)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), value

    return step, start


# ---- stand-ins


def _pause(seconds: float, _: Any) -> np.ndarray:
    time.sleep(seconds)
    return np.zeros((), np.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sleep(seconds: float, x: jax.Array) -> jax.Array:
    """x, so many seconds later; its gradient takes twice as long."""
    zero = jax.ShapeDtypeStruct((), x.dtype)
    return x + jax.pure_callback(partial(_pause, seconds), zero, x[(0,) * x.ndim])


def _forward(seconds: float, x: jax.Array) -> tuple[jax.Array, None]:
    return sleep(seconds, x), None


def _backward(seconds: float, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (sleep(2 * seconds, gradient),)


sleep.defvjp(_forward, _backward)
