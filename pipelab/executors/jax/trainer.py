"""The reference of JAX runs: one differentiated function on one device.

It shares no code with the worker or the stages.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pipelab.executors import trainer
from pipelab.executors.batches import samples_of
from pipelab.executors.jax.arguments import TREES, Part
from pipelab.executors.stage import Recipe
from pipelab.executors.trainer import Arrays, Losses, Piece


class Trainer(trainer.Trainer):
    """See `trainer.Trainer`; `wide` computes in float64, else as the run does.

    parts  the stages as (function, parameters)
    """

    def __init__(
        self, parts: Sequence[Part], recipe: Recipe, device: jax.Device, *, wide: bool
    ) -> None:
        self.recipe, self.device, self.wide = recipe, device, wide
        self._double = bool(jax.config.read("jax_enable_x64"))  # the caller's
        self.applies, parameters = zip(*parts, strict=True)
        floating = [d for d in map(jnp.result_type, jax.tree.leaves(parameters)) if _inexact(d)]
        lowest = max(floating, key=lambda d: jnp.finfo(d).eps, default=jnp.dtype(jnp.float32))
        self.eps = self.eps_of_steps = float(jnp.finfo(lowest).eps)
        self.computes_in = "float64" if wide else lowest.name
        self.history = [{0: self._placed(weights)} for weights in parameters]  # [stage][version]
        self.state_of_optimizer: Any = None
        if recipe.optimizer and not wide:
            self.state_of_optimizer = recipe.optimizer.init(list(parameters))
        self._step = jax.jit(self._stepped)

        def value(weights: list, x: Any, y: Any, keys: Any) -> tuple[Any, tuple[Any, Any]]:
            samples = samples_of((x, y), TREES)
            for s, apply in enumerate(self.applies):
                x = apply(weights[s], x, *([] if keys is None else [keys[s]]))
            result = recipe.loss(x, y)
            mean, count = result if isinstance(result, tuple) else (result, None)
            # A piece's gradient counts as much as its loss does; zero where that counts nothing.
            size = samples if count is None else count
            return mean * jnp.asarray(size).astype(mean.dtype), (mean, size)

        self._value = jax.jit(value)
        self._differentiate = jax.jit(jax.grad(value, has_aux=True))

    def losses(self, pieces: Sequence[Piece], jitter: int = 0) -> Losses:
        with self._active():
            found = [self._value(*given)[1] for given in self._arguments(pieces, jitter)]
        return [(float(mean), float(count)) for mean, count in found]

    def gradients(self, pieces: Sequence[Piece], jitter: int = 0) -> tuple[Losses, Arrays]:
        losses: Losses = []
        with self._active():
            weights = [next(iter(history.values())) for history in self.history]
            total = jax.tree.map(np.zeros_like, weights)
            for given in self._arguments(pieces, jitter):
                gradient, (mean, count) = self._differentiate(*given)
                losses.append((float(mean), float(count)))
                if count:
                    total = jax.tree.map(np.add, total, jax.device_get(gradient))
        count = sum(count for _, count in losses) or 1.0
        mean_gradient = jax.tree.map(lambda g: (g / count).astype(g.dtype), total)
        if self.recipe.clip is not None and self.recipe.shared_clip:
            mean_gradient = _clipped(mean_gradient, self.recipe.clip)
        elif self.recipe.clip is not None:
            mean_gradient = [_clipped(g, self.recipe.clip) for g in mean_gradient]
        return losses, self.arrays(mean_gradient)

    def step(self, t: int, gradients: Sequence[dict[str, Any]]) -> Arrays:
        latest = [history[t] for history in self.history]
        given = [self._like(w, g) for w, g in zip(latest, gradients, strict=True)]
        with self._active():
            after, self.state_of_optimizer = self._step(latest, self.state_of_optimizer, given)
        return self.arrays(after)

    def accept(self, t: int, weights: Sequence[dict[str, Any]]) -> None:
        for history, of_stage in zip(self.history, weights, strict=True):
            history[t] = self._placed(self._like(next(iter(history.values())), of_stage))

    def arrays(self, by_stage: Sequence[Any]) -> Arrays:
        return {
            f"{name} of stage {s}": wide(leaf)
            for s, of_stage in enumerate(by_stage)
            for name, leaf in named(of_stage).items()
        }

    def state(self) -> tuple[Arrays, Arrays]:
        return self.arrays([history[max(history)] for history in self.history]), {}

    # ---- pieces of it

    @contextmanager
    def _active(self) -> Iterator[None]:
        """On its device, where rounding is the run's own: a GPU may multiply in TF32."""
        with jax.default_device(self.device), jax.enable_x64(self.wide or self._double):
            yield

    def _placed(self, tree: Any) -> Any:
        """Arrays of numpy, in this trainer's precision; random keys as they are."""

        def placed(leaf: Any) -> Any:
            if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                return leaf
            return wide(leaf) if self.wide and _inexact(leaf.dtype) else np.asarray(leaf)

        return jax.tree.map(placed, tree)

    def _like(self, tree: Any, by_name: dict[str, Any]) -> Any:
        return jax.tree.unflatten(jax.tree.structure(tree), list(by_name.values()))

    def _arguments(self, pieces: Sequence[Piece], jitter: int) -> Iterator[tuple]:
        """Of each piece, weights of the versions that it reads, its data and its keys."""
        random = np.random.default_rng(jitter)
        for piece in pieces:
            weights = [history[v] for history, v in zip(self.history, piece.reads, strict=True)]
            with jax.enable_x64(self._double):
                data = jax.tree.map(jnp.asarray, (piece.x, piece.y))  # as the run takes them
            x, y = self._placed(data)
            if jitter:
                jittered = partial(off_by, eps=self.eps, random=random)
                weights, x = jax.tree.map(jittered, (weights, x))
            keys = None
            if piece.seeds is not None:
                keys = [jax.random.key(seed) for seed in piece.seeds]
            yield weights, x, y, keys

    def _stepped(self, weights: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
        change, state = self.recipe.optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, change), state


def named(tree: Any) -> dict[str, np.ndarray]:
    """A tree's leaves by their path, on the host."""
    leaves = map(np.asarray, jax.tree.leaves(tree))
    return dict(zip(names(tree), leaves, strict=True))


def names(tree: Any) -> list[str]:
    """The paths of a tree's leaves."""
    paths = [path for path, _ in jax.tree.leaves_with_path(tree)]
    return [jax.tree_util.keystr(path, simple=True, separator=".") for path in paths]


def wide(leaf: Any) -> np.ndarray:
    """As float64 or complex128."""
    array = np.asarray(leaf)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def off_by(leaf: Any, eps: float, random: np.random.Generator) -> Any:
    """An array whose floating numbers are each off by up to an eps of itself."""
    if not _inexact(leaf.dtype):
        return leaf
    off = random.uniform(-1, 1, leaf.shape)
    return (leaf + leaf * (eps * off)).astype(leaf.dtype)


def _clipped(tree: Any, largest: float) -> Any:
    norm = float(np.sqrt(sum(float(np.vdot(g, g).real) for g in jax.tree.leaves(tree))))
    factor = min(1.0, largest / (norm + 1e-6))
    return jax.tree.map(lambda g: (g * factor).astype(g.dtype), tree)
