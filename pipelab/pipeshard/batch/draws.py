"""Random numbers: every micro-batch draws its own if their shape grows with the batch.

A draw folds the micro-batch's number into its key:

    key ---- split ---- fold_in(number) ---- random_bits    a mask: (8, 5), for 32 samples (32, 5)
                \\
                 `--------------------------- random_bits    features: (4, 4), for 32 samples, too

A draw stays as written if its shape is the same for every batch size, or if every sample has its
own key. So does a split of keys, unless it makes one key per sample.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Var

from pipelab.jax.jaxpr import (
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
from pipelab.pipeshard.arrays import PipeshardError
from pipelab.pipeshard.batch.primitives import CHECKPOINTS, DRAWS
from pipelab.pipeshard.batch.tags import axes_of

BODIES = ("jaxpr", "call_jaxpr", "cond_jaxpr", "body_jaxpr")  # parameters: what equations run
# (an equation that draws, the same one at another batch size, the micro-batch's number, the
# equation's operands) -> its results
Draw = Callable[[JaxprEqn, JaxprEqn, Any, Arrays], Arrays]


def draw_own(eqn: JaxprEqn, _: JaxprEqn, number: Any, operands: Arrays) -> Arrays:
    """A `Draw` that gives each micro-batch its own numbers.

    With the step's key alone, all micro-batches would draw the same dropout mask.
    """
    key, *others = operands
    # There may be several keys: fold each of them.
    return single(eqn).run(jnp.vectorize(jax.random.fold_in)(key, number), *others)


def _bodies(eqn: JaxprEqn) -> list[Graph]:
    """The functions that an equation runs."""
    functions = [eqn.params[key] for key in BODIES if key in eqn.params]
    return [inline(f, outer=eqn) for f in (*functions, *eqn.params.get("branches", ()))]


def redraw(graph: Graph, twin: Graph, draw: Draw) -> tuple[Graph, dict[Var, Atom]]:
    """The graph with `draw` for every draw that grows; its last input is the micro-batch's number.

    twin  the same function at another batch size

    Returns the new graph, and its replacements for variables of the old one: none if no draw grows.
    Raises PipeshardError if a draw cannot be replaced, or the two graphs draw in different places.
    """
    number = Var(jax.typeof(np.uint32(0)))
    equations: list[JaxprEqn] = []
    consts = dict(graph.consts)
    names: dict[Var, Atom] = {}
    mine, theirs = ([e for e in g.equations if contains(e, DRAWS)] for g in (graph, twin))
    if [e.primitive for e in mine] != [e.primitive for e in theirs]:
        raise PipeshardError(
            "the loss makes different random draws for another size of batch: write it the same "
            "for every size"
        )
    twins = iter(theirs)
    for eqn in graph.equations:
        eqn = renamed(eqn, names)
        # Both draw in the same order.
        new = _again(draw, eqn, next(twins)) if contains(eqn, DRAWS) else None
        if new is None:
            equations.append(eqn)
            continue
        # Trace it anew, with the number as one more operand. Its results get new variables.
        operands = [number, *eqn.invars]
        traced = jax.make_jaxpr(lambda n, *xs, new=new: new(n, list(xs)))(*map(spec_of, operands))
        part = inline(traced, operands, eqn)
        equations += part.equations
        consts.update(part.consts)
        names.update(zip(eqn.outvars, part.outputs, strict=True))
    outputs = substitute(graph.outputs, names)
    return Graph([*graph.inputs, number], outputs, equations, consts), names


def _again(draw: Draw, eqn: JaxprEqn, twin: JaxprEqn) -> Callable[[Any, Arrays], Arrays] | None:
    """An equation with `draw` for the draws in it; None if none of them grows."""
    if eqn.primitive.name in DRAWS:
        made, key = (eqn.outvars[0], twin.outvars[0]), (eqn.invars[0], twin.invars[0])
        return partial(draw, eqn, twin) if axes_of(made) and not axes_of(key) else None
    pairs = zip(_bodies(eqn), _bodies(twin), strict=True)
    parts = [redraw(mine, theirs, draw) for mine, theirs in pairs]
    graphs = [graph for graph, _ in parts]
    return partial(_inside, eqn, graphs) if any(names for _, names in parts) else None


def _inside(eqn: JaxprEqn, graphs: list[Graph], number: Any, xs: Arrays) -> Arrays:
    """Run an equation on its operands, with these graphs for the functions inside it."""
    name, params = eqn.primitive.name, eqn.params
    # [1] The functions close over the number.
    functions = [lambda *xs, graph=graph: graph.run(*xs, number) for graph in graphs]
    # [2] The same primitive around them. Its operands: constants, then the carry, then slices.
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
        "cannot be opened: draw them outside, and pass them in"
    )


def draw_in_pieces(m: int, whole: JaxprEqn, piece: JaxprEqn, _: Any, operands: Arrays) -> Arrays:
    """The draws of an equation for the batch, as if each of m micro-batches drew its own."""
    key, *others = operands
    parts = []
    for k in range(m):  # other operands may be per sample, such as gamma's shape parameters
        mine = [jnp.vectorize(jax.random.fold_in)(key, np.uint32(k))]
        for x, v, w in zip(others, whole.invars[1:], piece.invars[1:], strict=True):
            axes = axes_of((v, w))
            mine.append(jnp.split(x, m, axes[0])[k] if axes else x)
        parts += single(piece).run(*mine)
    (axis,) = axes_of((whole.outvars[0], piece.outvars[0]))
    return [jnp.concatenate(parts, axis)]
