"""JAX's part of benchmarks/gpu: stages on one device, and pipeshard on one mesh."""

from __future__ import annotations

import json
import sys
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


def on_devices(devices: Sequence[jax.Device], microbatches: int, *, checked: bool) -> Run:
    """1F1B with a stage on each, which may be the same; larger where it is not checked."""
    small, stages = checked or devices[0].platform == "cpu", len(devices)
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
        devices=devices,
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


def main(address: str, number: str) -> None:
    """One of two processes, each with a stage on its device; prints the check as JSON."""
    jax.distributed.initialize(address, 2, int(number), local_device_ids=[0])
    devices = [jax.devices()[0], next(d for d in jax.devices() if d.process_index)]
    check = on_devices(devices, 4, checked=True).check
    print(json.dumps([check.passed, check.ratio, str(check)]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
