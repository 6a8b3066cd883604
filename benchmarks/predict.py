"""Costs fitted on one run predict others: python benchmarks/predict.py."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from socket import create_server
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
from torch.nn import functional as F

from measure import cores, machine, main, one_thread, page, paragraph, table
from pipelab import Costs, Timeline, explain, fit, make, run, simulate
from pipelab.models import mlp, split
from pipelab.optimize.cut import Profile, profile, uniform


class Target(NamedTuple):
    """What is predicted; `balance`: layers a stage, if not as many in each."""

    schedule: str
    microbatches: int
    balance: Sequence[int] = ()


@dataclass(frozen=True)
class Sizes:
    """An MLP of `layers` layers of `width`; actions of tens of ms. The default takes 10 minutes."""

    width: int = 1024
    layers: int = 8
    samples: int = 64  # a micro-batch
    batches: int = 3
    microbatches: int = 8  # of the run that is fitted
    targets: Sequence[Target] = (
        Target("gpipe", 8),
        Target("gpipe", 16),
        Target("gpipe", 32),
        Target("pipedream_flush", 8),
        Target("pipedream_flush", 16),
        Target("pipedream_flush", 32),
        Target("interleaved", 8),
        Target("gpipe", 8, (3, 5)),
    )
    shared: Sequence[Target] = (Target("gpipe", 16), Target("pipedream_flush", 8))


class Turn(NamedTuple):
    """Seconds of a run without its first batch: predicted, measured, and measured again."""

    predicted: float
    measured: float
    again: float

    @property
    def error(self) -> float:
        return 100 * (self.predicted / self.measured - 1)

    @property
    def noise(self) -> float:
        """A/A: how far the same run is from itself."""
        return 100 * (self.again / self.measured - 1)


def report(repeats: int = 5, sizes: Sizes = Sizes()) -> str:
    """Predictions beside runs, as a Markdown page."""
    with one_thread():
        layers, torchs = _profile(sizes), ("threads", "processes")
        rows, shared = [], []
        for backend in torchs:
            rows += _rows(backend, 2, sizes.targets, repeats, sizes, layers)
            shared += _rows(backend, 2 * cores(), sizes.shared, repeats, sizes, layers)
        rows += _rows_of_processes(repeats, sizes, layers)
        explained, used = _explained(sizes), cores_used(sizes)
        one_process = _rows("jax", 2, sizes.targets[-1:], repeats, sizes, layers)
    header = ["backend", "schedule", "m", "predicted", "measured", "error (%)", "A/A (%)"]
    return page(
        "# Predictions",
        machine("numpy", "torch", "jax"),
        paragraph(
            f"An MLP of {sizes.layers} layers of {sizes.width}, {sizes.samples} samples a "
            f"micro-batch, float32, SGD, {sizes.batches} batches of which the first, which warms "
            "up, is left out everywhere. Every rank computes with one thread; jax in two "
            "processes, each with one core. In turn: a run of GPipe with "
            f"m = {sizes.microbatches} is fitted (`pipelab.fit`), the other one is predicted, run, "
            f"and run again; {repeats} turns each. Makespans in ms (medians). The paired error, "
            "predicted against the run just after the fit, and A/A, that run against itself "
            "again: the median, in brackets the median of its sizes and the range. Interleaved: "
            "`Costs.split`; another balance: `profile`d layers scaled to the fitted stages."
        ),
        table([*header, "within"], rows),
        "## More devices than cores",
        paragraph(
            f"{2 * cores()} devices on {cores()} cores. How they share the cores is in the fitted "
            "costs: the prediction takes it to be the same in the other schedule."
        ),
        table([*header, "within"], shared),
        "## Host devices of one jax process",
        paragraph(
            "They share the process's threads: one device that computes alone here keeps "
            f"{used:.2f} cores busy, as XLA runs operations of one program side by side. So two "
            "devices are not two workers, and which layers are on which makes little difference:"
        ),
        table([*header, "within"], one_process),
        "## One gap, explained",
        paragraph(
            "1F1B on processes, predicted from GPipe, and the same run again, whose difference is "
            "the line under which no cause is claimed (`explain(..., repeats=)`):"
        ),
        f"```\n{explained}\n```",
    )


def _rows(
    backend: str,
    devices: int,
    targets: Sequence[Target],
    repeats: int,
    sizes: Sizes,
    layers: Profile,
) -> list[list[str]]:
    rows = []
    for target in targets:
        turns = [_turn(backend, devices, target, sizes, layers) for _ in range(repeats)]
        errors, noise = [t.error for t in turns], [t.noise for t in turns]
        typical = statistics.median(map(abs, noise))
        good = abs(statistics.median(errors)) <= max(5, typical)
        name = target.schedule + (f" {list(target.balance)}" if target.balance else "")
        row = [
            backend,
            name,
            str(target.microbatches),
            *(f"{1e3 * statistics.median(t[i] for t in turns):.0f}" for i in range(2)),
            _spread(errors),
            _spread(noise),
            "yes" if good else "no",
        ]
        rows.append(row)
    return rows


def _rows_of_processes(repeats: int, sizes: Sizes, layers: Profile) -> list[list[str]]:
    """Those of jax: two processes, both of which make all runs; each on a core of its own."""
    with create_server(("localhost", 0)) as free:
        address = f"localhost:{free.getsockname()[1]}"
    context = get_context("spawn")
    found = context.SimpleQueue()
    about = address, repeats, sizes, layers, found
    ranks = [context.Process(target=_one_of_two, args=(rank, *about)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
        if rank.exitcode:
            raise RuntimeError(f"a process of jax ended with status {rank.exitcode}")
    return found.get()


def _one_of_two(
    rank: int, address: str, repeats: int, sizes: Sizes, layers: Profile, found: Any
) -> None:
    usable = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {usable[rank % len(usable)]})  # before jax makes its threads
    jax.distributed.initialize(address, num_processes=2, process_id=rank)
    rows = _rows("jax", 2, sizes.targets, repeats, sizes, layers)
    if rank == 0:
        found.put(rows)


def cores_used(sizes: Sizes) -> float:
    """How many cores one host device of two keeps busy."""
    with suppress(RuntimeError):  # too late where jax is in use already
        jax.config.update("jax_num_cpu_devices", 2)
    ((apply, weights),), ((x, target), *_), loss, _ = jax_stages(sizes, [sizes.layers], 1)
    step = jax.jit(jax.grad(lambda weights: loss(apply(weights, x), target)))
    jax.block_until_ready(step(weights))
    wall, on_core = time.perf_counter(), time.process_time()
    for _ in range(20):
        jax.block_until_ready(step(weights))
    return (time.process_time() - on_core) / (time.perf_counter() - wall)


def _spread(percents: Sequence[float]) -> str:
    """The median, then that of the sizes, and the range."""
    size = statistics.median(map(abs, percents))
    middle = statistics.median(percents)
    return f"{middle:+.1f} ({size:.1f}; {min(percents):+.1f} to {max(percents):+.1f})"


def _turn(backend: str, devices: int, target: Target, sizes: Sizes, layers: Profile) -> Turn:
    """Fit, predict, run, run again."""
    even = uniform(sizes.layers, devices)
    seen = timed(backend, "gpipe", devices, sizes.microbatches, even, sizes)
    costs, v = fit(seen), 2 if target.schedule == "interleaved" else 1
    balance = target.balance or uniform(sizes.layers, v * devices)
    predicted = _balanced(costs, layers, even, balance) if target.balance else costs.split(v)
    name, m = target.schedule, target.microbatches
    schedule = make(name, devices, m, virtual=v, batches=sizes.batches)
    found = [timed(backend, name, devices, m, balance, sizes) for _ in range(2)]
    timelines = simulate(schedule, predicted), *found
    model, measured, again = (t.warmed_up().makespan for t in timelines)
    return Turn(model, measured, again)


def _balanced(costs: Costs, layers: Profile, seen: Sequence[int], balance: Sequence[int]) -> Costs:
    """The costs of other stages of the same layers."""
    share = np.divide(balance, sum(balance))  # of the weights, which an update goes through
    return replace(
        _as_measured(layers, costs, seen).costs(balance),
        update=(sum(costs.of("update", len(seen))) * share).tolist(),
        transfer=costs.transfer,
        overhead=costs.overhead,
        speed=costs.speed,
    )


def _as_measured(layers: Profile, costs: Costs, balance: Sequence[int]) -> Profile:
    """The layers as the stages of a balance took in a run, by `fit`'s costs of that run.

    Each stage's seconds are shared among its layers as they are here, or evenly where these know
    none.
    """
    stage = np.repeat(np.arange(len(balance)), balance)
    scaled = {}
    for name in ("forward", "input_grad", "weight_grad"):
        mine = layers.of(name)
        mine = np.where(np.bincount(stage, mine)[stage] > 0, mine, 1.0)
        took = np.array(costs.of(name, len(balance)))
        scaled[name] = (mine * (took / np.bincount(stage, mine))[stage]).tolist()
    found = (
        replace(layer, forward=f, input_grad=i, weight_grad=w)
        for layer, f, i, w in zip(layers.layers, *scaled.values(), strict=True)
    )
    return replace(layers, layers=tuple(found))


def _profile(sizes: Sizes) -> Profile:
    x = torch.randn(sizes.samples, sizes.width)
    return profile(list(mlp(sizes.layers, sizes.width)), x, loss=F.mse_loss, target=x)


def timed(
    backend: str, name: str, devices: int, m: int, balance: Sequence[int], sizes: Sizes
) -> Timeline:
    """A run's timeline, without a check."""
    schedule = make(name, devices, m, virtual=len(balance) // devices, batches=sizes.batches)
    model = jax_stages if backend == "jax" else torch_stages
    stages, batches, loss, optimizer = model(sizes, balance, m)
    done = run(schedule, stages, batches, loss, optimizer, backend=backend, check=False)
    return done.timeline


def torch_stages(sizes: Sizes, balance: Sequence[int], m: int) -> tuple[Any, ...]:
    torch.manual_seed(0)
    stages = split(mlp(sizes.layers, sizes.width), balance)
    shape = (sizes.samples * m, sizes.width)
    batches = [(torch.randn(shape), torch.randn(shape)) for _ in range(sizes.batches)]
    return stages, batches, F.mse_loss, partial(torch.optim.SGD, lr=0.01)


def jax_stages(sizes: Sizes, balance: Sequence[int], m: int) -> tuple[Any, ...]:
    """The same in JAX: stages as functions and their parameters."""
    draw = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.array(draw.standard_normal(shape, np.float32))

    def stage(layers: int) -> tuple[Callable, list[jax.Array]]:
        weights = [normal(sizes.width, sizes.width) / sizes.width**0.5 for _ in range(layers)]
        return _layers, weights

    shape = (sizes.samples * m, sizes.width)
    batches = [(normal(*shape), normal(*shape)) for _ in range(sizes.batches)]
    return [stage(n) for n in balance], batches, _mse, optax.sgd(0.01)


def _layers(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jax.nn.relu(x @ weight)
    return x


def _mse(y: jax.Array, target: jax.Array) -> jax.Array:
    return ((y - target) ** 2).mean()


def _explained(sizes: Sizes) -> str:
    even, m = uniform(sizes.layers, 2), sizes.microbatches
    costs = fit(timed("processes", "gpipe", 2, m, even, sizes))
    runs = [timed("processes", "pipedream_flush", 2, m, even, sizes) for _ in range(3)]
    return str(explain(costs, runs[0], runs[1:]))


if __name__ == "__main__":
    main(report, "predict.md", repeats=5)
