"""The JAX worker beside SPMD programs, in time and memory, and what an action of pipeshard costs.

python benchmarks/jax_pipelines.py
"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from measure import cores, in_turn, machine, main, page, paragraph, spread, table, timed
from pipelab import Schedule, Trainer, make, run
from pipelab.pipeshard import Pipeshard, mark_pipeline_boundary, parallelize, value_and_grad

sys.path.append(str(Path(__file__).parents[1] / "notebooks"))
from programs import spmd  # lecture 8's

OPTIMIZER = optax.sgd(0.01)
MIB = 2.0**20


@dataclass(frozen=True)
class Sizes:
    """Residual blocks of `width` and 4 `width`, two a device; `samples` a micro-batch."""

    width: int = 256
    samples: int = 64
    devices: int = 4
    microbatches: Sequence[int] = (4, 8, 16)
    batches: int = 4
    empty: Sequence[int] = (4, 16, 64)  # micro-batches of nothing
    calls: int = 1000  # at least so many actions, or jitted calls, are timed together


class Found(NamedTuple):
    """Seconds of each batch, bytes that the fullest device keeps for backwards, the last loss."""

    seconds: list[float]
    kept: float
    loss: float


def report(repeats: int = 3, sizes: Sizes = Sizes()) -> str:
    """The worker's schedules beside SPMD programs and one device, as a Markdown page.

    Raises ValueError where jax has too few devices.
    """
    with suppress(RuntimeError):  # too late where jax is in use already
        jax.config.update("jax_num_cpu_devices", sizes.devices)
    if (count := len(jax.devices())) < sizes.devices:
        raise ValueError(
            f"{sizes.devices} devices are needed, and jax has {count}: "
            "run this in a process of its own"
        )
    where = jax.devices()[0]
    rows = []
    for m in sizes.microbatches:
        found = _side_by_side(m, repeats, sizes)
        base = statistics.median(found["worker, gpipe"].seconds)
        for name, one in found.items():
            ratio = f"{statistics.median(one.seconds) / base:.2f}"
            kept = "-" if math.isnan(one.kept) else f"{one.kept / MIB:.2f}"
            rows.append((m, name, spread(one.seconds), ratio, kept))
    shared = f", host devices that share {cores()} cores" if where.platform == "cpu" else ""
    return page(
        "# Pipelines in JAX",
        machine("jax", "numpy"),
        paragraph(
            f"{sizes.devices} devices ({where.device_kind}{shared}), two residual blocks "
            f"{sizes.width} -> {4 * sizes.width} -> {sizes.width} a device, {sizes.samples} "
            "samples a micro-batch, float32, mean squared error, SGD. All train one model from "
            "the same weights to the same loss. Time per batch: the median (fastest to "
            f"slowest) of {repeats} runs of {sizes.batches} batches, in turn, without the first "
            "batch; compiled before. A worker's batch is followed by the next one without a "
            "pause; a program's is waited for. A worker in `run` waits for each action, to tell "
            "its time; in a Trainer it goes up to two actions ahead of its device."
        ),
        paragraph(
            "Kept: on the device that keeps most, for a worker the measured residuals of its "
            "forwards; for a program what the compiler reserves beside arguments and results, "
            "in which gradients and buffers of the loop are counted too. So the rows of the "
            "programs compare with each other, and in their growth with the workers'."
        ),
        table(
            ("micro-batches", "program", "time (ms)", "ratio to worker, gpipe", "kept (MiB)"), rows
        ),
        *_empty_actions(repeats, sizes),
    )


def _empty_actions(repeats: int, sizes: Sizes) -> list[str]:
    """The section on stages that multiply one number by one weight."""
    one, other = jax.devices()[:2]
    x, jitted = jax.device_put(jnp.ones((1, 1)), one), jax.jit(jnp.multiply)
    forward = jax.jit(lambda w, x: x * w)
    backward = jax.jit(lambda w, x, total, dy: (total + (x * dy).sum(), w * dy))
    w = jax.device_put(jnp.ones(()), one)
    singles = {
        "jitted call": lambda: jitted(x, x),
        "a stage's own": lambda: [forward(w, x), backward(w, x, w, x)],
        "device_put": lambda: jax.device_put(x, other),
        "both": lambda: jax.device_put(jitted(x, x), other),
    }
    rows = []
    for m in sizes.empty:
        calls = [partial(_per_call, call, sizes.calls) for call in singles.values()]
        calls[1] = partial(_per_call, singles["a stage's own"], sizes.calls, each=2)
        found = in_turn([*calls, _empty_step(m, sizes)], repeats)
        medians = [*map(statistics.median, found)]
        ratios = (f"{medians[-1] / medians[i]:.1f}" for i in (0, 1, 3))
        rows.append((m, *(spread(of, ".0f", 1e-6) for of in found), *ratios))
    return [
        "## Overhead of an empty action",
        paragraph(
            f"Pipeshard with {sizes.devices} stages that multiply one number by one weight, 1F1B: "
            "a train step's time / the actions of all rows, so with the split of the batch and the "
            "end of the step. Beside it jax alone, waited for: a jitted call; the mean of a "
            "stage's forward and of its backward, jitted; a jax.device_put to another device; and "
            "this with the first. An action is a jitted call, and mostly its result goes to "
            f"another device. On {cores()} cores. Microseconds, in turn, the median (fastest to "
            f"slowest) of {repeats} times at least {sizes.calls} of them."
        ),
        table(
            (
                "micro-batches",
                *singles,
                "action of pipeshard",
                "ratio to jitted call",
                "to a stage's own",
                "to both",
            ),
            rows,
        ),
        paragraph(THREE_CALLS),
    ]


THREE_CALLS = (
    "Three jitted calls, 20 us, are no target that an action can reach while its result goes to "
    "another device. Taken apart by hand on 2026-11-25 (load 24, so in processor time, the least "
    "of 9 times 300 calls): a jitted call 7 us; a jax.device_put that is waited for 93; the end "
    "of it alone, which pipeshard calls, 13 to issue and 49 with the copy by a thread of XLA's; "
    "and this followed by a jitted call there 81."
)


def _empty_step(m: int, sizes: Sizes) -> Callable[[], float]:
    """A function that returns the seconds per action of some train steps."""

    def train_step(weights: list, batch: Any) -> Any:
        def loss(weights: list) -> Any:
            x = batch
            for i, w in enumerate(weights):
                if i:
                    mark_pipeline_boundary()
                x = x * w
            return x.mean()

        value, gradients = value_and_grad(loss)(weights)
        return [w - 0.01 * g for w, g in zip(weights, gradients, strict=True)], value

    devices = jax.devices()[: sizes.devices]
    pipeline = parallelize(train_step, Pipeshard(m, devices=devices))
    batch = np.ones((m, 1), np.float32)
    state, _ = pipeline([jnp.ones(()) for _ in devices], batch)
    actions = sum(map(len, pipeline.schedule.rows))
    return lambda: _per_call(lambda: pipeline(state, batch), sizes.calls // actions + 1) / actions


def _per_call(call: Callable[[], Any], count: int, each: int = 1) -> float:
    """Seconds of a call that is waited for, of `count` in a row; `call` makes `each` of them."""
    return timed(lambda: [jax.block_until_ready(call()) for _ in range(count)]) / count / each


def _side_by_side(m: int, repeats: int, sizes: Sizes) -> dict[str, Found]:
    """All programs in turn, by name; the losses of all have to be equal."""
    p, random = sizes.devices, np.random.default_rng(0)
    shape = (sizes.samples * m, sizes.width)
    batches = [
        tuple(random.normal(size=shape).astype(np.float32) for _ in range(2))
        for _ in range(sizes.batches)
    ]
    blocks = [_block_of(random, sizes.width) for _ in range(2 * p)]
    makers: dict[str, Callable[[], Found]] = {
        f"worker, {name}": partial(_worker, name, p, m, blocks, batches)
        for name in ("gpipe", "pipedream_flush", "interleaved")
    }
    makers |= {
        f"Trainer, {name}": partial(_in_a_trainer, name, p, m, blocks, batches)
        for name in ("gpipe", "pipedream_flush")
    }
    makers |= {
        "SPMD": _program(p, m, 1, False, blocks, batches),
        "SPMD, recomputing": _program(p, m, 1, True, blocks, batches),
        "SPMD, circular": _program(p, m, 2, False, blocks, batches),
        "one device": _one_device(blocks, batches),
    }
    runs: dict[str, list[Found]] = {name: [] for name in makers}
    for _ in range(repeats):
        for name, once in makers.items():
            runs[name].append(once())
    losses = [found.loss for of_one in runs.values() for found in of_one]
    if not np.allclose(losses, losses[0], rtol=1e-4):
        raise RuntimeError(
            f"with {m} micro-batches the programs trained to different losses: {losses}"
        )
    return {
        name: Found([s for f in found for s in f.seconds], found[0].kept, found[0].loss)
        for name, found in runs.items()
    }


def _block(w: tuple[Any, Any], x: Any) -> Any:
    return x + jax.nn.gelu(x @ w[0]) @ w[1]


def _blocks(w: Any, x: Any) -> Any:
    for each in w:
        x = _block(each, x)
    return x


def _block_of(random: np.random.Generator, width: int) -> tuple[np.ndarray, np.ndarray]:
    scales = ((width, 4 * width), width**-0.5), ((4 * width, width), 0.5 * width**-0.5)
    one, other = (
        random.normal(size=shape, scale=scale).astype(np.float32) for shape, scale in scales
    )
    return one, other


def _loss(y: Any, target: Any) -> Any:
    return ((y - target) ** 2).mean()


def _cut(schedule: Schedule, blocks: list) -> list:
    each = len(blocks) // schedule.stages
    return [(_blocks, blocks[s * each : (s + 1) * each]) for s in range(schedule.stages)]


def _in_a_trainer(name: str, p: int, m: int, blocks: list, batches: list) -> Found:
    schedule, seconds, losses = make(name, p, m), [], []
    given = _cut(schedule, blocks), _loss, OPTIMIZER
    with Trainer(schedule, *given, backend="jax", check=False) as trainer:
        began = time.perf_counter()
        for step in trainer.fit(batches):
            losses.append(step.loss)
            seconds.append(time.perf_counter() - began)
            began += seconds[-1]
    return Found(seconds[1:], math.nan, losses[-1])


def _worker(name: str, p: int, m: int, blocks: list, batches: list) -> Found:
    virtual = 2 if name == "interleaved" else 1
    schedule = make(name, p, m, batches=len(batches), virtual=virtual)
    stages = _cut(schedule, blocks)
    result = run(schedule, stages, batches, _loss, OPTIMIZER, backend="jax", check=False)
    return Found(
        result.timeline.batch_seconds(),
        max(result.memory.peak("activations")),
        result.losses[-1],
    )


def _program(
    p: int, m: int, virtual: int, remat: bool, blocks: list, batches: list
) -> Callable[[], Found]:
    each = len(blocks) // (p * virtual)
    stages = spmd.stack([blocks[s : s + each] for s in range(0, len(blocks), each)], virtual)
    mesh = jax.make_mesh((p,), ("stage",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec(*[None] * (virtual > 1), "stage")
    start = jax.device_put(stages, jax.sharding.NamedSharding(mesh, spec))
    piped = spmd.spmd_pipeline(_blocks, devices=mesh, microbatches=m, virtual=virtual, remat=remat)
    return _trainer(
        jax.value_and_grad(lambda w, x, target: _loss(piped(w, x), target)), start, batches
    )


def _one_device(blocks: list, batches: list) -> Callable[[], Found]:
    start = jax.device_put(blocks, jax.devices()[0])
    return _trainer(
        jax.value_and_grad(lambda w, x, target: _loss(_blocks(w, x), target)), start, batches
    )


def _trainer(gradients: Callable, start: Any, batches: list) -> Callable[[], Found]:
    def step(parameters: Any, state: Any, x: Any, target: Any) -> tuple[Any, Any, Any]:
        value, found = gradients(parameters, x, target)
        change, state = OPTIMIZER.update(found, state, parameters)
        return optax.apply_updates(parameters, change), state, value

    state = OPTIMIZER.init(start)
    memory: Any = jax.jit(gradients).lower(start, *batches[0]).compile().memory_analysis()
    kept = memory.temp_size_in_bytes
    compiled = jax.jit(step)

    def once() -> Found:
        parameters, now, seconds, value = start, state, [], jnp.nan
        for x, target in batches:
            began = time.perf_counter()
            parameters, now, value = jax.block_until_ready(compiled(parameters, now, x, target))
            seconds.append(time.perf_counter() - began)
        return Found(seconds[1:], kept, float(value))

    return once


if __name__ == "__main__":
    main(report, "jax.md", repeats=3)
