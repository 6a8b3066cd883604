"""A pipeline's step against the same step on one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipelab.executors.rules import Check, Comparison, tolerance_for
from pipelab.pipeshard.graph import Graph, PipeshardError, dtype_of, function, inner_jaxprs
from pipelab.pipeshard.program import Call, Program
from pipelab.pipeshard.trace import Arguments, Step, gradient_on_one_device, trace

WHOLE = "flush: the same step on one device, the batch undivided"
PIECES = "flush: the same step on one device, accumulated over the same micro-batches (no check of how these are combined)"
ROUNDED = (
    "flush: the same step on one device, accumulated over the same micro-batches; rounding alone takes the batch undivided "
    "further away, since in double precision both agree"
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
    home = jax.sharding.SingleDeviceSharding(program.meshes[0].devices.flat[0])
    values = [jax.device_put(x, home) for x in arguments.values]
    limit = tolerance or tolerance_for([np.dtype(x).name for x in _types(program)])
    after = _results(program, call, values, home)

    def verdict(expected: list[Any], rule: str) -> Check:
        comparison = Comparison()
        _add(comparison, program, call.gradient, expected)
        for name, got, wanted in after:
            comparison.add(name, _numbers(got), _numbers(wanted))
        return comparison.verdict(limit, rule)

    if not program.exact:
        return verdict(_pieces(program, program.step, program.loss, values), PIECES)
    expected = _whole(train_step, arguments, values)
    if not np.isfinite(_numbers(expected[0])):
        raise PipeshardError(
            f"the loss of this batch is {expected[0]} on one device too: there is nothing to compare"
        )
    check = verdict(expected, WHOLE)
    if check.passed:
        return check
    near = verdict(_pieces(program, program.step, program.loss, values), ROUNDED)
    return (
        near if near.passed and _same_in_double(train_step, program, arguments, values) else check
    )


def _add(
    comparison: Comparison, program: Program, got: Sequence[Any], expected: Sequence[Any]
) -> None:
    """Compare two lists of [loss, *aux, *gradients]."""
    count = len(program.combine)
    paths = [program.paths[a] for a in program.step.parameters.values()]
    names = [
        "the loss",
        *(f"auxiliary result {i}" for i in range(count - 1)),
        *(f"the gradient of {path}" for path in paths),
    ]
    floor = FLOOR * max(
        (float(np.abs(_numbers(x)).max(initial=0)) for x in expected[count:]), default=0.0
    )
    for i, (name, a, b) in enumerate(zip(names, got, expected, strict=True)):
        comparison.add(name, _numbers(a), _numbers(b), floor if i >= count else 0.0)


def _types(program: Program) -> set[Any]:
    """Of the parameters and of all that the loss computes."""
    found: set[Any] = {dtype_of(p) for p in program.step.parameters}
    left = list(program.step.loss.equations)
    while left:
        eqn = left.pop()
        found.update(dtype_of(v) for v in eqn.outvars if hasattr(v.aval, "dtype"))
        left += [inner for jaxpr in inner_jaxprs(eqn) for inner in jaxpr.eqns]
    return {x for x in found if jnp.issubdtype(x, jnp.floating)}


def _results(
    program: Program, call: Call, values: list[Any], home: Any
) -> list[tuple[str, Any, Any]]:
    """Every result of the step: its name, the pipeline's, and the step's own update of the same gradients on one device."""
    update = program.step.update
    fun = jax.jit(function(update.inputs, update.outputs, update.equations))
    known = {**dict(zip(program.step.arguments, values, strict=True)), **program.step.consts}
    known.update(
        (v, jax.device_put(x, home))
        for v, x in zip(program.step.gradient, call.gradient, strict=True)
    )
    results = jax.tree_util.tree_flatten_with_path(
        jax.tree.unflatten(program.step.results, call.results)
    )[0]
    wanted = fun(*(known[v] for v in update.inputs))
    return [
        (f"result {jax.tree_util.keystr(path)}", got, x)
        for (path, got), x in zip(results, wanted, strict=True)
    ]


def _same_in_double(
    train_step: Callable, program: Program, arguments: Arguments, values: list[Any]
) -> bool:
    """Whether the batch undivided and in micro-batches has the same gradients in double precision, both on one device."""
    limit, comparison = tolerance_for(["float64"]), Comparison()
    with jax.enable_x64(True):
        floating = [jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating) for x in values]
        double = [x.astype(jnp.float64) if f else x for x, f in zip(values, floating, strict=True)]
        given = replace(arguments, values=double)
        try:
            step = trace(train_step, given, program.samples)
            _add(
                comparison,
                program,
                _pieces(program, step, step.loss, double),
                _whole(train_step, given, double),
            )
        except (TypeError, ValueError):  # a step for single precision alone
            return False
    return comparison.verdict(limit, WHOLE).passed


def _whole(train_step: Callable, arguments: Arguments, values: list[Any]) -> list[Any]:
    """[loss, *aux, *gradients] of the undivided batch, by jax.value_and_grad of the loss as it was written."""
    graph = gradient_on_one_device(trace(train_step, arguments, arguments.samples))
    inputs = [*graph.inputs, *graph.consts]
    return jax.jit(function(inputs, graph.outputs, graph.equations))(
        *values, *graph.consts.values()
    )


def _pieces(program: Program, step: Step, loss: Graph, values: list[Any]) -> list[Any]:
    """The same, accumulated over micro-batches with random keys of their own."""
    known = {**dict(zip(step.arguments, values, strict=True)), **loss.consts}
    equations = [eqn for eqn in loss.equations if eqn.primitive.name != "pipeline_boundary"]
    others = [v for v in (*loss.inputs, *loss.consts) if v not in step.parameters]
    fun = function([*step.parameters, *others], loss.outputs, equations)

    @jax.jit
    def one(parameters: list[Any], rest: list[Any]) -> Any:
        def value(parameters: list[Any]) -> tuple[Any, list[Any]]:
            out = fun(*parameters, *rest)
            return out[0], out

        return jax.grad(value, has_aux=True)(parameters)

    parameters = [known[a] for a in step.parameters.values()]
    pieces = []
    for k in range(program.microbatches):
        rows = slice(k * program.samples, (k + 1) * program.samples)
        mine = {
            v: known[v][rows] if v in step.batch else known.get(v, np.uint32(k)) for v in others
        }
        pieces.append(one(parameters, list(mine.values())))
    results = [
        combine.apply([out[i] for _, out in pieces]) for i, combine in enumerate(program.combine)
    ]
    gradients = [
        program.combine[0].apply([g[i] for g, _ in pieces]) for i in range(len(parameters))
    ]
    return [*results, *gradients]


def _numbers(x: Any) -> np.ndarray:
    """As float64 or complex128; random keys by their words."""
    if jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x).astype(
        np.complex128 if jnp.issubdtype(x.dtype, jnp.complexfloating) else np.float64
    )
