"""A train step written for one device, taken apart into its loss and its update."""

import re
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, JaxprEqn, Var
from jax.sharding import AbstractMesh, AxisType, Mesh

from pipelab.jax.device import AXES
from pipelab.jax.jaxpr import (
    Arrays,
    Equations,
    Graph,
    Variables,
    all_equations,
    contains,
    inline,
    is_mutable,
    needed,
    place_of,
    place_of_error,
    spec_of,
    substitute,
    variables,
)
from pipelab.pipeshard.arrays import PipeshardError, is_array, is_inexact, on_mesh, shown
from pipelab.pipeshard.marker import grad_p

# Where a step is traced: its sharding constraints may name the axes of a stage's mesh.
ONE_DEVICE = AbstractMesh((1, 1), AXES, axis_types=(AxisType.Auto, AxisType.Auto))
# jax's errors where Python code needs the number in an array: in an `if`, as an index, in numpy.
ASKS_FOR_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
WEIGHT = "the weight"
USE_OURS = "call pipelab.pipeshard.grad or value_and_grad there instead of jax's, once"


@dataclass
class Arguments:
    """The arguments of one call, flat.

    values   leaves: arrays, or what becomes one
    paths    of each leaf within its own argument, such as ".params['Dense_0']['kernel']"
    tree     how they are put together again
    batch    positions of the leaves that are the batch
    samples  in the batch
    """

    values: Arrays
    paths: list[str]
    tree: Any
    batch: list[int]
    samples: int

    @property
    def named(self) -> list[tuple[str, Any]]:
        """Each argument with a name for errors."""
        trees = jax.tree.unflatten(self.tree, self.values)
        return [(f"argument {i}", tree) for i, tree in enumerate(trees)]

    def shapes(self, samples: int) -> list[jax.ShapeDtypeStruct]:
        """Shapes and types of all leaves, with this many samples in the batch.

        A Python number keeps its weak type: beside bfloat16 it is one, too.
        """
        shapes = map(spec_of, map(jax.typeof, self.values))
        return [
            x.update(shape=(samples, *x.shape[1:])) if i in self.batch else x
            for i, x in enumerate(shapes)
        ]


def flatten(args: Sequence[Any], batch_argnums: tuple[int, ...]) -> Arguments:
    """The leaves of the arguments, and which of them are the batch.

    Raises PipeshardError if the batch has no samples, or its leaves differ in their number.
    """
    of_batch = {i % len(args) for i in batch_argnums}
    leaves, tree = jax.tree.flatten_with_path(tuple(args))
    values, paths, batch = [], [], []
    sizes: dict[str, int] = {}  # a leaf of the batch, in words -> its samples
    # The first key is the argument's number; the others are the way through its tree.
    for position, ((argument, *way), value) in enumerate(leaves):
        path = jax.tree_util.keystr(tuple(way))
        _check_leaf(f"{argument.idx}{path}", value)
        values.append(value)
        paths.append(path)
        if argument.idx in of_batch:
            batch.append(position)
            samples = _samples_of(path or argument.idx, value)
            sizes[f"{path or f'argument {argument.idx}'} has {samples}"] = samples
    if len(set(sizes.values())) != 1:
        problem = "; ".join(sizes) or "it has no arrays"
        raise PipeshardError(
            f"the batch (batch_argnums={batch_argnums!r}) needs one number of samples: {problem}"
        )
    (samples,) = set(sizes.values())
    if not samples:
        raise PipeshardError("the batch has no samples")
    return Arguments(values, paths, tree, batch, samples)


def _check_leaf(name: str, value: Any) -> None:
    """PipeshardError for what cannot be an array, or comes from an outer transformation."""
    if isinstance(value, jax.core.Tracer):
        raise PipeshardError(
            "the pipeline is called inside jax.jit or another transformation: call it outside"
        )
    if is_mutable(value):
        raise PipeshardError(
            f"argument {name} is a mutable array: pass its value (ref[...]), and return the new one"
        )
    if not is_array(value):
        raise PipeshardError(
            f"argument {name} is {shown(value)}, not an array: bind it by functools.partial, or "
            "leave it out"
        )


def _samples_of(name: str | int, value: Any) -> int:
    """The samples in a leaf of the batch."""
    shape = jax.numpy.shape(value)
    if not shape:
        raise PipeshardError(
            f"batch leaf {name} is {value!r}: every leaf of the batch needs samples "
            "along dimension 0; pass anything else in another argument"
        )
    return shape[0]


@dataclass
class TracedStep:
    """A traced train step, or one that takes no gradient: its loss is then all that it computes.

    arguments     one variable per leaf of the arguments
    batch         those of the batch
    loss          its equations -> [loss, *aux]; its inputs are `parameters` and arguments
    parameters    what the loss is differentiated by -> the argument that it is. Variables of their
                  own, since a loss may also read an argument without being differentiated by it.
                  Without a gradient, all that could be a parameter
    weights       how many of [*aux], from the first, the weight of the loss is made of
    gradient      the marked equation's results: [loss, *aux, *gradients], inputs of `update` beside
                  the arguments
    update        the other equations -> the step's results
    donated       arguments that the step, jitted, donates
    results       the tree of the step's results
    whole         the step as it was traced, with the marked equation; without one, as far as it
                  makes `gradient`
    trains        whether it takes a gradient
    """

    arguments: Variables
    batch: Variables
    loss: Graph
    parameters: dict[Var, Var]
    weights: int
    gradient: Variables
    update: Graph
    donated: Variables
    results: Any
    whole: Graph
    trains: bool = True

    @property
    def gradients(self) -> dict[Var, Var]:
        """Parameter -> its gradient."""
        if not self.trains:
            return {}
        return dict(zip(self.parameters, self.gradient[len(self.loss.outputs) :], strict=True))

    @property
    def result_names(self) -> list[str]:
        """Of [loss, *aux], or of what is computed without a gradient."""
        if not self.trains:
            return [f"result {i}" for i in range(len(self.loss.outputs))]
        others = range(len(self.loss.outputs) - 1 - self.weights)
        aux = (f"auxiliary result {i} of the loss" for i in others)
        return ["the loss", *[WEIGHT] * self.weights, *aux]


def trace(step: Callable, arguments: Arguments, samples: int) -> TracedStep:
    """Trace a train step as if its batch had `samples` samples.

        state, batch --> loss --> loss, aux, gradients --> update --> new state
                      (the marked equation's own)       (what is left)

    Without a gradient all of it is the loss.

    Raises PipeshardError if a pipeline cannot use it, or if it works on the batch but not on this
    many samples.
    """
    # [1] The whole step as equations.
    closed, shapes = _whole_step(step, arguments, samples)
    whole = inline(closed)
    for eqn in all_equations(whole.equations):
        if eqn.primitive.name == "shard_map":
            raise PipeshardError(
                f"shard_map ({place_of(eqn)}) names its own mesh, but a stage runs on the "
                "plan's: call the mapped function directly, and divide its arrays, if needed, by "
                'jax.lax.with_sharding_constraint over the stage\'s axes, "data" and "model"'
            )
    # A sharding constraint is for the mesh of a stage, which gets its own (`on_mesh`).
    whole.equations = on_mesh(whole.equations, ONE_DEVICE)
    batch = [whole.inputs[i] for i in arguments.batch]
    # [2] The marked equation holds the loss.
    marked = _find_gradient(whole.equations)
    if marked is None:
        _check_effects(whole)
        return _forward_only(whole, batch, _donated(whole, closed), jax.tree.structure(shapes))
    loss, parameters = _loss_of(whole, marked, batch)
    _check_effects(loss)
    _check_effects(whole)
    # [3] What the results need beside it is the update.
    others = [eqn for eqn in whole.equations if eqn is not marked]
    effects = [eqn for eqn in others if eqn.effects]
    update = Graph(
        inputs=[*whole.inputs, *marked.outvars],
        outputs=whole.outputs,
        equations=needed(others, whole.outputs, effects),
        consts=whole.consts,
    )
    found = TracedStep(
        arguments=whole.inputs,
        batch=batch,
        loss=loss,
        parameters=parameters,
        weights=marked.params["weights"],
        gradient=marked.outvars,
        update=update,
        donated=_donated(whole, closed),
        results=jax.tree.structure(shapes),
        whole=whole,
    )
    _check_update(found)
    return found


def _check_effects(graph: Graph) -> None:
    """PipeshardError for equations that only work in their order, which a pipeline changes."""
    for eqn in graph.equations:
        atoms = *eqn.invars, *eqn.outvars
        if contains(eqn, ["new_ref", "empty_ref"]) or any(map(is_mutable, atoms)):
            raise PipeshardError(
                f"{eqn.primitive.name} ({place_of(eqn)}) uses a mutable array (jax.new_ref), whose "
                "writes would be lost between stages and micro-batches: compute new arrays "
                "(x.at[i].set(y)), and return what is needed later"
            )
        if any(type(effect).__name__.startswith("Ordered") for effect in eqn.effects):
            raise PipeshardError(
                f"{eqn.primitive.name} ({place_of(eqn)}) is ordered, but stages and micro-batches "
                "run in another order: say ordered=False"
            )


def _whole_step(step: Callable, arguments: Arguments, samples: int) -> tuple[ClosedJaxpr, Any]:
    """The step's equations, and the shapes of its results. PipeshardError where it has none."""

    def flat(*values):
        return step(*jax.tree.unflatten(arguments.tree, values))

    try:
        return traced(flat, arguments.shapes(samples))
    except (TypeError, ValueError, IndexError) as error:
        if isinstance(error, ASKS_FOR_VALUES):
            raise _asks_for_values(error, arguments) from error
        if "static arguments" in str(error):
            raise PipeshardError(
                "the step is jitted with static arguments, but a pipeline passes only arrays: bind "
                "them by functools.partial"
            ) from error
        if samples == arguments.samples or isinstance(error, PipeshardError):
            raise
        raise PipeshardError(
            f"the step works on the batch of {arguments.samples} samples but not on {samples} of "
            "them: pass every array with samples in batch_argnums, and do not write the batch "
            f"size as a number ({error})"
        ) from error


def _asks_for_values(error: Exception, arguments: Arguments) -> PipeshardError:
    """Python code of the step asks for the value of an array, which is not there yet."""
    what, reason = "an argument", str(error).splitlines()[0].partition(". ")[0].rstrip(".")
    ours = rf"{re.escape(__file__)}:\d+ .* the argument values\[(\d+)\]"  # where the step is called
    if found := re.search(ours, str(error)):
        trees = jax.tree.unflatten(arguments.tree, arguments.values)
        (argument, *path), value = jax.tree.leaves_with_path(trees)[int(found[1])]
        what = f"argument {argument.idx}{jax.tree_util.keystr(tuple(path))}"
        if isinstance(value, (bool, int, float)):
            what += f", {value!r},"
    return PipeshardError(
        f"the step asks for the value of {what} in Python ({place_of_error(error)}: {reason}), but "
        "is traced without values: bind an option by functools.partial, choose between arrays by "
        "jnp.where or jax.lax.cond, and return arrays instead of Python numbers"
    )


def traced(fun: Callable, arguments: Sequence[Any]) -> tuple[ClosedJaxpr, Any]:
    """The function as equations, and the shapes of its results.

    arguments  arrays, or their shapes
    """
    make = jax.make_jaxpr(fun, return_shape=True)
    try:
        return make(*arguments)
    except RuntimeError as error:
        # jax has no error of its own for this.
        if "non-empty mesh" not in str(error):
            raise
    # It has sharding constraints by axes alone. Under jax.set_mesh, all arrays would be of that
    # mesh; under this older form, which warns of its age, the constraints alone are.
    mesh = Mesh(np.array(jax.local_devices()[:1]).reshape(1, 1), AXES)
    with ExitStack() as stack:
        with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
            stack.enter_context(mesh)
        return make(*arguments)


def _donated(whole: Graph, closed: ClosedJaxpr) -> Variables:
    """The arguments donated by a step that is nothing but a call of a jitted function."""
    if len(closed.jaxpr.eqns) != 1:
        return []
    call = closed.jaxpr.eqns[0]
    donates = call.params.get("donated_invars", ())  # per operand; only jitted functions have it
    given = [v for v, donated in zip(call.invars, donates, strict=False) if donated]
    pairs = zip(whole.inputs, closed.jaxpr.invars, strict=True)
    return [argument for argument, v in pairs if v in given]


def trace_piece(
    step: Callable, arguments: Arguments, samples: int, whole: TracedStep
) -> TracedStep:
    """A micro-batch's step with the update of the whole batch's: it may know how many samples.

    Raises PipeshardError if the step works on the batch, but not on a micro-batch.
    """
    piece = trace(step, arguments, samples)
    # The same leaves have other variables in each trace: the update gets those of the micro-batch.
    inputs = [*piece.arguments, *whole.gradient]
    update = replace(inline(whole.update.jaxpr, inputs), inputs=inputs)
    return replace(piece, gradient=whole.gradient, update=update, results=whole.results)


def _find_gradient(equations: Equations) -> JaxprEqn | None:
    found = [eqn for eqn in equations if contains(eqn, [grad_p.name])]
    if not found:
        # What jax's own derivatives make says so.
        stacks = (str(eqn.source_info.name_stack) for eqn in all_equations(equations))
        if any("jvp(" in stack for stack in stacks):
            raise PipeshardError(f"the train step has no marked gradient: {USE_OURS}")
        return None
    for eqn in found:
        if eqn.primitive is not grad_p:
            raise PipeshardError(
                f"the gradient is taken inside {eqn.primitive.name} ({place_of(eqn)}): call it in "
                "the step itself; the pipeline already accumulates over micro-batches"
            )
    if len(found) > 1:
        lines = " and ".join(map(place_of, found))
        raise PipeshardError(
            f"the train step takes {len(found)} gradients ({lines}): take one, of the sum of the "
            "losses"
        )
    return found[0]


def _loss_of(whole: Graph, marked: JaxprEqn, batch: Variables) -> tuple[Graph, dict[Var, Var]]:
    """The loss with what leads up to it (keys split, images scaled), and its parameters.

    What leads up to a parameter would be left out of the gradient: it has to be an argument.
    """
    # [1] Inside, a parameter has a variable of its own; everything else is what it is outside.
    inputs = list(marked.invars)
    parameters: dict[Var, Var] = {}
    for i, source in enumerate(inputs[: marked.params["wanted"]]):
        if source not in whole.inputs:
            raise PipeshardError(
                f"the gradient is taken by a {source.aval.str_short()} that the step computes: "
                "take it by an argument of the step, and compute (such as a cast) inside the loss"
            )
        if source in batch:
            raise PipeshardError(
                "the gradient is taken by the batch: take it by the parameters, or change "
                "batch_argnums"
            )
        inputs[i] = inside = Var(source.aval)
        parameters[inside] = source
    inner = inline(marked.params["jaxpr"], inputs, marked)
    # [2] Before the marked equation: what these inputs need.
    before = whole.equations[: whole.equations.index(marked)]
    loss = Graph(
        inputs=[*parameters, *whole.inputs],
        outputs=inner.outputs,
        equations=[*needed(before, inputs), *inner.equations],
        consts={**whole.consts, **inner.consts},
    )
    return loss, parameters


def _forward_only(whole: Graph, batch: Variables, donated: Variables, results: Any) -> TracedStep:
    """A step without a gradient: what it computes, and an update that returns it.

    An argument that it returns stays where it is.
    """
    state = [v for v in whole.inputs if v not in batch]
    parameters = {Var(v.aval): v for v in state if is_inexact(v)}
    inside: dict[Var, Any] = {argument: v for v, argument in parameters.items()}
    made = dict.fromkeys(v for v in variables(whole.outputs) if v not in state)
    of_batch = {v: Var(v.aval) for v in made}
    inner = inline(replace(whole, outputs=[*made]).jaxpr, substitute(whole.inputs, inside))
    return TracedStep(
        arguments=whole.inputs,
        batch=batch,
        loss=replace(inner, inputs=[*parameters, *whole.inputs]),
        parameters=parameters,
        weights=0,
        gradient=[*of_batch.values()],
        update=Graph(
            [*whole.inputs, *of_batch.values()], substitute(whole.outputs, {**of_batch}), []
        ),
        donated=donated,
        results=results,
        whole=replace(whole, outputs=[*made]),
        trains=False,
    )


def _check_update(step: TracedStep) -> None:
    """Raises PipeshardError where it does no more than the loss, or reads the batch."""
    update, results = step.update, variables(step.update.outputs)
    if update.depending(step.gradients.values()).isdisjoint(results):
        raise PipeshardError(
            "no result of the train step depends on the gradients, so the update would be lost: "
            "return the new state. A step that changes its arguments in place "
            "(nnx.Optimizer.update) must become pure: nnx.split before, nnx.merge inside"
        )
    # The update is done once, when no micro-batch is there any more.
    varying = update.depending(step.batch)
    for eqn in update.equations:
        if not varying.isdisjoint(variables(eqn.invars)):
            raise PipeshardError(
                f"{eqn.primitive.name} ({place_of(eqn)}) reads the batch outside the loss: "
                "compute it in the loss and return it from there (has_aux=True)"
            )
    if not set(step.batch).isdisjoint(results):
        raise PipeshardError(
            "the train step returns a part of its batch: leave it out of the results"
        )
