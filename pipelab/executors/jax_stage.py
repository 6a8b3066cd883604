"""A stage of a JAX model: what a worker's five kinds of action do to it. Values are immutable, so versions fall out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pipelab.executors.jax_device import JaxDevice
from pipelab.executors.worker import Bytes

Apply = Callable[
    ..., Any
]  # (parameters, x) -> y, or (parameters, x, key) -> y where forwards draw random numbers


@dataclass(frozen=True)
class JaxRecipe:
    """How to train, the same for all stages.

    loss         (output, target) -> mean, or (mean, how many it is the mean of); by default the samples are counted
    optimizer    an optax transformation; its state is per stage
    recompute    (total,) whether a micro-batch's forward runs again before its backward
    clip         largest norm of a step's gradient: over all stages if `shared_clip`, else per stage
    finite       whether a loss that is no number ends the run
    training     else the forwards only evaluate
    keep         whether to keep gradients and weights of every update
    pulls        what backwards pull: "both" gradients, or the "input"'s and the "weights"' apart
    """

    loss: Callable[[Any, Any], Any]
    optimizer: optax.GradientTransformation | None
    recompute: np.ndarray
    microbatches: int
    clip: float | None = None
    shared_clip: bool = True
    finite: bool = True
    training: bool = True
    keep: bool = False
    pulls: tuple[str, ...] = ("both",)


class _Kept(NamedTuple):
    """What a forward leaves for its backward: the input, and what `jax.vjp` saved beside input and weights."""

    x: Any
    residuals: list[jax.Array]
    shapes: Any
    counted: float


class _Parts(NamedTuple):
    """How a tree divides into floating leaves, which are differentiated, and others."""

    spec: Any
    floating: tuple[bool, ...]

    @classmethod
    def of(cls, tree: Any, none: bool = False) -> _Parts:
        leaves, spec = jax.tree.flatten(tree)
        return cls(
            spec,
            tuple(
                not none and bool(jnp.issubdtype(jnp.result_type(leaf), jnp.inexact))
                for leaf in leaves
            ),
        )

    def cut(self, tree: Any) -> tuple[list, list]:
        found: tuple[list, list] = [], []
        for leaf, floating in zip(jax.tree.leaves(tree), self.floating, strict=True):
            found[not floating].append(leaf)
        return found

    def join(self, floats: Sequence[Any], others: Sequence[Any]) -> Any:
        sides = iter(floats), iter(others)
        return self.spec.unflatten([next(sides[not floating]) for floating in self.floating])


class JaxStage:
    """One stage: a pure function, versions of its weights, and what its forwards left for their backwards.

    apply       (parameters, x) -> y; with seeds (parameters, x, key) -> y
    parameters  a tree of arrays
    versions    (total,) the weight version that each micro-batch reads
    groups      (total,) the update group of each micro-batch
    samples     (total,) how many samples each micro-batch has
    inputs      per micro-batch, on stage 0: the data. None elsewhere
    targets     per micro-batch, on the last stage. None elsewhere
    seeds       (total,) the random numbers that each forward draws from, or None

    Forward and backward are jitted, once per shape. Returning a vjp from a jitted function would copy every weight for every
    micro-batch: the leaves that are arguments are left out and put in again, so that what is kept are the true activations.
    """

    def __init__(
        self,
        apply: Apply,
        parameters: Any,
        device: JaxDevice,
        recipe: JaxRecipe,
        versions: np.ndarray,
        groups: np.ndarray,
        *,
        samples: Sequence[int] = (),
        inputs: Sequence[Any] | None = None,
        targets: Sequence[Any] | None = None,
        seeds: Sequence[int] | None = None,
    ) -> None:
        self.device, self.recipe, self._ledger = device, recipe, device.ledger
        self.inputs, self.targets, self.samples, self.seeds = inputs, targets, samples, seeds
        self.version_of, self.group_of = versions.tolist(), groups.tolist()
        self.weights: dict[int, Any] = {0: jax.device_put(parameters, device.device)}
        self.readers, self._left = Counter(self.version_of), Counter(self.group_of)
        self.optimizer = recipe.optimizer
        self.state = (
            jax.device_put(self.optimizer.init(parameters), device.device) if self.optimizer else ()
        )
        self.losses: dict[int, tuple[jax.Array, float]] = {}
        self.steps: list[tuple[dict[str, np.ndarray], dict[str, np.ndarray]]] = []
        self._stepped: Any = None
        self._kept: dict[int, _Kept] = {}
        self._split: dict[int, tuple[_Kept, list]] = {}
        self._sum: Any = None  # of the gradients of the group that is being accumulated
        self._counts: dict[int, float] = {}
        self._apply = apply
        self._saved: dict[
            Any, tuple[Any, list[int | None]]
        ] = {}  # by shapes: how what `jax.vjp` saved goes together
        self._outputs: dict[Any, _Parts] = {}  # by shapes
        self._forward = jax.jit(self._run, static_argnames=("keep",))
        self._backward = jax.jit(
            self._pull, static_argnames=("shapes", "of"), donate_argnames="total"
        )
        self._step, self._square = jax.jit(self._stepper), jax.jit(_square)

    @property
    def versions_held(self) -> int:
        """Weight versions kept."""
        return len(self.weights)

    def compile(self, shapes: tuple[Any, Any]) -> None:
        """Compile all that the stage runs, by doing each once on zeros: (x, target) of a micro-batch, as shapes and types.

        A callback in the stage is so called once more than it trains.
        """
        x, target = jax.device_put(
            jax.tree.map(lambda like: jnp.zeros(like.shape, like.dtype), shapes), self.device.device
        )
        weights = self.weights[0]
        if not self.recipe.training or self.recipe.recompute.any():
            self._forward(weights, x, target, *self._key(0), keep=False)
        if not self.recipe.training:
            return
        floats, _, residuals = self._forward(weights, x, target, *self._key(0), keep=True)
        seed = [jnp.zeros_like(leaf) for leaf in floats]
        for of in self.recipe.pulls:
            total = None if of == "input" else jax.tree.map(jnp.zeros_like, weights)
            self._backward(
                weights, x, target, residuals, seed, total, shapes=_shapes((x, target)), of=of
            )
        zeros = jax.tree.map(jnp.zeros_like, weights)
        jax.block_until_ready(
            (self._step(weights, self.state, zeros, 1.0), self.recipe.clip and self._square(zeros))
        )

    # ---- the five kinds of action

    def forward(self, microbatch: int, given: Any) -> Any:
        """The stage's output, or None on the last stage, which computes the loss."""
        x = given if self.inputs is None else self.inputs[microbatch]
        again = bool(self.recipe.recompute[microbatch])
        output, kept = self._compute(microbatch, x, keep=self.recipe.training and not again)
        if self.recipe.training:
            self._kept[microbatch] = kept
            self._hold(microbatch, kept)
        if self.targets is not None:
            mean, count = output
            self.losses[microbatch] = mean, count
            if self.recipe.finite and count and not np.isfinite(float(mean)):
                batch = microbatch // self.recipe.microbatches
                raise FloatingPointError(
                    f"the loss of micro-batch {microbatch} (batch {batch}) is {float(mean)}; else: finite=False"
                )
            return None
        return output

    def backward(self, microbatch: int, given: Any) -> Any:
        """Accumulate the weights' gradients; returns the input's."""
        kept, seed, count = self._prepare(microbatch, given)
        self._sum, gradient = self._pull_back(microbatch, kept, seed, of="both")
        self._finish(microbatch, count)
        return count, gradient

    def input_grad(self, microbatch: int, given: Any) -> Any:
        """The input's gradient alone; what is kept stays for `weight_grad`."""
        kept, seed, count = self._prepare(microbatch, given)
        _, gradient = self._pull_back(microbatch, kept, seed, of="input")
        self._split[microbatch] = kept._replace(counted=count), seed
        return count, gradient

    def weight_grad(self, microbatch: int, given: Any = None) -> None:
        """Accumulate the weights' gradients, which `input_grad` left out."""
        kept, seed = self._split.pop(microbatch)
        self._sum, _ = self._pull_back(microbatch, kept, seed, of="weights")
        self._finish(microbatch, kept.counted)

    def update(self, number: int, given: dict[int, float] | None = None) -> None:
        """Make version number + 1 from the latest one. `given`: by stage, the squared norm of its gradient."""
        assert self.optimizer
        count = self._counts.pop(number) or 1.0
        if self.recipe.clip is not None:
            square = sum(given.values()) if given else self.news()
            count /= min(1.0, self.recipe.clip / (square**0.5 / count + 1e-6))
        latest = self.weights[number]
        total = self._sum if self._sum is not None else jax.tree.map(jnp.zeros_like, latest)
        new, self.state, mean = jax.block_until_ready(self._step(latest, self.state, total, count))
        self._sum = None
        if self.recipe.keep:
            self._stepped = mean, new
        self.weights[number + 1] = new
        if not self.readers[number]:
            del self.weights[number]

    # ---- what is asked of it between actions and afterwards

    def complete(self, group: int) -> bool:
        return not self._left[group]

    def sums(self, group: int) -> list[Any]:
        raise NotImplementedError("replicas are not on jax")

    def replace_sums(self, group: int, sums: list[Any]) -> None:
        raise NotImplementedError("replicas are not on jax")

    def news(self) -> float:
        """The squared norm of the accumulated gradient."""
        return float(self._square(self._sum)) if self._sum is not None else 0.0

    def snapshot(self) -> None:
        """Keep the last update's gradients and weights; not part of the update, so that its time is its own."""
        if self._stepped is not None:
            mean, new = self._stepped
            self.steps.append((named(mean), named(new)))
            self._stepped = None

    def held(self) -> Bytes:
        latest = max(self.weights)
        others = (w for v, w in self.weights.items() if v != latest)
        return Bytes(
            _bytes(self.weights[latest]),
            sum(map(_bytes, others)),
            _bytes(self._sum),
            _bytes(self.state),
        )

    def trained(self) -> Any:
        """The latest weights, on the host."""
        return jax.device_get(self.weights[max(self.weights)])

    # ---- pieces of the actions

    def _key(self, microbatch: int) -> tuple:
        return (jax.random.key(self.seeds[microbatch]),) if self.seeds is not None else ()

    def _compute(self, microbatch: int, x: Any, keep: bool) -> tuple[Any, _Kept]:
        """Run the stage, and the loss behind the last one: (its output, or mean and count; what a backward needs)."""
        target, shapes = self._target(microbatch), _shapes((x, self._target(microbatch)))
        found = self._forward(
            self.weights[self.version_of[microbatch]], x, target, *self._key(microbatch), keep=keep
        )
        floats, (others, count), residuals = jax.block_until_ready(found)
        if self.targets is not None:
            counted = float(self.samples[microbatch] if count is None else count)
            return (floats[0], counted), _Kept(x, residuals, shapes, counted)
        return self._outputs[shapes].join(floats, others), _Kept(x, residuals, shapes, 0.0)

    def _function(self, x: Any, target: Any, *key: Any) -> tuple[Callable, list]:
        """(parameters, floating parts of x) -> (floating parts of the output, (the others, count)); and those parts of x.

        The data's parts are none: nobody asks for their gradient. On the last stage the output is the loss.
        """
        inputs, shapes = _Parts.of(x, none=self.inputs is not None), _shapes((x, target))
        parts, others = inputs.cut(x)

        def function(parameters: Any, parts: list) -> tuple[list, tuple[list, Any]]:
            y = self._apply(parameters, inputs.join(parts, others), *key)
            if self.targets is not None:
                value = self.recipe.loss(y, target)
                mean, count = value if isinstance(value, tuple) else (value, None)
                return [mean], ([], count)
            self._outputs[shapes] = _Parts.of(y)
            floats, rest = self._outputs[shapes].cut(y)
            return floats, (rest, None)

        return function, parts

    def _run(
        self, parameters: Any, x: Any, target: Any, *key: Any, keep: bool
    ) -> tuple[list, tuple, list]:
        function, parts = self._function(x, target, *key)
        if not keep:
            return *function(parameters, parts), []
        floats, pull, others = jax.vjp(function, parameters, parts, has_aux=True)
        saved, spec = jax.tree.flatten(pull)
        known = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((parameters, x, target)))}
        places = [known.get(id(leaf)) for leaf in saved]
        self._saved[_shapes((x, target))] = spec, places
        return (
            floats,
            others,
            [leaf for leaf, place in zip(saved, places, strict=True) if place is None],
        )

    def _pull(
        self,
        parameters: Any,
        x: Any,
        target: Any,
        residuals: list,
        seed: list,
        total: Any,
        *,
        shapes: Any,
        of: str,
    ) -> tuple[Any, list]:
        """(total + the weights' gradients, gradients of the input's floating parts); of="input" leaves the total alone."""
        spec, places = self._saved[shapes]
        arguments, rest = jax.tree.leaves((parameters, x, target)), iter(residuals)
        pull = jax.tree.unflatten(
            spec, [next(rest) if place is None else arguments[place] for place in places]
        )
        gradient, parts = pull(seed)
        return (total if of == "input" else jax.tree.map(jnp.add, total, gradient)), (
            [] if of == "weights" else parts
        )

    def _prepare(self, microbatch: int, given: Any) -> tuple[_Kept, list, float]:
        """What was kept, built again if it has to be; the gradients of the output's floating parts; and the count."""
        kept = self._kept.pop(microbatch)
        if self.recipe.recompute[microbatch]:
            self._ledger.drop((id(self), microbatch))
            _, kept = self._compute(microbatch, kept.x, keep=True)
            self._hold(microbatch, kept)
        if self.targets is None:
            count, gradients = given
            return kept, gradients, count
        mean = self.losses[microbatch][0]
        return kept, [jnp.full_like(mean, kept.counted)], kept.counted

    def _pull_back(self, microbatch: int, kept: _Kept, seed: list, of: str) -> tuple[Any, list]:
        weights = self.weights[self.version_of[microbatch]]
        if (
            self.targets is not None and not kept.counted
        ):  # nothing was counted: no gradient, whatever the mean is
            return self._sum, [jnp.zeros_like(leaf) for leaf in _Parts.of(kept.x).cut(kept.x)[0]]
        if of != "input" and self._sum is None:
            self._sum = jax.tree.map(jnp.zeros_like, weights)
        total = self._sum if of != "input" else None
        found = self._backward(
            weights,
            kept.x,
            self._target(microbatch),
            kept.residuals,
            seed,
            total,
            shapes=kept.shapes,
            of=of,
        )
        return jax.block_until_ready(found)

    def _target(self, microbatch: int) -> Any:
        return None if self.targets is None else self.targets[microbatch]

    def _finish(self, microbatch: int, count: float) -> None:
        self._ledger.drop((id(self), microbatch))
        group, version = self.group_of[microbatch], self.version_of[microbatch]
        self._counts[group] = self._counts.get(group, 0.0) + count
        self._left[group] -= 1
        self.readers[version] -= 1
        if not self.readers[version] and version != max(self.weights):
            del self.weights[version]

    def _hold(self, microbatch: int, kept: _Kept) -> None:
        inputs = [] if self.inputs is not None and not kept.residuals else jax.tree.leaves(kept.x)
        self._ledger.hold((id(self), microbatch), [*kept.residuals, *inputs])

    def _stepper(self, weights: Any, state: Any, total: Any, count: Any) -> tuple[Any, Any, Any]:
        assert self.optimizer
        mean = jax.tree.map(lambda g: (g / count).astype(g.dtype), total)
        change, state = self.optimizer.update(mean, state, weights)
        return optax.apply_updates(weights, change), state, mean


def named(tree: Any) -> dict[str, np.ndarray]:
    """A tree's leaves by their path, on the host."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _square(tree: Any) -> jax.Array:
    return sum((jnp.vdot(g, g).real for g in jax.tree.leaves(tree)), jnp.zeros(()))


def _shapes(tree: Any) -> tuple:
    leaves, spec = jax.tree.flatten(tree)
    return spec, tuple((jnp.result_type(leaf).name, jnp.shape(leaf)) for leaf in leaves)


def _bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in _leaves(tree))


def _leaves(tree: Any) -> Iterable[jax.Array]:
    return (leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array))
