"""JAX's arithmetic for the replay: a micro-batch through a stage, its pull, and a step.

Each stage is one function, differentiated by jax's own vjp: one program goes forward and one back,
where the gradients are added up, as in the run. It shares no code with the worker or the stages.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from pipelab.jax.arguments import TREES, Functional
from pipelab.jax.host import named, names
from pipelab.jax.jaxpr import all_equations
from pipelab.jax.passes import EXACT
from pipelab.runtime.options import Options
from pipelab.runtime.verdict.compare import EPS_32
from pipelab.runtime.verdict.replay import Library, Piece, Sums, Weights


class _Ran(NamedTuple):
    """What the backward of a forward takes: its pullback, or what the forward runs again with."""

    s: int
    arguments: tuple
    pull: Any
    loss: tuple[Any, float] | None


class JaxLibrary(Library):
    """See `replay.Library`; `wide`: the type to compute in, if not the run's.

    nudge  how far weights are moved up or down before anything is computed, in their eps
    """

    trees, nudge = TREES, 0

    def __init__(
        self,
        stages: Sequence[Functional],
        options: Options,
        device: jax.Device,
        made: "Made",
        wide: str = "",
    ) -> None:
        self.options, self.device, self.wide = options, device, wide
        self.double = bool(jax.config.read("jax_enable_x64"))  # the caller's
        self.stages = len(stages)
        self.applies = [apply for apply, _ in stages]
        self.specs: list[Any] = [jax.tree.structure(parameters) for _, parameters in stages]
        self.names = [names(parameters) for _, parameters in stages]
        losses = [None] * (len(stages) - 1) + [options.loss]
        self._programs = [*map(made.programs, self.applies, losses)]

    def place(self, weights: Weights) -> Weights:
        with self.active():
            placed = {name: self._widened(jnp.asarray(w)) for name, w in weights.items()}
            return {name: self._nudged(w) for name, w in placed.items()} if self.nudge else placed

    def forward(self, s: int, weights: Weights, x: Any, past: Any, piece: Piece) -> tuple:
        last = s == self.stages - 1
        with self.active():
            parameters = self._tree(s, weights)
            entered, data = (x, None) if s else (None, self.data(x))
            target = self.data(piece.y) if last else None
            seed = None if piece.seeds is None else np.uint32(piece.seeds[s])
            self.drew |= seed is not None
            arguments = parameters, entered, data, target, seed
            keep, pull = self.options.training and not piece.again, None
            if keep:
                y, pull, rest = self._programs[s].graph(*arguments)
            else:
                y, rest = self._programs[s].alone(*arguments)
            if self.wide == "float64":
                traced = self._programs[s].graph.trace(*arguments).jaxpr
                results = (v.aval for eqn in all_equations(traced.eqns) for v in eqn.outvars)
                types = {getattr(each, "dtype", bool) for each in results}
                of_floats = (float(jnp.finfo(t).eps) for t in types if _inexact(t))
                self.narrowest = max([self.narrowest, *of_floats])
            count, output = rest
            if self.outputs is not None and last:
                self.outputs.append((output, target))
        loss = (y, float(piece.samples if count is None else count)) if last else None
        return y, (), _Ran(s, arguments, pull, loss)

    def again(self, kept: _Ran) -> _Ran:
        if kept.pull is None:
            with self.active():
                _, pull, _ = self._programs[kept.s].graph(*kept.arguments)
            kept = kept._replace(pull=pull)
        return kept  # the loss that is reported is that of the first forward

    def start(self, kept: _Ran, unit: float) -> tuple[Any, float]:
        assert kept.loss is not None
        mean, count = kept.loss
        # As the loss's type has it: what gradients were multiplied by is what they are divided by.
        start = np.full(mean.shape, count / unit, mean.dtype)
        return start, float(start)

    def pull(self, kept: _Ran, gradient: Any, owed: Any, weighs: bool, sums: Sums) -> tuple:
        with self.active():
            if not sums:
                weights = jax.tree.leaves(kept.arguments[0])
                zeros = [jnp.zeros(w.shape, sum_type(w.dtype)) for w in weights]
                sums.update(zip(self.names[kept.s], zeros, strict=True))
            total, back = _pulled(kept.pull, gradient, [*sums.values()])
            if not weighs:
                return jax.tree.map(jnp.zeros_like, back), ()
            sums.update(zip(sums, total, strict=True))
            return back, ()

    # ---- sums

    def divided(self, sums: Sums, divisor: float) -> Sums:
        with self.active():
            return dict(zip(sums, _divided([*sums.values()], divisor), strict=True))

    # ---- what is asked of it beside

    def layers(self, s: int, weights: Weights) -> dict[str, Callable[[Any], Any]]:
        return {f"stage {s}": partial(self.applies[s], self._tree(s, weights))}

    # ---- pieces of it

    @contextmanager
    def active(self) -> Iterator[None]:
        double = self.double or self.wide == "float64"
        with jax.default_device(self.device), jax.enable_x64(double):
            yield

    def _tree(self, s: int, weights: Weights) -> Any:
        """A stage's parameters."""
        return self.specs[s].unflatten([weights[name] for name in self.names[s]])

    def data(self, tree: Any) -> Any:
        """Data as the run takes them, where float64 may become float32."""
        with jax.enable_x64(self.double):
            arrays = jax.tree.map(jnp.asarray, tree)
        return jax.tree.map(self._widened, arrays)

    def _widened(self, array: Any) -> Any:
        if not self.wide or not _inexact(array.dtype):
            return array
        kind = np.promote_types(self.wide, "complex64") if jnp.iscomplexobj(array) else self.wide
        return array.astype(kind)

    def _nudged(self, array: Any) -> Any:
        share = np.asarray(self.nudge * jnp.finfo(array.dtype).eps, array.dtype)
        upwards = np.random.default_rng(0).random(array.shape) < 0.5
        return array + jnp.where(upwards, share, -share) * array


class Programs(NamedTuple):
    """A stage: (parameters, input, or else data, target, seed) -> output, what comes beside.

    graph  returns between them its pullback: gradient of the output -> of parameters and input
    """

    alone: Any
    graph: Any


def programs(apply: Callable, loss: Callable | None) -> Programs:
    """The programs of a stage with this function, and with this loss, if it is the last one."""

    def alone(parameters: Any, entered: Any, data: Any, target: Any, seed: Any) -> Any:
        key = () if seed is None else (jax.random.key(seed),)
        output = y = apply(parameters, entered if data is None else data, *key)
        count = None
        if loss:
            value = loss(y, target)
            y, count = value if isinstance(value, tuple) else (value, None)
        return y, (count, output if loss else None)

    def graph(parameters: Any, entered: Any, *rest: Any) -> Any:
        return jax.vjp(lambda p, x: alone(p, x, *rest), parameters, entered, has_aux=True)

    return Programs(*(jax.jit(run, compiler_options=EXACT) for run in (alone, graph)))


def _pull(pull: Any, gradient: Any, sums: list[Any]) -> tuple[list[Any], Any]:
    parameters, entered = pull(gradient)
    return list(map(jnp.add, sums, jax.tree.leaves(parameters))), entered


_pulled = jax.jit(_pull, compiler_options=EXACT)
# All of a stage at once, as in the run: XLA may divide one array alone by multiplying.
_divided = jax.jit(lambda sums, divisor: [total / divisor for total in sums])


class Made:
    """What checks compile, kept for all of one run, as its stages keep theirs.

    Not for the next run: what a function reads from outside may have changed until then.
    """

    def __init__(self) -> None:
        self.programs, self.in_turn = cache(programs), cache(in_turn)
        self.stepped = cache(stepped)


class JaxModel:
    """See `replay.Model`.

    functionals  of the stages
    made   what earlier checks of the same run have compiled
    start  by stage, what training goes on from; `first` is the latest version there
    """

    trees = TREES
    depends_on_cut = False
    noise = 1e-4
    norm_eps = 2.0**-15  # the run squares in the type of its sums
    names: Sequence[Mapping[str, str]]
    ties: Sequence[Mapping[str, int]]
    returned: Sequence[Container[str]]

    def __init__(
        self,
        functionals: Sequence[Functional],
        options: Options,
        device: jax.Device,
        made: Made,
        *,
        start: Sequence[Any],
        first: int,
        alike: bool,
    ) -> None:
        self.functionals, self.options, self.device = functionals, options, device
        self.start, self.first, self.made = start, first, made
        self.ties = [{} for _ in functionals]
        self.names = [
            {name: f"{name} of stage {s}" for name in names(parameters)}
            for s, (_, parameters) in enumerate(functionals)
        ]
        self.returned = self.names
        types = [
            leaf.dtype for _, parameters in functionals for leaf in jax.tree.leaves(parameters)
        ]
        coarsest = max(types, key=lambda t: float(jnp.finfo(t).eps), default=jnp.dtype("float32"))
        self.precision = jnp.finfo(coarsest).dtype.name
        # XLA fuses each program in its own way. Where a type has few digits, these say what is
        # rounded; in float32 and float64 products and sums may be rounded together or apart.
        self.repeats = alike and bool(jnp.finfo(coarsest).eps > EPS_32)

    def history(self) -> list[dict[int, Weights]]:
        if self.start:
            return [{v: named(w) for v, w in state.weights.items()} for state in self.start]
        return [{self.first: named(parameters)} for _, parameters in self.functionals]

    def library(self, wide: str = "") -> JaxLibrary:
        return JaxLibrary(self.functionals, self.options, self.device, self.made, wide)

    def truth(self) -> JaxLibrary:
        # In float64 forwards would draw other numbers, and nothing is wider than float64. The same
        # program with other weights' last bits rounds otherwise, then.
        as_it_is = self.options.seed is not None or self.precision == "float64"
        library = self.library("" if as_it_is else "float64")
        library.nudge = 2 if as_it_is else 0
        return library

    def whole(self, wide: str) -> JaxLibrary:
        applies, parameters = zip(*self.functionals, strict=True)
        one = self.made.in_turn(applies), [*parameters]
        return JaxLibrary([one], self.options, self.device, self.made, wide)

    def optimizer(self) -> "JaxSteps":
        return JaxSteps(self)

    def named(self, weights: Any) -> Weights:
        return named(weights)

    # ---- arrays

    def same(self, a: Any, b: Any) -> bool:
        a, b = np.asarray(a), np.asarray(b)
        return a.dtype == b.dtype and np.array_equal(numbers(a), numbers(b), equal_nan=True)

    def numbers(self, array: Any) -> np.ndarray:
        return numbers(array)

    def eps(self, array: Any) -> float:
        return float(jnp.finfo(array.dtype).eps) if _inexact(np.asarray(array).dtype) else 0.0

    def rounded(self, array: Any, like: Any) -> Any:
        return array.astype(like.dtype)


def in_turn(applies: tuple[Callable, ...]) -> Callable:
    """Stages as one function of all their parameters."""

    def apply(parameters: Sequence[Any], x: Any) -> Any:
        for function, of_stage in zip(applies, parameters, strict=True):
            x = function(of_stage, x)
        return x

    return apply


def stepped(optimizer: optax.GradientTransformation) -> Callable:
    """The optimizer's step of one stage."""

    def step(weights: Any, state: Any, gradient: Any) -> Any:
        change, state = optimizer.update(gradient, state, weights)
        return optax.apply_updates(weights, change), state

    return jax.jit(step, compiler_options=EXACT)


class JaxSteps:
    """One device's optimizer. It steps a stage at a time: each program is fused in its own way.

    Of all stages at once, XLA rounded other weights' last bits, which is far more than the last bit
    of their change.
    """

    def __init__(self, model: JaxModel) -> None:
        self.library, optimizer = model.library(), model.options.optimizer
        self.states: Any = [state.optimizer for state in model.start]
        if not model.start:
            # From the host: those of a mesh would draw the replay there.
            parameters = jax.device_get([parameters for _, parameters in model.functionals])
            self.states = list(map(optimizer.init, parameters))
        self._step = model.made.stepped(optimizer)

    def step(self, weights: Sequence[Weights], gradients: Sequence[Weights]) -> list[Weights]:
        """The weights after a step from these."""
        library, after = self.library, list[Weights]()
        with library.active():
            for s, (spec, names) in enumerate(zip(library.specs, library.names, strict=True)):
                before, given = (
                    spec.unflatten([jnp.asarray(each[s][name]) for name in names])
                    for each in (weights, gradients)
                )
                new, self.states[s] = self._step(before, self.states[s], given)
                after.append(named(new))
        return after


def sum_type(dtype: Any) -> Any:
    """The type in which gradients are added up."""
    return jnp.promote_types(dtype, "float32")


def numbers(array: Any) -> np.ndarray:
    """On the host, in float64 or complex128; whole numbers as they are."""
    array = np.asarray(array)
    if not _inexact(array.dtype):
        return array
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def _inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)
