"""A stage of a JAX model: what a worker's five kinds of action do to it.

Arrays do not change, so a weight version is just a value that is kept.
"""

from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import Var
from jax.sharding import NamedSharding

from pipelab.jax.arguments import Apply, Functional
from pipelab.jax.device import JaxDevice, bytes_on_mesh
from pipelab.jax.host import named, names, of_program
from pipelab.jax.jaxpr import Arrays, spec_of
from pipelab.jax.passes import EXACT, Backwards, Compiled, Groups, differentiate, passes
from pipelab.predict.costs import Recompute
from pipelab.runtime.options import Options
from pipelab.runtime.orders import Bytes, Order, Update
from pipelab.runtime.prepare import seed_for
from pipelab.runtime.stage import CountingStage
from pipelab.table.action import Kind


class JaxState(NamedTuple):
    """What a stage goes on from: its weights by version, and the optimizer's state."""

    weights: dict[int, Any]
    optimizer: Any


class JaxStage(CountingStage):
    """One stage: a pure function, versions of its weights, and what its forwards left.

    apply       (parameters, x) -> y; with seeds (parameters, x, key) -> y
    parameters  a tree of arrays
    options     how to train
    kinds       of the actions that it will do
    first, last whether it is that of the model
    """

    def __init__(
        self,
        apply: Apply,
        parameters: Any,
        device: JaxDevice,
        options: Options,
        kinds: Collection[Kind],
        *,
        first: bool,
        last: bool,
    ) -> None:
        super().__init__(device, options, first=first, last=last)
        self.weights = {0: device.kept(parameters)}
        self.state: Any = ()  # of the optimizer
        if options.optimizer:
            self.state = device.kept(options.optimizer.init(self.weights[0]))
        # Objects of their own: a jitted method would refer to the stage and the stage to it, so
        # that all arrays of a run would be kept until the next garbage collection.
        loss = options.loss if last else None
        self._apply = jax.jit(lambda *given: apply(*given))  # not what an earlier run has traced
        self._function = Function(apply, loss, frozenset(kinds), device.place)
        self._step = step_of(options.optimizer, (self.weights[0], self.state))
        self._backwards = Backwards(device, id(self))
        self._inputs: dict[int, Any] = {}  # of micro-batches whose forward runs again

    def compile(self, shapes: tuple[Any, Any], draws: bool) -> None:
        """Compile what its actions run.

        shapes  (x, target) of a micro-batch, as shapes and types
        draws   whether forwards draw random numbers
        """
        seed = np.uint32(0) if draws else None
        groups = groups_of(self.weights[self.latest], *shapes, seed, first=self.first)
        training, again = self.options.training, self.options.recompute is not Recompute.NEVER
        if again or not training:
            self._function.compiled(groups, backwards=False)
        if not training:
            return
        # What is jitted without shapes compiles at its first call: here, before the clock starts.
        zeros = self._function.compiled(groups, backwards=True).zeros()
        mean = self._tree(_divided(zeros, 1.0, self._leaves))
        stepped = self._step(self.weights[self.latest], self.state, mean)
        jax.block_until_ready((_square(zeros), stepped))

    # ---- forward and update; the backwards are every stage's

    def begin(self, stage: int, order: Order) -> None:
        self.device.timed = order.report
        super().begin(stage, order)

    def placed(self, data: Any) -> Any:
        return self.device.placed(data)

    def forward(self, microbatch: int, received: Any) -> Any:
        """The stage's output, or None on the last stage, which computes the loss."""
        given = self.fed[microbatch]
        x = given.x if self.first else received
        if self.training and given.recompute:
            self._inputs[microbatch] = x
            # Data of the first stage are there anyway.
            arrays = [] if self.first else jax.tree.leaves(x)
            sizes = {id(a): bytes_on_mesh(a) for a in arrays}
            self.device.ledger.hold(self.key(microbatch), sizes)
        y, count = self._compute(microbatch, x, keep=not given.recompute)
        if not self.last:
            return y
        count = given.samples if count is None else count
        self.losses[microbatch] = y, float(count)
        self.check_loss(microbatch)
        return None

    def update(self, number: int, received: dict[int, float] | None = None) -> None:
        """Make version number + 1 from the latest one.

        `received`: by stage, the squared norm of its gradient.
        """
        squares, count = received or {self.number: self.news()}, self.counts.get(number, 0.0) or 1.0
        divisor = self.divisor(number, lambda: sum(squares.values()))
        mean = self._tree(_divided(self._total(), divisor, self._leaves))
        self._backwards.sums = None
        latest = self.weights[number]
        self.updates[number] = Update(squares[self.number] / count**2, ())
        new, self.state = self.device.wait(self._step(latest, self.state, mean))
        if self.keep:
            self.stepped = mean
        self.weights[number + 1] = new
        if not self.read_later(number):
            del self.weights[number]
        self.end_update(number)

    # ---- what is asked of it between actions and afterwards

    def news(self) -> Any:
        """The squared norm of the accumulated gradient: a number if somebody waits for it."""
        square = _square(self._total())
        return float(square) if self.device.timed or self.options.clip is not None else square

    def held(self) -> Bytes:
        def size(tree: Any) -> int:
            return sum(map(bytes_on_mesh, jax.tree.leaves(tree)))

        others = [weights for v, weights in self.weights.items() if v != self.latest]
        latest = self.weights[self.latest]
        return Bytes(size(latest), size(others), size(self._backwards.sums), size(self.state))

    def trained(self) -> Any:
        """The latest weights, on the host."""
        return jax.device_get(self.weights[self.latest])

    def resume_state(self) -> JaxState:
        return JaxState(*jax.device_get((self.weights, self.state)))

    def on_host(self, weights: Any) -> dict[str, np.ndarray]:
        return named(weights)

    # ---- pieces of the actions

    def _groups(self, microbatch: int, x: Any, target: Any) -> Groups:
        given = self.fed[microbatch]
        weights = self.weights[given.version]
        seed = None if given.seed is None else seed_for(*given.seed)
        return groups_of(weights, x, target, seed, first=self.first)

    def _compute(self, microbatch: int, x: Any, keep: bool) -> tuple[Any, Any]:
        """Run the forward; returns y, or the loss, and what that counted."""
        target = self.fed[microbatch].target
        if self.observe and self.last:
            weights = self.weights[self.fed[microbatch].version]
            output = self._apply(weights, x, *self._keys(microbatch))
            self.seen[microbatch] = self.observe(self, microbatch, output, target)
        groups, backwards = self._groups(microbatch, x, target), keep and self.training
        program = self._function.compiled(groups, backwards)
        if not backwards:
            floats, (others, count) = self.device.wait(program(*groups))
            return join_parameters(floats, others), count
        arguments = jax.tree.leaves(groups)
        made = self.device.wait(program.forward(*arguments))
        # Weights and targets are there anyway.
        own = jax.tree.leaves((groups.parameters, target))
        self._backwards.keep(microbatch, program, arguments, made, own)
        if any(program.unsplit):
            pairs = zip(names(groups.parameters), program.unsplit, strict=True)
            self.unsplit = {name: why for name, why in pairs if why}
        floats, (others, count) = program.results(made)
        return join_parameters(floats, others), count

    def _prepare(self, microbatch: int, received: Any) -> tuple[None, Arrays, float]:
        if self.fed[microbatch].recompute:
            self.device.ledger.drop(self.key(microbatch))
            self._compute(microbatch, self._inputs.pop(microbatch), keep=True)
        if not self.last:
            count, gradient = received
            return None, gradient, count
        mean, count = self.losses[microbatch]
        # As the loss's type has it: what gradients were multiplied by is what they are divided by.
        of_mean = np.full(mean.shape, count / self.unit, mean.dtype)
        return None, [self.device.placed(of_mean)], float(of_mean)

    def _pull(
        self, microbatch: int, kept: None, gradient: Arrays, count: float, kind: Kind
    ) -> Arrays | None:
        if not count:
            return self._backwards.skip(microbatch)
        if kind is Kind.W:
            self._backwards.weight_grad(microbatch)
            return None
        pull = self._backwards.backward if kind is Kind.B else self._backwards.input_grad
        return pull(microbatch, gradient)

    def _keys(self, microbatch: int) -> list[jax.Array]:
        seed = self.fed[microbatch].seed
        return [] if seed is None else [jax.random.key(seed_for(*seed))]

    def given_back(self, output: Any) -> Any:
        return jax.device_get(output)

    def _total(self) -> Arrays:
        """The accumulated gradient, which begins as zeros."""
        if self._backwards.sums is None:
            return list(map(jnp.zeros_like, self._leaves))
        return self._backwards.sums

    @property
    def _leaves(self) -> Arrays:
        return jax.tree.leaves(self.weights[self.latest])

    def _tree(self, leaves: Arrays) -> Any:
        return jax.tree.unflatten(jax.tree.structure(self.weights[self.latest]), leaves)


# ---- what is compiled


class Function:
    """A stage as a function of its arguments on a device, compiled once for each shape of its data.

    kinds  of the actions that it is compiled for
    place  of data and results: their sharding
    """

    def __init__(
        self,
        apply: Apply,
        loss: Callable | None,
        kinds: Collection[Kind],
        place: Callable[[Any], NamedSharding],
    ) -> None:
        self.run, self.kinds, self.place = partial(_run, apply, loss), kinds, place
        self.check_count = partial(_check_count, apply, loss)
        self._known: dict[Any, Any] = {}

    def compiled(self, groups: Groups, backwards: bool) -> Any:
        """Its forward and backwards (`Compiled`); or the forward: (*groups) -> what `run` returns.

        The latter makes nothing that only a backward needs.
        """
        of_data = jax.tree.map(spec_of, groups[2:])  # parameters have the same shapes each time
        key = backwards, *jax.tree.leaves(of_data), jax.tree.structure(of_data)
        if key not in self._known:
            # A Python number's type, which gives way to others, is an array's after one update.
            shapes = Groups(
                jax.tree.map(lambda w: spec_of(w, w.sharding).update(weak_type=False), groups[0]),
                *jax.tree.map(lambda x: spec_of(x, self.place(x)), groups[1:]),
            )
            if backwards:
                self.check_count(shapes)
                traced = passes(self.run, shapes)
                sent = [self.place(v.aval) for v in traced.forward.outputs[: traced.sent]]
                self._known[key] = Compiled(traced, shapes, self.kinds, sent, EXACT)
            else:
                sent = jax.tree.map(self.place, jax.eval_shape(self.run, *shapes))
                jitted = jax.jit(self.run, out_shardings=sent)
                self._known[key] = jitted.lower(*shapes).compile(EXACT)
        return self._known[key]


def groups_of(weights: Any, x: Any, target: Any, seed: Any, *, first: bool) -> Groups:
    """A stage's arguments; a first stage's x, the data, has no gradient."""
    floats, others = (None, x) if first else divide(x)
    return Groups(weights, (), floats, (others, target, seed))


def _run(
    apply: Apply, loss: Callable | None, parameters: Any, fixed: Any, inputs: Any, data: Any
) -> tuple[Any, tuple[Any, Any]]:
    """Apply a stage to its groups: what of y, or of the loss, has a gradient, and what has none."""
    others, target, seed = data
    y, count = apply_to(apply, parameters, inputs, others, seed), None
    if loss:
        value = loss(y, target)
        y, count = value if isinstance(value, tuple) else (value, None)
        _check_mean(y)
    floats, others = divide(y)
    return floats, (others, count)


def apply_to(apply: Apply, parameters: Any, inputs: Any, others: Any, seed: Any) -> Any:
    """The output of a stage for an input in two trees: see `divide`."""
    key = () if seed is None else (jax.random.key(seed),)
    return apply(parameters, join_parameters(inputs, others), *key)


def digest_of(
    part: Functional,
    options: Options,
    shapes: tuple[Any, Any],
    ends: tuple[bool, bool],
    draws: bool,
) -> str:
    """Digest of what a stage does with micro-batches of these shapes, as `compile` has them.

    ends  whether it is the first stage, and the last
    """
    (apply, parameters), (first, last) = part, ends
    run = partial(_run, apply, options.loss if last else None)
    groups = groups_of(parameters, *shapes, np.uint32(0) if draws else None, first=first)

    # A derivative of the user's own shows in the backward alone.
    def both(*groups: Any) -> Any:
        results, pullback = differentiate(run, Groups(*groups))
        return results, pullback(jax.tree.map(jnp.ones_like, results[0]))

    return of_program(both if options.training else run, *groups)


def digest_of_optimizer(optimizer: optax.GradientTransformation, parameters: Sequence[Any]) -> str:
    """Digest of an optimizer's first state and its step, of each stage's parameters."""

    def step(weights: Any) -> Any:
        state = optimizer.init(weights)
        return state, _step(optimizer, weights, state, weights)

    return of_program(lambda stages: list(map(step, stages)), parameters)


def step_of(optimizer: optax.GradientTransformation, kept: tuple[Any, Any]) -> Callable:
    """The optimizer's jitted step: (weights, state, gradient) -> (weights, state).

    kept  weights and state, whose shardings stay
    """

    # Nothing is donated: the version that it starts from may still have readers.
    where = jax.tree.map(lambda x: x.sharding, kept)
    return jax.jit(partial(_step, optimizer), out_shardings=where, compiler_options=EXACT)


def _step(
    optimizer: optax.GradientTransformation, weights: Any, state: Any, gradient: Any
) -> tuple[Any, Any]:
    change, state = optimizer.update(gradient, state, weights)
    return optax.apply_updates(weights, change), state


@jax.jit
def _divided(total: Arrays, count: Any, weights: Arrays) -> Arrays:
    """The mean, rounded to the weights' types.

    A jit of its own: fused with the step, the mean would go in unrounded, come out rounded.
    """
    return [(g / count).astype(w.dtype) for g, w in zip(total, weights, strict=True)]


@jax.jit
def _square(total: Arrays) -> jax.Array:
    return sum((jnp.vdot(g, g).real for g in total), jnp.zeros(()))


# ---- trees in two: what is differentiated, and what is not


def divide(tree: Any) -> tuple[Any, Any]:
    """Its floating leaves and its others, as trees with None where a leaf is in the other one."""
    floats = jax.tree.map(lambda leaf: leaf if _floating(leaf) else None, tree)
    return floats, jax.tree.map(lambda leaf: None if _floating(leaf) else leaf, tree)


def join_parameters(floats: Any, others: Any) -> Any:
    """The inverse of `divide`."""
    return jax.tree.map(
        lambda leaf, other: other if leaf is None else leaf,
        floats,
        others,
        is_leaf=lambda leaf: leaf is None,
    )


def _floating(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def _check_count(apply: Apply, loss: Callable | None, shapes: Groups) -> None:
    """ValueError for a loss whose count has a gradient, which would be lost."""
    if loss is None:
        return
    others, target, seed = shapes.data
    y = jax.eval_shape(
        lambda *of: apply_to(apply, *of), shapes.parameters, shapes.inputs, others, seed
    )

    def tangent(floats: Any, others: Any, target: Any, tangents: Any) -> Any:
        def count(floats: Any) -> Any:
            value = loss(join_parameters(floats, others), target)
            found = jnp.asarray(value[1] if isinstance(value, tuple) else 0)
            return found if _floating(found) else jnp.zeros(())

        return jax.jvp(count, (floats,), (tangents,))[1]

    floats, others = divide(y)
    program = jax.make_jaxpr(tangent)(floats, others, target, floats).jaxpr
    # What depends on the tangents, which come last.
    reached = {*program.invars[len(program.invars) - len(jax.tree.leaves(floats)) :]}
    for step in program.eqns:
        if any(isinstance(v, Var) and v in reached for v in step.invars):
            reached |= {*step.outvars}
    if any(isinstance(v, Var) and v in reached for v in program.outvars):
        raise ValueError(
            "the loss's count has a gradient, which would be lost: return its "
            "jax.lax.stop_gradient, or one mean that is divided by it"
        )


def _check_mean(mean: Any) -> None:
    if jnp.shape(mean) or not _floating(mean):
        raise ValueError(
            f"the loss is {jnp.result_type(mean)} of shape {jnp.shape(mean)}: give the mean over "
            "the samples, one floating-point number"
        )
