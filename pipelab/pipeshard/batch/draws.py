"""Random numbers: what grows with the batch, every micro-batch draws by itself.

The number of a micro-batch is folded in at the draw:

    key ---- split ---- fold_in(number) ---- random_bits    a mask: (8, 5), of 32 samples (32, 5)
                \\
                 `--------------------------- random_bits    features: (4, 4), of 32 samples, too

What is drawn in one shape for all sizes of batch stays as it was written. So do keys, unless they
are split into one for each sample, and what is drawn from keys of the samples' own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from pipelab.pipeshard.arrays import PipeshardError
from pipelab.pipeshard.batch.bodies import CHECKPOINTS
from pipelab.pipeshard.batch.primitives import DRAWS
from pipelab.pipeshard.batch.tags import axes_of
from pipelab.runtime.jax.jaxpr import (
    Arrays,
    Atom,
    Graph,
    carry_of,
    contains,
    inline,
    place_of,
    renamed,
    single,
    spec_of,
    substitute,
)

BODIES = ("jaxpr", "call_jaxpr", "cond_jaxpr", "body_jaxpr")  # parameters: what equations run
# An equation that draws, the same for another size of batch, the micro-batch's number and the
# equation's operands -> results
Draw = Callable[[JaxprEqn, JaxprEqn, Any, Arrays], Arrays]


def draw_own(eqn: JaxprEqn, _: JaxprEqn, number: Any, operands: Arrays) -> Arrays:
    """A `Draw` of numbers of the micro-batch's own.

    With the step's key, all micro-batches would draw the same dropout mask.
    """
    key, *others = operands
    # There may be several keys: each is folded by itself.
    return single(eqn).run(jnp.vectorize(jax.random.fold_in)(key, number), *others)


def draws_grow(graph: Graph, twin: Graph) -> bool:
    """Whether something that is drawn has another shape in a trace for another size of batch.

    Raises PipeshardError where the two do not draw in the same places.
    """
    return any(other is not None for other in _growing(graph, twin))


def _growing(graph: Graph, twin: Graph) -> list[JaxprEqn | None]:
    """Per equation the twin's, where it draws what grows, or has such inside."""
    mine, theirs = ([e for e in g.equations if contains(e, DRAWS)] for g in (graph, twin))
    if [e.primitive for e in mine] != [e.primitive for e in theirs]:
        raise PipeshardError(
            "the loss draws other random numbers for another size of batch: write it the same for "
            "every size"
        )
    found: list[JaxprEqn | None] = []
    for eqn in graph.equations:
        # Both draw in the same order, so that the first one left is this one's twin.
        other = theirs.pop(0) if contains(eqn, DRAWS) else None
        found.append(other if other is not None and _grows(eqn, other) else None)
    return found


def _grows(eqn: JaxprEqn, twin: JaxprEqn) -> bool:
    if eqn.primitive.name in DRAWS:
        made, key = (eqn.outvars[0], twin.outvars[0]), (eqn.invars[0], twin.invars[0])
        return bool(axes_of(made)) and not axes_of(key)
    return any(draws_grow(a, b) for a, b in zip(_bodies(eqn), _bodies(twin), strict=True))


def _bodies(eqn: JaxprEqn) -> list[Graph]:
    """The functions that an equation runs."""
    functions = [eqn.params[key] for key in BODIES if key in eqn.params]
    return [inline(f, outer=eqn) for f in (*functions, *eqn.params.get("branches", ()))]


def redraw(graph: Graph, twin: Graph, draw: Draw) -> tuple[Graph, dict[Var, Atom]]:
    """The graph with every draw that grows made by `draw`; its last input is the number for that.

    twin  the same function for another size of batch

    Returns the new graph, and what stands in it for variables of the old one. Raises PipeshardError
    where that cannot be done.
    """
    number = Var(jax.typeof(np.uint32(0)))
    equations: list[JaxprEqn] = []
    consts = dict(graph.consts)
    names: dict[Var, Atom] = {}
    for eqn, other in zip(graph.equations, _growing(graph, twin), strict=True):
        eqn = renamed(eqn, names)
        if other is None:
            equations.append(eqn)
            continue
        # Traced anew, with the number as one more operand; what it made has other variables then.
        new = partial(draw if eqn.primitive.name in DRAWS else partial(_inside, draw), eqn, other)
        operands = [number, *eqn.invars]
        traced = jax.make_jaxpr(lambda n, *xs, new=new: new(n, list(xs)))(*map(spec_of, operands))
        part = inline(traced, operands, eqn)
        equations += part.equations
        consts.update(part.consts)
        names.update(zip(eqn.outvars, part.outputs, strict=True))
    outputs = substitute(graph.outputs, names)
    return Graph([*graph.inputs, number], outputs, equations, consts), names


def _inside(draw: Draw, eqn: JaxprEqn, twin: JaxprEqn, number: Any, xs: Arrays) -> Arrays:
    """An equation that runs others, with the draws in these made by `draw`."""
    name, params = eqn.primitive.name, eqn.params
    # [1] Its functions, drawing anew: they close over the number.
    functions = []
    for body, other in zip(_bodies(eqn), _bodies(twin), strict=True):
        again, _ = redraw(body, other, draw)
        functions.append(lambda *xs, again=again: again.run(*xs, number))
    # [2] The same around these. Operands are constants first, then what is carried, then slices.
    if name in CHECKPOINTS:
        options = {key: params[key] for key in ("policy", "prevent_cse")}
        return jax.checkpoint(functions[0], **options)(*xs)
    if name == "cond":
        return jax.lax.switch(xs[0], functions, *xs[1:])
    if name == "scan":
        first, count = carry_of(eqn)
        end = first + count

        def iteration(carry, slices):
            out = functions[0](*xs[:first], *carry, *slices)
            return out[:count], out[count:]

        options = {key: params[key] for key in ("length", "reverse", "unroll")}
        carry, stacked = jax.lax.scan(iteration, xs[first:end], xs[end:], **options)
        return [*carry, *stacked]
    if name == "while":
        begin = params["cond_nconsts"]
        end = begin + params["body_nconsts"]
        condition, iterate = functions
        return jax.lax.while_loop(
            lambda carry: condition(*xs[:begin], *carry)[0],
            lambda carry: iterate(*xs[begin:end], *carry),
            xs[end:],
        )
    raise PipeshardError(
        f"{name} ({place_of(eqn)}) draws random numbers for every sample, inside a function that "
        "cannot be opened: draw them before, and pass them in"
    )


def draw_in_pieces(
    m: int, own: bool, whole: JaxprEqn, piece: JaxprEqn, _: Any, operands: Arrays
) -> Arrays:
    """The draws of an equation for the batch, as if each of m micro-batches drew by itself.

    own  whether they draw numbers of their own, or all the same
    """
    key, *others = operands
    parts = []
    for k in range(m):  # other operands may be of samples, such as the shape parameters of gamma
        mine = [jnp.vectorize(jax.random.fold_in)(key, np.uint32(k)) if own else key]
        for x, v, w in zip(others, whole.invars[1:], piece.invars[1:], strict=True):
            axes = axes_of((v, w))
            mine.append(jnp.split(x, m, axes[0])[k] if axes else x)
        parts += single(piece).run(*mine)
    (axis,) = axes_of((whole.outvars[0], piece.outvars[0]))
    return [jnp.concatenate(parts, axis)]
