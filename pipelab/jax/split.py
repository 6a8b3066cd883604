"""A backward cut in two: I, the input's gradient, and W, the gradients of the weights.

The backward of two layers, x -> y1 -> y2, with dy the gradient of y:

    dy2 ----> dy1 ----> dx       I   what the stage before waits for
     |         |
     |         |                     crosses: dy2 and dy1, which I has computed anyway
     v         v
    dW2       dW1                W   what no stage waits for: dW1 reads dy1 and x, dW2 dy2 and y1

So I is every equation of the backward that dx needs, W is every other one, and what W reads of I's
results crosses. Nothing is computed twice. What I alone reads is free after it.

A first stage has no dx. Its I computes what the gradients of several weights share: the chain of
the dy all the same, whose last one, dy1, is that of the first layer's weight and of its bias. So W
finds only what it reads, and the rest of what the forward kept is free, as in the other stages.

The equations inside a loop over layers (scan) or a checkpoint are cut in the same way: there are
two loops then, and what crosses from each round of one to that of the other is stacked.
"""

from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import compress
from operator import not_
from typing import Any, NamedTuple

import jax
from jax.extend.core import JaxprEqn, Var, jaxprs_in_params

from pipelab.jax.jaxpr import (
    Graph,
    Values,
    Variables,
    carry_of,
    inline,
    needed,
    place_of,
    read_by,
    variables,
    with_carry,
)

LOOP, CHECKPOINT = "scan", "remat2"
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
        some = [v in wanted for v in eqn.outvars]
        rest = [v for v in eqn.outvars if v in used and v not in wanted]
        now = any(some) or bool(eqn.effects)
        if now and rest and eqn.primitive.name in (LOOP, CHECKPOINT) and not eqn.effects:
            cut = _halve_inside(eqn, some, consts)
            add(cut.later, False)
            add(cut.now, True)
            why.update(zip(cut.later.outvars, cut.unsplit, strict=True))
        elif now or rest:
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


# ---- equations that have equations inside


class Cut(NamedTuple):
    """An equation in two; `unsplit` as in `SplitGraph`, for each result of the later one."""

    now: JaxprEqn
    later: JaxprEqn
    unsplit: list[str | None]


def _halve_inside(eqn: JaxprEqn, some: list[bool], consts: Values) -> Cut:
    """Cut what an equation runs: there are two loops of as many rounds, or two checkpoints.

        operands  constants, carries, slices    of each round: inputs of the body
        results   carries, slices               of each round: outputs of the body

    What crosses in a round is a slice that the first loop makes and the second one reads. A
    checkpoint is a round without carries or slices: what it computes again is computed now, and
    crosses where it is read later.

    some    whether each of its results is wanted now
    consts  of the graph that it stands in: those inside it are added
    """
    loop = eqn.primitive.name == LOOP
    body = inline(eqn.params["jaxpr"])
    start, count = carry_of(eqn) if loop else (len(body.inputs), 0)
    carries = body.inputs[start : start + count]
    # [1] A carry that is wanted now needs others: all that its next value reads, and so on.
    first = {i for i, wanted in enumerate(some) if wanted}
    more = first
    while more:
        first = first | more
        halves = halve(body, first)
        read = read_by(halves.now.equations, halves.now.outputs)
        more = {i for i, v in enumerate(carries) if v in read} - first
    now, later = halves.now, halves.later
    consts.update(now.consts)
    # [2] What crosses; the first loop's carries may, too.
    is_now = [i in first for i in range(len(some))]
    mine, others = _by(carries, is_now[:count])
    crossing = [*halves.crossing, *(v for v in mine if v in later.inputs)]
    rounds = [eqn.params["length"]] if loop else []
    sent = {v: Var(v.aval.update(shape=(*rounds, *v.aval.shape))) for v in crossing}
    # [3] The two, each with the operands that its body reads.
    outer = dict(zip(body.inputs, eqn.invars, strict=True))
    fixed, slices = body.inputs[:start], body.inputs[start + count :]

    def part(graph: Graph, carries: Variables, slices: Variables, results: Variables) -> JaxprEqn:
        # Inside an equation there are no constants: they become operands.
        read = {*graph.inputs, *graph.consts}
        of_all = [v for v in [*now.consts, *fixed] if v in read]
        slices = [v for v in slices if v in read]
        inputs = [*of_all, *carries, *slices]
        ends = len(inputs), len(results)
        params = with_carry(eqn, len(of_all), len(carries), ends) if loop else eqn.params
        inside = Graph(inputs, graph.outputs, graph.equations).jaxpr
        params = params | {"jaxpr": inside if loop else inside.jaxpr}
        return eqn.replace(invars=[outer.get(v, v) for v in inputs], outvars=results, params=params)

    results, results_later = _by(eqn.outvars, is_now)
    now = replace(now, outputs=[*now.outputs, *crossing[len(halves.crossing) :]])
    first_part = part(now, mine, slices, [*results, *sent.values()])
    outer |= sent
    second_part = part(later, others, [*slices, *sent], results_later)
    return Cut(first_part, second_part, halves.unsplit)


def _by(items: list[Any], first: list[bool]) -> tuple[list[Any], list[Any]]:
    """Those that are `first`, and the others."""
    return [*compress(items, first)], [*compress(items, map(not_, first))]


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
