"""A pipeline's step against the same step on one device, measured in its own rounding.

The truth is the step in float64, on the undivided batch; the error of the same in the step's
precision says how far rounding may lead. The truth uses nothing that the
pipeline made of the loss: neither its micro-batches nor how their results are combined. Adding
these up rounds as well: that is measured, too, up to what m sums may be off.

If micro-batches draw their own random numbers, the undivided batch gets these: a mask drawn for all
samples is replaced by the micro-batches' masks, one after another.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from pipelab.jax.host import words
from pipelab.jax.jaxpr import Arrays, contains, needed, rounding_unit
from pipelab.jax.replay import numbers
from pipelab.pipeshard.arrays import PipeshardError
from pipelab.pipeshard.batch.draws import draw_in_pieces, redraw
from pipelab.pipeshard.batch.microbatches import gradient_of, in_pieces
from pipelab.pipeshard.batch.primitives import DRAWS
from pipelab.pipeshard.call import Call
from pipelab.pipeshard.program import Program
from pipelab.pipeshard.tracing import Arguments, TracedStep, trace, traced
from pipelab.runtime.verdict.check import Check, How
from pipelab.runtime.verdict.compare import LIMIT, distance, norm

WHOLE = "flush: the same step on one device, the batch undivided"
DRAWN = WHOLE + ", with the random numbers that its micro-batches draw"
PIECES = (
    "flush: the same step on one device, accumulated over the same micro-batches "
    "(no check of how these are combined)"
)


DRAWN_AGAIN = 8  # second opinions on an array that looks wrong


class Agreement:
    """Collects how far arrays are from the truth, beside how far rounding leads."""

    def __init__(self, tolerance: float | None) -> None:
        self.check = Check(True, How.ROUNDING, limit=tolerance or LIMIT)

    def add(self, name: str, got: Any, truth: Any, noise: Any, again: Callable[[int], Any]) -> None:
        """Compare an array, as a whole and by its largest element.

        noise  how far rounding may lead in each element
        again  seed -> the array once more, from an input that is off by rounding
        """
        check, error = self.check, distance(got, truth)
        check.compared += 1
        for seed in range(1, DRAWN_AGAIN + 1):
            ratio = _beside(error, noise)
            if ratio <= check.limit:
                break
            noise = np.maximum(noise, distance(again(seed), truth))
        if error.any() and _beside(np.abs(truth), noise) <= check.limit:
            check.unjudged.append(f"{name} (zeros would pass as well)")
        if ratio > check.ratio:
            check.ratio, check.worst, check.passed = ratio, name, ratio <= check.limit
            check.tensors = {} if check.passed else {"run": got, "one device": truth}


def _nth(again: Callable[[int], Sequence[Any]], i: int, seed: int) -> Any:
    return again(seed)[i]


def _beside(error: np.ndarray, noise: np.ndarray) -> float:
    """The ratio of two arrays: of their norms, or of their largest elements."""
    noise = np.where(np.isnan(noise), np.inf, noise)
    pairs = [(f(error), f(noise)) for f in (norm, lambda a: a.max(initial=0.0))]
    return max(0.0 if not e or n == np.inf else float(np.divide(e, n)) for e, n in pairs)


def compare_step(
    train_step: Callable,
    program: Program,
    arguments: Arguments,
    call: Call,
    tolerance: float | None,
) -> Check:
    """See `Parallelized.compare`."""
    # A mesh of one device: on a device alone an array keeps the explicit axes of its old mesh.
    home = NamedSharding(Mesh(program.meshes[0].devices.flat[:1], ("device",)), PartitionSpec())
    values = [jax.device_put(x, home) for x in arguments.values]
    arguments = replace(arguments, values=values)
    coarsest = rounding_unit(program.step.loss.equations, program.step.parameters)
    eps, doubled = float(coarsest.eps), False
    found = Agreement(tolerance)
    # [1] The loss, what it returns beside, and the gradients.
    rule, own = _reference(train_step, program, arguments)
    # Where the loss draws, float64 would draw other numbers: the truth is then in its own
    # precision.
    truth = own
    if rule is WHOLE and not any(contains(e, DRAWS) for e in program.step.loss.equations):
        truth, doubled = _most_precise(train_step, arguments, own)
    rounded = own(values)
    expected = rounded if truth is own else truth(values)
    if program.step.trains and not np.isfinite(_numbers(expected[0])):
        raise PipeshardError(
            f"the loss of this batch is {expected[0]} on one device too: there is nothing to "
            "compare"
        )
    jittered = partial(_jittered, eps=eps, exact={*arguments.batch})
    again = cache(lambda seed: [*map(_numbers, truth(jittered(values, seed, doubled)))])
    pieces = rounded if rule is PIECES else _accumulated(program, values)
    for i, name in enumerate(_names(program)):
        exact, got, near = (_numbers(of[i]) for of in (expected, call.gradient, pieces))
        # Three causes: the result's own type, the computing in that precision, adding up.
        noise = eps * np.abs(exact) + distance(_numbers(rounded[i]), exact)
        if near.shape == exact.shape:
            noise += _summing(near, exact, eps * program.microbatches)
        found.add(name, got, exact, noise, partial(_nth, again, i))
    # [2] Every result of the step, by its own update of the pipeline's gradients, and in its type.
    _, shapes = traced(train_step, jax.tree.unflatten(arguments.tree, values))
    types = [x.dtype for x in jax.tree.leaves(shapes)]
    known = [*values, *jax.device_put(call.gradient, home)]
    update = jax.jit(program.step.update.run)
    wanted = update(*known)
    again = cache(lambda seed: [*map(_numbers, update(*jittered(known, seed)))])
    for i, (path, got) in enumerate(jax.tree.leaves_with_path(call.results)):
        exact = _numbers(wanted[i])
        name = f"result {jax.tree_util.keystr(path)}"
        # Another type is wrong, however near its numbers are: nan is far from all that is not.
        values_of = _numbers(got)
        if got.dtype != types[i]:
            values_of = np.where(np.isnan(exact), 0.0, np.nan)
        found.add(name, values_of, exact, eps * np.abs(exact), partial(_nth, again, i))
    if not program.step.trains:
        rule = rule.replace("flush", "evaluation")
    return replace(found.check, rule=rule)


def _accumulated(program: Program, values: Arrays) -> Arrays:
    """[loss, *aux, *gradients], added up over the same micro-batches on one device."""
    return in_pieces(program.step, program.loss, program.combine, values, program.microbatches)


def _summing(pieces: np.ndarray, exact: np.ndarray, most: float) -> np.ndarray:
    """How far off adding up the micro-batches is: at most this share, else it is no rounding.

    Infinite where there is no number.
    """
    off = np.minimum(distance(pieces, exact), most * np.abs(exact))
    return np.where(np.isfinite(pieces), off, np.inf)


def _reference(
    train_step: Callable, program: Program, arguments: Arguments
) -> tuple[str, Callable[[Arrays], Arrays]]:
    """The rule of what is compared with, and what computes it: values of the arguments -> results.

    Traced anew from the step as it was written.
    """
    if not program.exact:  # only the same micro-batches compute the same
        return PIECES, partial(_accumulated, program)
    step = trace(train_step, arguments, arguments.samples)
    piece = trace(train_step, arguments, program.samples)
    loss, names = redraw(step.loss, piece.loss, partial(draw_in_pieces, program.microbatches))
    if not names:
        return WHOLE, _as_written(step)
    gradient = jax.jit(gradient_of(loss, trains=step.trains))
    # Parameters come first among the inputs of the loss, as they do in `gradient_of`.
    positions = [step.arguments.index(v) for v in step.parameters.values()]

    def evaluate(values: Arrays) -> Arrays:
        unused = np.uint32(0)  # the number of the micro-batch
        return gradient([values[i] for i in positions], [*values, unused])

    return DRAWN, evaluate


def _names(program: Program) -> list[str]:
    """Names of [loss, *aux, *gradients]."""
    step = program.step
    trained = [program.paths[step.parameters[p]] for p in step.gradients]
    return [*step.result_names, *(f"the gradient of {path}" for path in trained)]


def _as_written(step: TracedStep) -> Callable[[Arrays], Arrays]:
    """[loss, *aux, *gradients] of the batch, by jax.value_and_grad of the loss as written."""
    results = step.gradient if step.trains else step.whole.outputs
    equations = needed(step.whole.equations, results)  # up to the marked one
    run = jax.jit(replace(step.whole, outputs=results, equations=equations).run)
    return lambda values: run(*values)


def _most_precise(
    train_step: Callable, arguments: Arguments, own: Callable[[Arrays], Arrays]
) -> tuple[Callable[[Arrays], Arrays], bool]:
    """The undivided step in float64, if that is possible, else `own`; and whether it is."""

    def in_double(values: Arrays) -> Arrays:
        with jax.enable_x64(True):
            return evaluate(_doubled(values))

    try:
        with jax.enable_x64(True):
            exact = replace(arguments, values=_doubled(arguments.values))
            evaluate = _as_written(trace(train_step, exact, exact.samples))
            evaluate(exact.values)
        return in_double, True
    except (TypeError, ValueError):
        return own, False


def _jittered(
    values: Arrays, seed: int, doubled: bool = False, *, eps: float, exact: Collection[int]
) -> Arrays:
    """Floating numbers, each off by up to half an eps of itself; rounded, unless `doubled`.

    exact  positions of what is left as it is: data, which may be numbers of rows
    """
    random = np.random.default_rng(seed)
    given = _doubled(values) if doubled else values
    return [x if i in exact else _off(x, eps / 2, random) for i, x in enumerate(given)]


def _off(leaf: Any, eps: float, random: np.random.Generator) -> Any:
    """An array whose finite floating numbers are each off by up to an eps of itself."""
    if not jnp.issubdtype(leaf.dtype, jnp.inexact):
        return leaf
    array = np.asarray(leaf)
    errors = eps * random.uniform(-1, 1, array.shape)
    return (array + np.where(np.isfinite(array), array, 0) * errors).astype(leaf.dtype)


def _doubled(values: Arrays) -> Arrays:
    """Floating numbers in float64 or complex128, on the host."""
    return [numbers(x) if jnp.issubdtype(x.dtype, jnp.inexact) else x for x in values]


def _numbers(x: Any) -> np.ndarray:
    """The array as float64 or complex128; random keys by their words."""
    return numbers(words(x))
