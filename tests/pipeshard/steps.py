"""A network, its data, train steps, and their comparison with one device."""

from itertools import pairwise

import tests.jax_setup  # isort: skip  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import optax

from pipelab.pipeshard import Pipeshard, mark_pipeline_boundary, parallelize, value_and_grad


def arrays(*shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [
        rng.normal(size=shape).astype(jnp.zeros(()).dtype) / np.sqrt(shape[0]) for shape in shapes
    ]


def data(samples=24, width=6, out=3):
    x, y = arrays((samples, width), (samples, out), seed=1)
    return {"x": x * samples**0.5, "y": y * samples**0.5}


def network(widths=(6, 8, 7, 5, 3)):
    """Weights and biases; its layers are marked apart by `forward`."""
    shapes = [shape for a, b in pairwise(widths) for shape in ((a, b), (b,))]
    flat = arrays(*shapes)
    return [dict(w=w, b=b) for w, b in zip(flat[::2], flat[1::2], strict=True)]


# Two layers on a device each, where more would show no more.
FEW, PAIR = network((6, 5, 3)), Pipeshard(4, devices=2)
SHARED = Pipeshard(4, devices=4)  # two layers: on two devices each, which share the samples
OWN_MEAN = Pipeshard(4, devices=4, reduce="mean")


def forward(layers, x):
    for i, layer in enumerate(layers):
        if i:
            mark_pipeline_boundary()
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x


def mse(params, batch, forward=forward):
    return jnp.mean((forward(params, batch["x"]) - batch["y"]) ** 2)


def step_of(loss, optimizer=None, has_aux=False):
    """A train step ((parameters, optimizer state), batch) -> (state, value).

    And a function that makes its first state of parameters.
    """
    optimizer = optimizer or optax.sgd(0.1)

    def step(state, batch):
        params, inner = state
        value, gradients = value_and_grad(loss, has_aux=has_aux)(params, batch)
        updates, inner = optimizer.update(gradients, inner, params)
        return (optax.apply_updates(params, updates), inner), value

    return step, lambda params: (params, optimizer.init(params))


def worst(got, expected):
    """The largest max|a - b| / max|b| over the leaves."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    numbers = [(np.asarray(a, np.float64), np.asarray(b, np.float64)) for a, b in pairs]
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-3)) for a, b in numbers)


def assert_equal(step, state, batch, method, steps=2, tolerance=1e-5, **rest):
    """Some train steps on a pipeline equal those on one device; returns the pipeline."""
    pipeline = parallelize(step, method, **rest)
    check = pipeline.compare(state, batch)
    assert check.passed and "undivided" in check.rule, check
    got = expected = state
    for _ in range(steps):
        got, value = pipeline(got, batch)
        expected, wanted = jax.jit(step)(expected, batch)
        assert jax.tree.structure(got) == jax.tree.structure(expected)
        assert worst((got, value), (expected, wanted)) <= tolerance
    return pipeline
