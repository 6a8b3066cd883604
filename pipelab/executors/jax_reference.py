"""The references of JAX runs: each update rule as its paper writes it, one differentiated function on one device.

They share no code with the worker, the stages or the schedule's versions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pipelab.executors.rules import FLUSH, Check, Comparison, Reading


class Piece(NamedTuple):
    """What one gradient of the reference computes: a batch or a part of it, the version of every stage, and its seeds."""

    x: Any
    y: Any
    reads: Sequence[int]
    seeds: Sequence[int] | None = None


def pieces_of(
    batches: Sequence[tuple[Any, Any]], reading: Reading, seeds: np.ndarray | None = None
) -> list[list[Piece]]:
    """The pieces of every update: the batches' data in their order, cut into as many parts; `seeds` are [stage, piece]."""
    parts = sum(map(len, reading)) // len(batches)
    data = iter([part for batch in batches for part in cut(batch, parts)])
    drawn = iter(seeds.T.tolist() if seeds is not None else [])
    return [
        [Piece(*next(data), reads, next(drawn, None)) for reads in of_update]
        for of_update in reading
    ]


def cut(batch: tuple[Any, Any], count: int) -> list[tuple[Any, Any]]:
    """A batch in `count` parts along the first axis of every array."""
    leaves, spec = jax.tree.flatten(tuple(batch))
    parts = [np.array_split(leaf, count) if np.ndim(leaf) else [leaf] * count for leaf in leaves]
    return [jax.tree.unflatten(spec, [p[k] for p in parts]) for k in range(count)]


def check(
    rule: str,
    applies: Sequence[Callable],
    parameters: Sequence[Any],
    updates: Sequence[list[Piece]],
    loss: Callable,
    optimizer: optax.GradientTransformation,
    steps: Sequence[list[tuple[dict, dict]]],
    losses: Sequence[float],
    tolerance: float,
    clip: float | None = None,
) -> Check:
    """Train by the rule and compare, update by update: gradients with the reference's own, then the change of the weights
    with the step that the optimizer takes from the run's gradient (as for torch: see `reference.check`)."""

    @jax.jit
    def differentiate(
        weights: list, piece_x: Any, piece_y: Any, keys: list | None
    ) -> tuple[tuple[Any, Any], list]:
        def value(weights: list) -> tuple[Any, Any]:
            x = piece_x
            for s, apply in enumerate(applies):
                x = apply(weights[s], x, *([keys[s]] if keys else []))
            result = loss(x, piece_y)
            return result if isinstance(result, tuple) else (result, None)

        return jax.value_and_grad(value, has_aux=True)(weights)

    found, of_run = Comparison(), iter(losses)
    history = [{0: weights} for weights in parameters]
    state = optimizer.init(list(parameters))
    step = jax.jit(optimizer.update)
    for t, pieces in enumerate(updates):
        sums, total = None, 0.0
        for piece in pieces:
            keys = (
                [jax.random.key(seed) for seed in piece.seeds] if piece.seeds is not None else None
            )
            reads = [history[s][v] for s, v in enumerate(piece.reads)]
            (mean, counted), gradient = differentiate(reads, piece.x, piece.y, keys)
            count = float(
                len(jax.tree.leaves((piece.x, piece.y))[0]) if counted is None else counted
            )
            reported = next(of_run)
            if count:
                found.add(f"a loss of update {t}", np.array(reported), wide(mean))
                weighted = jax.tree.map(lambda g, c=count: g * c, gradient)
                sums = weighted if sums is None else jax.tree.map(jnp.add, sums, weighted)
            total += count
        mine = (
            jax.tree.map(lambda g, n=total: g / n, sums)
            if sums is not None
            else jax.tree.map(jnp.zeros_like, [h[t] for h in history])
        )
        if clip is not None:
            mine = (
                _clipped(mine, clip)
                if rule == FLUSH
                else [_clipped(of_stage, clip) for of_stage in mine]
            )
        largest = max(
            (float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(mine) if leaf.size), default=0.0
        )
        latest = [h[t] for h in history]
        theirs = [
            jax.tree.unflatten(jax.tree.structure(w), list(steps[s][t][0].values()))
            for s, w in enumerate(latest)
        ]
        change, state = step(theirs, state, latest)
        for s, new in enumerate(optax.apply_updates(latest, change)):
            history[s][t + 1] = new
            leaves = zip(
                *map(jax.tree.leaves, (mine[s], latest[s], new)),
                steps[s][t][0].items(),
                steps[s][t][1].values(),
                strict=True,
            )
            for gradient, before, after, (name, got), weight in leaves:
                eps = float(jnp.finfo(after.dtype).eps)
                found.add(
                    f"the gradient of {name} of stage {s} in update {t}",
                    wide(got),
                    wide(gradient),
                    16 * eps * largest / tolerance,
                )
                floor = 4 * eps * float(jnp.abs(after).max()) / tolerance if after.size else 0.0
                found.add(
                    f"weight {name} of stage {s} after update {t}",
                    wide(weight) - wide(before),
                    wide(after) - wide(before),
                    floor,
                )
            ahead = {piece.reads[s] for later in updates[t + 1 :] for piece in later} | {t + 1}
            history[s] = {v: w for v, w in history[s].items() if v in ahead}
    return found.verdict(tolerance, rule)


def wide(array: Any) -> np.ndarray:
    """As float64 or complex128, for `Comparison`."""
    array = np.asarray(array)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _clipped(tree: Any, largest: float) -> Any:
    norm = float(np.sqrt(sum(float(jnp.vdot(g, g).real) for g in jax.tree.leaves(tree))))
    factor = min(1.0, largest / (norm + 1e-6))
    return jax.tree.map(lambda g: g * factor, tree)
