"""A pipeline's step against the same step on one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipelab.executors.rules import Check, Comparison, tolerance_for
from pipelab.pipeshard.graph import (
    Arrays,
    Graph,
    PipeshardError,
    Values,
    all_equations,
    dtype_of,
    function,
    is_key_type,
    read_by,
)
from pipelab.pipeshard.program import Call, Program
from pipelab.pipeshard.trace import Arguments, Step, gradient_on_one_device, trace

WHOLE = "flush: the same step on one device, the batch undivided"
PIECES = (
    "flush: the same step on one device, accumulated over the same micro-batches "
    "(no check of how these are combined)"
)
ROUNDED = (
    "flush: the same step on one device, accumulated over the same micro-batches; rounding alone "
    "takes the batch undivided further away, since in double precision both agree"
)
FLOOR = 1e-3  # of the largest gradient: what a gradient that is zero in theory is measured by


def compare(
    train_step: Callable,
    program: Program,
    arguments: Arguments,
    call: Call,
    tolerance: float | None,
) -> Check:
    """See `Parallelized.compare`."""
    home = program.meshes[0].devices.flat[0]
    values = [jax.device_put(x, home) for x in arguments.values]
    limit = tolerance or tolerance_for([np.dtype(x).name for x in _float_types(program)])
    updated = _update_alone(program, call, values, home)

    def verdict(expected: Arrays, rule: str) -> Check:
        comparison = Comparison()
        _add_gradient(comparison, program, call.gradient, expected)
        for name, got, wanted in updated:
            comparison.add(name, _numbers(got), _numbers(wanted))
        return comparison.verdict(limit, rule)

    def in_pieces(rule: str) -> Check:
        return verdict(_in_pieces(program, program.step, program.loss, values), rule)

    # [1] What is not exact can only be compared with the same micro-batches.
    if not program.exact:
        return in_pieces(PIECES)
    # [2] Else with the undivided batch.
    expected = _undivided(train_step, arguments, values)
    if not np.isfinite(_numbers(expected[0])):
        raise PipeshardError(
            f"the loss of this batch is {expected[0]} on one device too: there is nothing to "
            "compare"
        )
    check = verdict(expected, WHOLE)
    if check.passed:
        return check
    # [3] Where they differ, micro-batches may round to another side of a kink. Then the pipeline
    #     equals micro-batches on one device, and in double precision these equal the whole.
    near = in_pieces(ROUNDED)
    if near.passed and _same_in_double(train_step, program, arguments, values):
        return near
    return check


def _add_gradient(comparison: Comparison, program: Program, got: Arrays, expected: Arrays) -> None:
    """Compare two lists of [loss, *aux, *gradients]."""
    count = len(program.combine)
    largest = [float(np.abs(_numbers(x)).max(initial=0)) for x in expected[count:]]
    floor = FLOOR * max(largest, default=0.0)
    names = ["the loss", *(f"auxiliary result {i}" for i in range(count - 1))]
    for argument in program.step.parameters.values():
        names.append(f"the gradient of {program.paths[argument]}")
    for i, (name, a, b) in enumerate(zip(names, got, expected, strict=True)):
        comparison.add(name, _numbers(a), _numbers(b), floor if i >= count else 0.0)


def _float_types(program: Program) -> set[Any]:
    """Of the parameters and of all that the loss computes."""
    found: set[Any] = {dtype_of(p) for p in program.step.parameters}
    for eqn in all_equations(program.step.loss.equations):
        found.update(dtype_of(v) for v in eqn.outvars if hasattr(v.aval, "dtype"))
    return {x for x in found if jnp.issubdtype(x, jnp.floating)}


def _update_alone(
    program: Program, call: Call, values: Arrays, home: Any
) -> list[tuple[str, Any, Any]]:
    """Every result of the step: its name, the pipeline's, and one device's.

    The latter by the step's own update of the pipeline's gradients, so that only the update counts.
    """
    step = program.step
    known = {**dict(zip(step.arguments, values, strict=True)), **step.consts}
    known.update(zip(step.gradient, jax.device_put(call.gradient, home), strict=True))
    wanted = _evaluate(step.update, known)
    results = jax.tree.leaves_with_path(jax.tree.unflatten(step.results, call.results))
    return [
        (f"result {jax.tree_util.keystr(path)}", got, x)
        for (path, got), x in zip(results, wanted, strict=True)
    ]


def _same_in_double(
    train_step: Callable, program: Program, arguments: Arguments, values: Arrays
) -> bool:
    """Whether the gradients of the batch and of micro-batches are the same in double precision.

    Both on one device.
    """
    comparison = Comparison()
    with jax.enable_x64(True):
        double = [
            x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x
            for x in map(jnp.asarray, values)
        ]
        in_double = replace(arguments, values=double)
        try:
            step = trace(train_step, in_double, program.samples)
            pieces = _in_pieces(program, step, step.loss, double)
            whole = _undivided(train_step, in_double, double)
            _add_gradient(comparison, program, pieces, whole)
        except (TypeError, ValueError):  # a step for single precision alone
            return False
    return comparison.verdict(tolerance_for(["float64"]), WHOLE).passed


def _undivided(train_step: Callable, arguments: Arguments, values: Arrays) -> Arrays:
    """[loss, *aux, *gradients] of the batch, by jax.value_and_grad of the loss as written."""
    graph = gradient_on_one_device(trace(train_step, arguments, arguments.samples))
    return _evaluate(graph, {**dict(zip(graph.inputs, values, strict=True)), **graph.consts})


def _evaluate(graph: Graph, known: Values) -> Arrays:
    inputs = read_by(graph.equations, graph.outputs)
    run = jax.jit(function(inputs, graph.outputs, graph.equations))
    return run(*(known[v] for v in inputs))


def _in_pieces(program: Program, step: Step, loss: Graph, values: Arrays) -> Arrays:
    """The same, accumulated over micro-batches with random keys of their own."""
    known = {**dict(zip(step.arguments, values, strict=True)), **loss.consts}
    others = [v for v in loss.sources if v not in step.parameters]
    fun = function([*step.parameters, *others], loss.outputs, loss.equations)

    def value(parameters, others):
        out = fun(*parameters, *others)
        return out[0], out

    one = jax.jit(jax.grad(value, has_aux=True))
    parameters = [known[argument] for argument in step.parameters.values()]
    pieces = []
    for k in range(program.microbatches):
        rows = slice(k * program.samples, (k + 1) * program.samples)
        number = np.uint32(k)  # the one input that is not an argument
        inputs = [known[v][rows] if v in step.batch else known.get(v, number) for v in others]
        gradients, results = one(parameters, inputs)
        pieces.append([*results, *gradients])
    how = [*program.combine, *[program.combine[0]] * len(parameters)]  # gradients as the loss
    columns = zip(*pieces, strict=True)
    return [combine.apply(list(xs)) for combine, xs in zip(how, columns, strict=True)]


def _numbers(x: Any) -> np.ndarray:
    """As float64 or complex128; random keys by their words."""
    if is_key_type(jnp.asarray(x).dtype):
        x = jax.random.key_data(x)
    inexact = np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64
    return np.asarray(x).astype(inexact)
