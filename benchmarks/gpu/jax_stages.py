"""JAX's part of benchmarks/gpu: stages on one device, and pipeshard on one mesh."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
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
from pipelab.runtime.verdict.check import Check

LAYERS = 8


def _loss(output: jax.Array, target: jax.Array) -> jax.Array:
    return jnp.mean((output - target) ** 2)


def _sizes(device: jax.Device, checked: bool = False) -> tuple[int, int]:
    """The width, and the samples of a micro-batch; larger where it is not checked."""
    return (64, 16) if checked or device.platform == "cpu" else (4096, 2048)


def _batches(device: jax.Device, microbatches: int, checked: bool = False) -> list[Any]:
    width, samples = _sizes(device, checked)
    random = np.random.default_rng(0)
    shape = (2, samples * microbatches, width)
    data = [random.normal(size=shape).astype(np.float32) for _ in range(4)]
    here = data if checked else [jax.device_put(pair, device) for pair in data]
    return [tuple(pair) for pair in here]


def on_devices(devices: Sequence[jax.Device], microbatches: int, *, checked: bool) -> Run:
    """1F1B with a stage on each, which may be the same."""
    stages, data = len(devices), _batches(devices[0], microbatches, checked)
    return run(
        make("pipedream_flush", stages, microbatches, batches=len(data)),
        flax_mlp.mlp(stages, _sizes(devices[0], checked)[0], LAYERS // stages),
        data,
        _loss,
        optax.sgd(0.01),
        backend="jax",
        devices=devices,
        check=checked,
    )


def one_step(device: jax.Device, microbatches: int) -> list[float]:
    """Seconds of every batch but the first, by one jitted step that scans the micro-batches."""
    [(module, variables)] = flax_mlp.mlp(1, _sizes(device)[0], LAYERS)
    variables = jax.device_put(variables, device)

    def value(variables: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        output: Any = module.apply(variables, x)
        return _loss(output, y)

    @partial(jax.jit, donate_argnums=0)
    def step(variables: Any, x: jax.Array, y: jax.Array) -> Any:
        def add(total: Any, piece: Any) -> tuple[Any, jax.Array]:
            mean, gradients = jax.value_and_grad(value)(variables, *piece)
            return jax.tree.map(jnp.add, total, gradients), mean

        pieces = [a.reshape(microbatches, -1, a.shape[-1]) for a in (x, y)]
        total, losses = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, variables), pieces)
        return jax.tree.map(lambda w, g: w - 0.01 / microbatches * g, variables, total), losses

    ends = []
    for x, y in _batches(device, microbatches):
        variables, losses = step(variables, x, y)
        jax.block_until_ready((variables, losses))
        ends.append(time.perf_counter())
    return [b - a for a, b in pairwise(ends)]


def pipeshard_step(devices: Sequence[jax.Device], microbatches: int) -> list[float]:
    """The same of the same step, parallelized in two stages on two devices."""
    pairs = flax_mlp.mlp(2, _sizes(devices[0])[0], LAYERS // 2)
    (first, _), (second, _) = pairs
    variables = [of_stage for _, of_stage in pairs]

    def step(variables: Any, batch: dict[str, Any]) -> Any:
        def loss(variables: Any) -> jax.Array:
            middle: Any = first.apply(variables[0], batch["x"])
            mark_pipeline_boundary()
            output: Any = second.apply(variables[1], middle)
            return _loss(output, batch["y"])

        value, gradients = value_and_grad(loss)(variables)
        return jax.tree.map(lambda w, g: w - 0.01 * g, variables, gradients), value

    pipeline = parallelize(step, Pipeshard(microbatches, devices=devices))
    ends = []
    for x, y in _batches(devices[0], microbatches):
        variables, value = pipeline(variables, {"x": x, "y": y})
        jax.block_until_ready((variables, value))
        ends.append(time.perf_counter())
    return [b - a for a, b in pairwise(ends)]


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
