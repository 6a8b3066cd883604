"""JAX's part of benchmarks/gpu: stages on one device, and pipeshard on one mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pipelab import Run, make, run
from pipelab.models import flax_mlp
from pipelab.pipeshard import (
    Pipeshard,
    mark_pipeline_boundary,
    parallelize,
    value_and_grad,
)
from pipelab.runtime.verdict.certificate import Check

LAYERS = 8


def _loss(output: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.mean((output - target) ** 2)


def on_one_device(device: jax.Device, stages: int, microbatches: int, *, checked: bool) -> Run:
    """1F1B with several stages on one device; larger where it is measured and not checked."""
    small = checked or device.platform == "cpu"
    width, samples = (64, 16) if small else (2048, 1024)
    random = np.random.default_rng(0)
    shape = (samples * microbatches, width)
    data = [random.normal(size=(2, *shape)).astype(np.float32) for _ in range(3)]
    return run(
        make("pipedream_flush", stages, microbatches, batches=len(data)),
        flax_mlp.mlp(stages, width, LAYERS // stages),
        [(x, y) for x, y in data],
        _loss,
        optax.sgd(0.01),
        backend="jax",
        devices=[device] * stages,
        check=checked,
    )


def two_meshes(devices: Sequence[jax.Device]) -> Check:
    """A marked train step, a stage on each device, compared with the same step on one."""
    random = np.random.default_rng(0)
    weights = [random.normal(size=(64, 64)).astype(np.float32) / 8 for _ in range(2)]
    batch = {name: random.normal(size=(32, 64)).astype(np.float32) for name in "xy"}

    def step(weights: list[Any], batch: dict[str, Any]) -> Any:
        def loss(weights: list[Any]) -> jax.Array:
            x = jnp.tanh(batch["x"] @ weights[0])
            mark_pipeline_boundary()
            return _loss(x @ weights[1], batch["y"])

        value, gradients = value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.01 * g, weights, gradients), value

    return parallelize(step, Pipeshard(4, devices=devices)).compare(weights, batch)
