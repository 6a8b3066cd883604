"""A train step written for one device, taken apart into its loss and its update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.extend.core import JaxprEqn, Var

from pipelab.pipeshard.graph import (
    Graph,
    PipeshardError,
    contains,
    depending,
    inline,
    needed,
    place_of,
    renamed,
    variables,
)

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

    values: list[Any]
    paths: list[str]
    tree: Any
    batch: list[int]
    samples: int

    def shapes(self, samples: int | None = None) -> list[jax.ShapeDtypeStruct]:
        """Shapes and types of all leaves, with this many samples in the batch."""
        out = []
        for i, value in enumerate(self.values):
            shape = jax.numpy.shape(value)
            if samples is not None and i in self.batch:
                shape = (samples, *shape[1:])
            out.append(jax.ShapeDtypeStruct(shape, jax.dtypes.result_type(value)))
        return out


def flatten(args: Sequence[Any], batch_argnums: Sequence[int]) -> Arguments:
    """Raises PipeshardError where the batch is none: leaves without samples, or of different numbers of them."""
    found = [jax.tree_util.tree_flatten_with_path(arg)[0] for arg in args]
    for i in batch_argnums:
        if not -len(args) <= i < len(args):
            raise PipeshardError(
                f"batch_argnums={tuple(batch_argnums)!r}: the step was given {len(args)} arguments"
            )
    chosen = {i % len(args) for i in batch_argnums}
    values: list[Any] = []
    paths: list[str] = []
    batch: list[int] = []
    sizes: dict[str, int] = {}
    for i, leaves in enumerate(found):
        for path, value in leaves:
            name = jax.tree_util.keystr(path)
            if isinstance(value, jax.core.Tracer):
                raise PipeshardError(
                    "the pipeline is called inside jax.jit or another transformation: call it outside"
                )
            if isinstance(value, str) or (
                not hasattr(value, "dtype") and not isinstance(value, (bool, int, float, complex))
            ):
                raise PipeshardError(
                    f"argument {i}{name} is {value!r}, no array: bind it by functools.partial"
                )
            if i in chosen:
                batch.append(len(values))
                shape = jax.numpy.shape(value)
                if not shape:
                    raise PipeshardError(
                        f"batch leaf {name or i} is {value!r}: every leaf of the batch needs samples along dimension 0; pass "
                        "anything else in another argument"
                    )
                sizes[f"{name or f'argument {i}'} has {shape[0]}"] = shape[0]
            values.append(value)
            paths.append(name)
    if len(set(sizes.values())) != 1:
        problem = "; ".join(sizes) or "it has no arrays"
        raise PipeshardError(
            f"the batch (batch_argnums={tuple(batch_argnums)!r}) needs one number of samples: {problem}"
        )
    if not next(iter(sizes.values())):
        raise PipeshardError("the batch has no samples")
    return Arguments(
        values, paths, jax.tree.structure(tuple(args)), batch, next(iter(sizes.values()))
    )


@dataclass
class Step:
    """A traced train step.

    arguments     one variable per leaf of the arguments
    batch         those of the batch
    loss          its equations -> [loss, *aux]; its inputs are `parameters` and arguments
    parameters    what the loss is differentiated by -> the argument that it is. Variables of their own, since a loss may
                  also read an argument without being differentiated by it
    gradient      the marked equation's results: [loss, *aux, *gradients], inputs of `update` beside the arguments
    update        the other equations -> the step's results
    results       the tree of the step's results
    whole         the step as it was traced, with the marked equation
    """

    arguments: list[Var]
    batch: list[Var]
    loss: Graph
    parameters: dict[Var, Var]
    gradient: list[Var]
    update: Graph
    results: Any
    whole: Graph

    @property
    def consts(self) -> dict[Var, Any]:
        return {**self.whole.consts, **self.loss.consts}

    @property
    def gradients(self) -> dict[Var, Var]:
        """Parameter -> its gradient."""
        return dict(zip(self.parameters, self.gradient[len(self.loss.outputs) :], strict=True))


def trace(step: Callable, arguments: Arguments, samples: int) -> Step:
    """Trace a train step as if its batch had `samples` samples. Raises PipeshardError where it is not what a pipeline needs."""

    def flat(*values: Any) -> Any:
        return step(*jax.tree.unflatten(arguments.tree, values))

    try:
        closed, shapes = jax.make_jaxpr(flat, return_shape=True)(*arguments.shapes(samples))
    except ValueError as error:
        if "static arguments" not in str(error):
            raise
        raise PipeshardError(
            "the step has static arguments (jax.jit): bind them by functools.partial"
        ) from error
    whole = inline(closed)
    marked = _find_gradient(whole.equations)
    batch = [whole.inputs[i] for i in arguments.batch]
    loss, parameters = _loss_of(whole, marked, arguments)
    after = [
        eqn
        for eqn in whole.equations
        if eqn is not marked and eqn.primitive.name != "pipeline_boundary"
    ]
    update = needed(after, whole.outputs)
    _check_update(whole, update, marked, batch)
    made = Graph([*whole.inputs, *marked.outvars], whole.outputs, update)
    return Step(
        whole.inputs,
        batch,
        loss,
        parameters,
        list(marked.outvars),
        made,
        jax.tree.structure(shapes),
        whole,
    )


def trace_piece(step: Callable, arguments: Arguments, samples: int) -> Step:
    """`trace` for a micro-batch of a step that is known to work on the whole batch; PipeshardError where it does not."""
    try:
        return trace(step, arguments, samples)
    except (TypeError, ValueError) as error:
        if isinstance(error, PipeshardError):
            raise
        raise PipeshardError(
            f"the step works on the batch of {arguments.samples} samples but not on a micro-batch of {samples} of them: pass "
            f"every array that has samples in batch_argnums, and write no batch size as a number ({error})"
        ) from error


def with_update_of(piece: Step, whole: Step) -> Step:
    """A micro-batch's step with the update of the whole batch's: it may know the number of samples."""
    names = dict(zip(whole.arguments, piece.arguments, strict=True))

    def outer(atoms: Sequence[Any]) -> list[Any]:
        return [names.get(a, a) if isinstance(a, Var) else a for a in atoms]

    equations = [renamed(eqn, names) for eqn in whole.update.equations]
    update = Graph(outer(whole.update.inputs), outer(whole.update.outputs), equations)
    consts = {**piece.whole.consts, **whole.whole.consts}
    graph = Graph(piece.whole.inputs, piece.whole.outputs, piece.whole.equations, consts)
    return replace(
        piece, gradient=whole.gradient, update=update, whole=graph, results=whole.results
    )


def gradient_on_one_device(step: Step) -> Graph:
    """[loss, *aux, *gradients] as jax itself computes them: the step up to its marked equation."""
    return Graph(
        step.whole.inputs,
        list(step.gradient),
        needed(step.whole.equations, step.gradient),
        step.whole.consts,
    )


def _find_gradient(equations: Sequence[JaxprEqn]) -> JaxprEqn:
    found = [eqn for eqn in equations if contains(eqn, ["pipelab_grad"])]
    if not found:
        raise PipeshardError(f"the train step has no marked gradient: {USE_OURS}")
    for eqn in found:
        if eqn.primitive.name != "pipelab_grad":
            raise PipeshardError(
                f"the gradient is taken inside {eqn.primitive.name} ({place_of(eqn)}): call it in the step itself; the "
                "pipeline already accumulates over micro-batches"
            )
    if len(found) > 1:
        lines = " and ".join(place_of(eqn) for eqn in found)
        raise PipeshardError(
            f"the train step takes {len(found)} gradients ({lines}): take one, of the sum of the losses"
        )
    return found[0]


def _loss_of(whole: Graph, marked: JaxprEqn, arguments: Arguments) -> tuple[Graph, dict[Var, Var]]:
    """The loss with what leads up to it (keys split, images scaled), but not what it is differentiated by."""
    inner = inline(marked.params["jaxpr"], marked)
    given = list(marked.invars)
    parameters: dict[Var, Var] = {}
    for i in marked.params["wanted"]:
        source = given[i]
        if source not in whole.inputs:
            raise PipeshardError(
                f"the gradient is taken by a {source.aval.str_short()} that the step computes: take it by an argument of the "
                "step, and compute (a cast, say) inside the loss"
            )
        if arguments.batch and source in [whole.inputs[b] for b in arguments.batch]:
            raise PipeshardError(
                "the gradient is taken by the batch: take it by the parameters, or change batch_argnums"
            )
        parameters[inner.inputs[i]] = given[i] = source
    others = [
        (v, a)
        for i, (v, a) in enumerate(zip(inner.inputs, given, strict=True))
        if v not in parameters
    ]
    names = dict(others)

    own = [renamed(eqn, names) for eqn in inner.equations]
    before = [
        eqn
        for eqn in whole.equations[: whole.equations.index(marked)]
        if eqn.primitive.name != "pipeline_boundary"
    ]
    before = needed([e for e in before if not e.effects], variables(a for _, a in others))
    consts = {**whole.consts, **inner.consts}
    return Graph(
        [*parameters, *whole.inputs],
        [names.get(a, a) if isinstance(a, Var) else a for a in inner.outputs],
        [*before, *own],
        consts,
    ), parameters


def _check_update(
    whole: Graph, update: Sequence[JaxprEqn], marked: JaxprEqn, batch: Sequence[Var]
) -> None:
    first = len(marked.outvars) - len(marked.params["wanted"])
    reached = depending(update, marked.outvars[first:])
    if reached.isdisjoint(variables(whole.outputs)):
        raise PipeshardError(
            "no result of the train step depends on the gradients, so that the update would be lost: return the new state. A "
            "step that changes its arguments in place (nnx.Optimizer.update) has to be pure: nnx.split before, nnx.merge inside"
        )
    read = depending(update, batch)
    for eqn in update:
        if not read.isdisjoint(variables(eqn.invars)):
            raise PipeshardError(
                f"{eqn.primitive.name} ({place_of(eqn)}) reads the batch outside the loss: compute it in the loss and "
                "return it from there (has_aux=True)"
            )
    if not set(batch).isdisjoint(variables(whole.outputs)):
        raise PipeshardError(
            "the train step returns a part of its batch: leave it out of the results"
        )
