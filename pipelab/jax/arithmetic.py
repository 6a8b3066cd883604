"""JAX's arithmetic for the reference: one differentiated function on one device.

It shares no code with the worker or the stages.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pipelab.jax.arguments import TREES, Part
from pipelab.jax.host import is_key_type
from pipelab.jax.jaxpr import all_equations
from pipelab.runtime.batches import samples_of
from pipelab.runtime.options import Options
from pipelab.runtime.verdict import reference
from pipelab.runtime.verdict.reference import Piece, Sums, Weights
from pipelab.runtime.verdict.views import AT_ONCE

HOSTS = {"cpu"}  # where numpy compares, whose parts stay in the cache


class JaxArithmetic(reference.Arithmetic):
    """See `reference.Arithmetic`; `wide` computes in float64, else as the run does.

    parts  the stages as (function, parameters)
    begun  by stage, what training goes on from; `first` is the latest version there
    """

    trees = TREES

    def __init__(
        self,
        parts: Sequence[Part],
        options: Options,
        device: jax.Device,
        *,
        wide: bool,
        first: int,
        begun: Sequence[Any],
    ) -> None:
        self.options, self.device, self.wide = options, device, wide
        self.here = device.platform in HOSTS
        self.at_once = AT_ONCE if self.here else 2**24
        self._double = bool(jax.config.read("jax_enable_x64"))  # the caller's
        self.applies, parameters = zip(*parts, strict=True)
        # [1] names and types of the weights: trees at the border, dictionaries within
        self._structures = [jax.tree.structure(of_stage) for of_stage in parameters]
        self._types = [{n: w.dtype for n, w in named(of).items()} for of in parameters]
        self.trained = [[n for n, t in types.items() if _inexact(t)] for types in self._types]
        self.eps = {
            f"{name} of stage {s}": float(jnp.finfo(self._types[s][name]).eps)
            for s, names_of_stage in enumerate(self.trained)
            for name in names_of_stage
        }
        # [2] the coarsest type of the weights: how far rounding leads
        floating = [t for types in self._types for t in types.values() if _inexact(t)]
        lowest = max(floating, key=lambda d: jnp.finfo(d).eps, default=jnp.dtype(jnp.float32))
        self.coarsest = self.eps_of_loss = float(jnp.finfo(lowest).eps)
        self.computes_in = "float64" if wide else jnp.finfo(lowest).dtype.name
        # [3] what training starts from; the truth never steps
        self.history = [{first: self.named(of)} for of in parameters]
        for s, state in enumerate(begun):
            self.history[s] = {v: self.named(of) for v, of in state.weights.items()}
        # One optimizer for all stages, as without a pipeline, but where those of stages go on.
        self.state_of_optimizer: Any = [state.optimizer for state in begun]
        self._by_stage = bool(begun)
        if options.optimizer and not wide and not begun:
            self.state_of_optimizer = options.optimizer.init(list(parameters))
        self._step = jax.jit(self._stepped)

        # [4] the whole model as one function, jitted once for each shape of its data
        def value(weights: list, x: Any, y: Any, keys: Any, unit: float) -> tuple[Any, Any]:
            samples = samples_of((x, y), TREES)
            for s, apply in enumerate(self.applies):
                forward = jax.checkpoint(apply) if self.sparing else apply
                x = forward(weights[s], x, *([] if keys is None else [keys[s]]))
            result = options.loss(x, y)
            mean, count = result if isinstance(result, tuple) else (result, samples)
            # The loss times what it counts: its gradient can be added up over pieces. In the loss's
            # type, as a run has it.
            weight = jnp.asarray(count / unit, mean.dtype)
            return mean * weight, (mean, count, weight)

        self._value = jax.jit(value)
        self._differentiate = jax.jit(jax.grad(value, has_aux=True))

    def compute(
        self, weights: Sequence[Weights], piece: Piece, unit: float, sums: Sums | None = None
    ) -> tuple[float, float, float]:
        function = self._value if sums is None else self._differentiate
        with self._active():
            found, (mean, count, weight) = function(*self._arguments(weights, piece), unit)
            gradients = [] if sums is None else list(map(self.named, found))
            for total, of_stage in zip(sums or [], gradients, strict=True):
                for name, g in of_stage.items():
                    own = g if count else g * 0 if self.here else jnp.zeros_like(g)
                    total[name] = total[name] + own if name in total else own
        self.eps_of_loss = float(jnp.finfo(mean.dtype).eps)
        return float(mean), float(count), float(weight)

    def joined_loss(self, weights: Sequence[Weights], pieces: Sequence[Piece]) -> float:
        found = []
        with self._active():
            for piece in pieces:
                parameters, x, y, keys = self._arguments(weights, piece)
                for s, apply in enumerate(self.applies):
                    x = apply(parameters[s], x, *([] if keys is None else [keys[s]]))
                found.append((x, y))
            value = self.options.loss(*TREES.joined(found))
        return float(value[0] if isinstance(value, tuple) else value)

    def narrowed(self, weights: Sequence[Weights], piece: Piece) -> float:
        function = self._differentiate if self.options.training else self._value
        with self._active():
            made = jax.make_jaxpr(function)(*self._arguments(weights, piece), 1.0)
        return max(map(_narrowed, all_equations(made.jaxpr.eqns)), default=0.0)

    def step(self, weights: Sequence[Weights], gradients: Sequence[Weights]) -> list[Weights]:
        placed = [self.place(s, of_stage) for s, of_stage in enumerate(gradients)]
        with self._active():
            after, self.state_of_optimizer = self._step(
                self._trees(weights), self.state_of_optimizer, self._trees(placed)
            )
        return list(map(self.named, after))

    def place(self, stage: int, weights: Weights) -> dict[str, Any]:
        types = self._types[stage]
        return {name: self._placed(weights[name].astype(types[name])) for name in types}

    def named(self, weights: Any) -> Weights:
        if self.here:
            return named(weights)
        leaves = jax.tree.leaves(weights)
        arrays = [leaf if isinstance(leaf, jax.Array) else np.asarray(leaf) for leaf in leaves]
        return dict(zip(names(weights), arrays, strict=True))

    def widened(self, array: Any) -> Any:
        if self.here or not _inexact(array.dtype):
            return wide(array)
        return jax.device_put(array, self.device).astype(_wide_type(array))

    def off(self, array: Any, size: float, seed: int) -> Any:
        if self.here:
            return off_by(wide(array), size, np.random.default_rng(seed))
        array = self.widened(array)
        errors = jax.random.uniform(jax.random.key(seed), array.shape, float, -size, size)
        return array + jnp.where(jnp.isfinite(array), array, 0) * errors

    def comparing(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.here else self._active(wide=True)

    # ---- pieces of it

    @contextmanager
    def _active(self, wide: bool = False) -> Iterator[None]:
        """On its device, where rounding is the run's own: a GPU may multiply in TF32."""
        with jax.default_device(self.device), jax.enable_x64(wide or self.wide or self._double):
            yield

    def _placed(self, leaf: Any) -> Any:
        """An array in this precision, of numpy on a CPU; random keys as they are."""
        if is_key_type(leaf.dtype):
            return leaf
        if self.here:
            return wide(leaf) if self.wide else np.asarray(leaf)
        with self._active():
            leaf = jax.device_put(leaf, self.device)
            return leaf.astype(_wide_type(leaf)) if self.wide and _inexact(leaf.dtype) else leaf

    def _trees(self, by_stage: Sequence[Weights]) -> list[Any]:
        pairs = zip(self._structures, by_stage, strict=True)
        return [jax.tree.unflatten(structure, list(of.values())) for structure, of in pairs]

    def _arguments(self, weights: Sequence[Weights], piece: Piece) -> tuple:
        """Trees of the weights, the data as the run takes them, and the keys."""
        with jax.enable_x64(self._double):
            # First as the run takes them, where float64 data may become float32; widened after
            # that.
            data = jax.tree.map(jnp.asarray, (piece.x, piece.y))
        x, y = jax.tree.map(self._placed, data)
        keys = None if piece.seeds is None else [jax.random.key(seed) for seed in piece.seeds]
        return self._trees(weights), x, y, keys

    def _stepped(self, weights: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
        if self._by_stage:
            stages = zip(weights, state, gradient, strict=True)
            after, states = zip(*(self._step_of(*stage) for stage in stages), strict=True)
            return after, states
        return self._step_of(weights, state, gradient)

    def _step_of(self, weights: Any, state: Any, gradient: Any) -> tuple[Any, Any]:
        change, state = self.options.optimizer.update(gradient, state, weights)
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
    """The value as float64 or complex128; whole numbers and truth values as they are."""
    array = np.asarray(leaf)
    return array.astype(_wide_type(array)) if _inexact(array.dtype) else array


def _wide_type(array: Any) -> Any:
    return np.complex128 if np.iscomplexobj(array) else np.float64


def _inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def _narrowed(eqn: Any) -> float:
    """The eps of a result that has fewer digits than what it is computed from; 0 if none has."""
    given, made = (
        [float(jnp.finfo(v.aval.dtype).eps) for v in atoms if _inexact(_dtype(v))]
        for atoms in (eqn.invars, eqn.outvars)
    )
    return max((eps for eps in made if given and eps > min(given)), default=0.0)


def _dtype(atom: Any) -> Any:
    return getattr(atom.aval, "dtype", np.dtype(bool))


def off_by(array: Any, eps: float, random: np.random.Generator) -> Any:
    """An array whose finite numbers are each off by up to an eps of itself."""
    errors = eps * random.uniform(-1, 1, array.shape)
    return array + np.where(np.isfinite(array), array, 0) * errors


def off_by_rounding(leaf: Any, eps: float, random: np.random.Generator) -> Any:
    """An array whose finite floating numbers are each off by up to an eps of itself."""
    if not _inexact(leaf.dtype):
        return leaf
    return off_by(np.asarray(leaf), eps, random).astype(leaf.dtype)
