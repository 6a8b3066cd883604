"""A pipeline's step against the same step on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipelab.executors.rules import Check, Comparison, tolerance_for
from pipelab.pipeshard.graph import dtype_of, function
from pipelab.pipeshard.program import Call, Program
from pipelab.pipeshard.trace import Arguments, gradient_on_one_device, trace

WHOLE = "flush: the same step on one device, the batch undivided"
PIECES = "flush: the same step on one device, accumulated over the same micro-batches"
FLOOR = 1e-3  # of the largest gradient: what a gradient that is zero in theory is measured by


def compare(train_step: Callable, program: Program, arguments: Arguments, call: Call, tolerance: float | None) -> Check:
    """See `Parallelized.compare`."""
    home = jax.sharding.SingleDeviceSharding(program.meshes[0].devices.flat[0])
    values = [jax.device_put(x, home) for x in arguments.values]
    reference = _whole if program.exact else _pieces
    expected = reference(train_step, program, arguments, values)
    comparison = Comparison()
    count = len(program.combine)
    paths = [program.paths[a] for a in program.step.parameters.values()]
    names = ["the loss", *(f"auxiliary result {i}" for i in range(count - 1)), *(f"the gradient of {path}" for path in paths)]
    floor = FLOOR * max((float(np.abs(_numbers(x)).max(initial=0)) for x in expected[count:]), default=0.0)
    for i, (name, got, wanted) in enumerate(zip(names, call.gradient, expected, strict=True)):
        comparison.add(name, _numbers(got), _numbers(wanted), floor if i >= count else 0.0)
    update = program.step.update
    fun = jax.jit(function(update.inputs, update.outputs, update.equations))
    known = {**dict(zip(program.step.arguments, values, strict=True)), **program.step.consts}
    known.update((v, jax.device_put(x, home)) for v, x in zip(program.step.gradient, call.gradient, strict=True))
    results = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(program.step.results, call.results))[0]
    wanted = fun(*(known[v] for v in update.inputs))
    for (path, got), expect in zip(results, wanted, strict=True):
        comparison.add(f"result {jax.tree_util.keystr(path)}", _numbers(got), _numbers(expect))
    types = [np.dtype(dtype_of(p)).name for p in program.step.parameters]
    return comparison.verdict(tolerance or tolerance_for(types), WHOLE if program.exact else PIECES)


def _whole(train_step: Callable, program: Program, arguments: Arguments, values: list[Any]) -> list[Any]:
    """[loss, *aux, *gradients] of the undivided batch, by jax.value_and_grad of the loss as it was written."""
    graph = gradient_on_one_device(trace(train_step, arguments, arguments.samples))
    inputs = [*graph.inputs, *graph.consts]
    return jax.jit(function(inputs, graph.outputs, graph.equations))(*values, *graph.consts.values())


def _pieces(train_step: Callable, program: Program, arguments: Arguments, values: list[Any]) -> list[Any]:
    """The same, accumulated over micro-batches with random keys of their own."""
    loss, step, m = program.loss, program.step, program.microbatches
    known = {**dict(zip(step.arguments, values, strict=True)), **step.consts}
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
    for k in range(m):
        rows = slice(k * program.samples, (k + 1) * program.samples)
        mine = {v: known[v][rows] if v in step.batch else known.get(v, np.uint32(k)) for v in others}
        pieces.append(one(parameters, list(mine.values())))
    results = [combine.apply([out[i] for _, out in pieces]) for i, combine in enumerate(program.combine)]
    gradients = [program.combine[0].apply([g[i] for g, _ in pieces]) for i in range(len(parameters))]
    return [*results, *gradients]


def _numbers(x: Any) -> np.ndarray:
    """As float64; random keys by their words."""
    if jnp.issubdtype(jnp.asarray(x).dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x).astype(np.float64)
