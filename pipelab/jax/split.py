"""A backward cut in two: I, the input's gradient, and W, the gradients of the weights.

The backward of two layers, x -> y1 -> y2, with dy the gradient of y:

    dy2 ----> dy1 ----> dx       I   what the stage before waits for
     |         |
     |         |                     crosses: dy2 and dy1, which I has computed anyway
     v         v
    dW2       dW1                W   what no stage waits for: dW1 reads dy1 and x, dW2 dy2 and y1

So I is every equation of the backward that dx needs, and W is the rest. I's results that W reads
cross. Nothing is computed twice. Values that only I reads are freed after it.

A first stage has no dx. Its I computes what the gradients of several weights share: again the chain
of the dy, up to dy1, which the first layer's weight and bias share. So only what W reads stays, and
the rest of what the forward kept is freed, as in the other stages.

An equation that holds others, such as a loop over layers (scan) or a checkpoint, is not cut: I
computes all of it, and the run says so.
"""

from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn, Var, jaxprs_in_params

from pipelab.jax.jaxpr import (
    Graph,
    Variables,
    inline,
    needed,
    place_of,
    read_by,
    variables,
)

FOREIGN = "ffi_call", "custom_call", "pure_callback"  # what is inside is not for us to see
MOVES = ["broadcast_in_dim", "iota", "reshape", "squeeze", "transpose", "convert_element_type"]


class SplitGraph(NamedTuple):
    """A graph in two: some of its outputs now, the others later.

    now       inputs: the graph's; outputs: those that were asked for, then `crossing`
    later     inputs: what it reads, of `crossing` and of the graph's inputs; outputs: the others
    crossing  what `now` makes for `later`
    unsplit   for each output of `later` None, or why it is computed now: in which equation, that
              could not be cut
    """

    now: Graph
    later: Graph
    crossing: Variables
    unsplit: list[str | None]

    @property
    def read(self) -> list[int]:
        """Of the graph's inputs, then `crossing`, the numbers of what `later` reads."""
        number = {v: i for i, v in enumerate([*self.now.inputs, *self.crossing])}
        return [number[v] for v in self.later.inputs]


def halve(graph: Graph, first: Collection[int], also: Collection[Var] = ()) -> SplitGraph:
    """Cut the graph: outputs with the numbers `first`, and variables `also`, are made now."""
    mine = [graph.outputs[i] for i in sorted(first)]
    others = [atom for i, atom in enumerate(graph.outputs) if i not in first]
    consts = dict(graph.consts)
    wanted = {*variables(mine), *also}  # now
    used = {*wanted, *variables(others)}  # now or later
    parts: list[tuple[JaxprEqn, bool]] = []  # an equation, and whether it is computed now
    why: dict[Var, str | None] = {}  # it is computed now, but read later alone

    def add(eqn: JaxprEqn, now: bool) -> None:
        parts.append((eqn, now))
        used.update(variables(eqn.invars))
        if now:
            wanted.update(variables(eqn.invars))

    # [1] From the last equation to the first: are its results wanted now?
    for eqn in reversed(graph.equations):
        rest = [v for v in eqn.outvars if v in used and v not in wanted]
        now = any(v in wanted for v in eqn.outvars) or bool(eqn.effects)
        if now or rest:
            add(eqn, now)
            if now and _is_opaque(eqn):
                why.update(dict.fromkeys(rest, f"{eqn.primitive.name}, {place_of(eqn)}"))
    # [2] What only moves numbers is done again later, rather than that more of them cross.
    parts.reverse()
    equations = [eqn for eqn, now in parts if now]
    later = needed([eqn for eqn, now in parts if not now or _spreads(eqn)], others)
    # [3] What crosses.
    made = {v for eqn in equations for v in eqn.outvars}
    read = read_by(later, others)
    crossing = [v for v in read if v in made]
    inputs = [v for v in read if v not in consts]
    for eqn in later:
        reason = next((why[v] for v in variables(eqn.invars) if why.get(v)), None)
        if reason:
            why.update(dict.fromkeys(eqn.outvars, reason))
    return SplitGraph(
        Graph(graph.inputs, [*mine, *crossing], equations, consts),
        Graph(inputs, others, later, {v: consts[v] for v in read if v in consts}),
        crossing,
        [why.get(atom) if isinstance(atom, Var) else None for atom in others],
    )


def _is_opaque(eqn: JaxprEqn) -> bool:
    """Whether it computes several things that we cannot tell apart."""
    return any(jaxprs_in_params(eqn.params)) or eqn.primitive.name in FOREIGN


def _spreads(eqn: JaxprEqn) -> bool:
    """Whether an equation makes as many bytes as it reads, or more, by moving them."""

    def size(atoms: Collection[Any]) -> int:
        return sum(atom.aval.size * atom.aval.dtype.itemsize for atom in atoms)

    return eqn.primitive.name in MOVES and size(eqn.outvars) >= size(eqn.invars)


def shared_values(graph: Graph) -> set[Var]:
    """The variables on the way to several of the graph's outputs."""
    reached: dict[Var, set[int]] = defaultdict(set)
    for i, v in enumerate(graph.outputs):
        if isinstance(v, Var):
            reached[v].add(i)
    for eqn in reversed(graph.equations):
        outputs = set().union(*(reached[v] for v in eqn.outvars))
        for v in variables(eqn.invars):
            reached[v] |= outputs
    return {v for v, outputs in reached.items() if len(outputs) > 1}


# ---- a pullback in two


def split_backward(pullback: Callable, *operands: Any) -> SplitGraph:
    """Cut a pullback: (*operands) -> (gradients of the weights, gradients of the inputs).

    It is flat: `now` is compiled as I, operands -> the inputs' gradients, then what crosses;
    `later` as W, what it reads -> the weights' gradients.

    The operands are arrays or their shapes, and all that the pullback reads. Without gradients of
    inputs, as in a first stage, what those of the weights share is computed now.
    """
    closed, (weights, _) = jax.make_jaxpr(pullback, return_shape=True)(*operands)
    graph = inline(closed)
    first = range(len(jax.tree.leaves(weights)), len(graph.outputs))
    return halve(graph, first, () if first else shared_values(graph))
