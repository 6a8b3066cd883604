"""A torch backward in two halves: I, the gradients of the inputs, and W, those of the weights.

Autograd keeps a graph of the operations between the outputs and what wants a gradient:

    output -----( @ )-----[ relu ]-----( @ )----- input      the trunk: what leads to an input
                  |                      |
                [ t ]                  [ t ]                 branches: what leads to weights alone
                  |                      |
               weight 2               weight 1

I goes down the trunk, and leaves at every fork ( ) the gradient that arrived there. W starts from
these and goes down the branches. A fork runs in both, but autograd asks it only for the gradients
that are wanted: a matrix product computes one product in I and the other one in W. After I the
trunk frees what it saved, except at its forks.

Forks with a weight in common are one group: one walk of W starts from all of them. That is right
only where none of them leads to another; else the walk would go down the trunk again. The weights
of such a group are computed by I, as are those of a fork that computes all its gradients at once,
like a custom Function or an LSTM, and of operations whose saved tensors have hooks of their own, as
under torch.utils.checkpoint, which would compute its layers again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from pipelab.runtime.torch.device import walk, whole_backward
from pipelab.runtime.torch.ledger import Saved

Edge = tuple[int, int]  # an operation, by its number, and which of its outputs
# Per operation what it is, and where it hands its gradients.
Graph = tuple[tuple[type, tuple[Edge | None, ...]], ...]
# By operation, what hands it gradients, and as which of its outputs'; None: where a backward starts
Above = list[list[tuple[int | None, int]]]

# Their backwards start one of their own, or refuse to run for some gradients only.
INDIVISIBLE = {"CheckpointFunctionBackward", "CompiledFunctionBackward"}

# Torch's operations that compute all their gradients, whichever are wanted: most of those without
# a mask in its derivatives.yaml, and CuDNN's and MIOpen's, which start from the inputs' gradients.
# A write to a view (CopySlices) hides what was written with.
AT_ONCE = {
    "ConvTbc",
    "CopySlices",
    "CudnnBatchNorm",
    "CudnnGridSampler",
    "CudnnRnn",
    "EuclideanDist",
    "FakeQuantizeLearnablePerChannelAffine",
    "FakeQuantizeLearnablePerTensorAffine",
    "GridSampler2DCpuFallback",
    "IndexReduce",
    "LinalgHouseholderProduct",
    "LstmMps",
    "MiopenBatchNorm",
    "MiopenRnn",
    "MkldnnRnnLayer",
    "Polar",
    "PreluKernel",
    "ScaledDotProductCudnnAttention",
    "ScaledDotProductFlashAttention",
    "ScaledDotProductFlashAttentionForCpu",
    "ScatterReduce",
    "ThnnFusedGruCell",
    "ThnnFusedLstmCell",
    "WeightNormInterface",
}


@dataclass(eq=False)
class _Group:
    """Forks with weights in common.

    weights     by the ends of their branches (AccumulateGrad)
    operations  of the branches
    """

    forks: set[int]
    weights: list[int]
    operations: set[int]


class _Part(NamedTuple):
    """What I leaves to one walk of W.

    weights  whose gradients are found by it
    gates    of its forks, where I leaves gradients
    starts   the outputs, by number, that are off the trunk
    """

    weights: list[int]
    gates: list[Edge]
    starts: list[int]


class _Cut(NamedTuple):
    """What I and W do with any graph of the same operations and edges.

    forks     of all parts
    together  weight -> why I computes its gradient, too
    freed     operations that W does not need
    """

    parts: list[_Part]
    forks: set[int]
    together: dict[int, str]
    freed: list[int]


class Halves:
    """The backward of one forward, whose tensors were saved as `Saved`; first I, then W.

    outputs, gradients  where it starts
    inputs              leaves whose gradients are I's. Without any I does nothing and W everything
    together            weight -> why I computed its gradient, too
    indivisible         why I was a full backward, or None
    """

    def __init__(
        self,
        outputs: Sequence[GradientEdge],
        gradients: Sequence[Tensor],
        inputs: Sequence[Tensor],
    ) -> None:
        self.outputs, self.gradients, self.inputs = outputs, gradients, inputs
        self.together: dict[Tensor, str] = {}
        self.indivisible: str | None = None
        # Of each part the gates, the edges and gradients that W starts with, and the weights.
        self._parts: list[tuple[list[GradientEdge], list[Any], list[Tensor]]] = []
        self._freed: list[Node] = []
        if not inputs:
            return
        nodes, graph = _walk(outputs)
        if whole_only := {kind.__name__ for kind, _ in graph} & INDIVISIBLE:
            name = min(whole_only).removesuffix("Backward")
            self.indivisible = f"{name} is differentiated as a whole"
        else:
            self._cut([*nodes], nodes, graph)

    def _cut(self, nodes: Sequence[Any], numbers: Mapping[Node, int], graph: Graph) -> None:
        starts = tuple((numbers[edge.node], edge.output_nr) for edge in self.outputs)
        ends = [numbers.get(get_gradient_edge(x).node) for x in self.inputs]
        inputs = frozenset(end for end in ends if end is not None)  # one may reach no output
        cut = cut_of(graph, starts, inputs, frozenset())
        foreign = {n for n in cut.forks if not all(isinstance(x, Saved) for x in _saved(nodes[n]))}
        if foreign:
            cut = cut_of(graph, starts, inputs, frozenset(foreign))
        self.together = {nodes[n].variable: why for n, why in cut.together.items()}
        for part in cut.parts:
            gates = [GradientEdge(nodes[n], number) for n, number in part.gates]
            started = [(self.outputs[k], self.gradients[k]) for k in part.starts]
            self._parts.append((gates, started, [nodes[n].variable for n in part.weights]))
        self._freed = [nodes[n] for n in cut.freed]

    def input_grad(self) -> list[Tensor | None]:
        """The gradients of the inputs, in order; None for an input without one."""
        if not self.inputs:
            return []
        if self._parts:
            gradients = self._down_the_trunk()
        else:
            gradients = whole_backward(self.outputs, self.gradients, self.inputs)
            self.inputs = []  # nothing is left to do
        self.outputs, self.gradients, self._freed = [], [], []
        return gradients

    def _down_the_trunk(self) -> list[Tensor | None]:
        together = list(self.together)
        gates = [gate for part, _, _ in self._parts for gate in part]
        wanted: list[Any] = [*self.inputs, *together, *gates]
        # W will walk the branches of the same graph, so it is kept.
        gradients = iter(walk(self.outputs, self.gradients, wanted, keep=True))
        of_inputs = [_laid_out(next(gradients), leaf) for leaf in self.inputs]
        for weight in together:
            gradient = next(gradients)
            if gradient is not None:  # not in place, as others may hold what it was
                weight.grad = gradient.clone() if weight.grad is None else weight.grad + gradient
        for part, starts, _ in self._parts:
            arrived = [(gate, next(gradients)) for gate in part]
            starts += [(gate, grad) for gate, grad in arrived if grad is not None]
        # What the trunk saved is given back now: this is the memory that a split backward frees.
        for node in self._freed:
            for saved in _saved(node):
                if isinstance(saved, Saved):  # numbers and others' hooks have nothing to give back
                    saved.tensor = None
        return of_inputs

    def weight_grad(self) -> None:
        """Accumulate the weights' gradients that I left out; frees what was kept."""
        whole_backward(self.outputs, self.gradients, [])
        while self._parts:
            _, starts, weights = self._parts.pop()
            if starts:
                operations, gradients = zip(*starts, strict=True)
                walk(operations, gradients, weights)
        self.outputs, self.gradients = [], []

    def kept(self) -> Iterator[Tensor]:
        """Memory kept until W beside `remaining`: gradients, and inputs that the graph holds."""
        yield from self.gradients
        for _, starts, _ in self._parts:
            yield from (gradient for _, gradient in starts)
        if self._parts:
            yield from self.inputs


def _laid_out(gradient: Tensor | None, leaf: Tensor) -> Tensor | None:
    """The gradient in memory as a full backward leaves it, or other kernels would take it on."""
    if gradient is None or gradient.layout is not torch.strided:
        return gradient
    like = torch.empty_like(leaf)
    same = gradient.stride() == like.stride()
    return gradient if same else like.copy_(gradient)


def _walk(outputs: Sequence[GradientEdge]) -> tuple[dict[Node, int], Graph]:
    """All operations that gradients reach from the outputs, numbered, and their graph."""
    nodes = list(dict.fromkeys(edge.node for edge in outputs))
    numbers = {node: number for number, node in enumerate(nodes)}
    graph = []
    for node in nodes:  # of which there are more and more
        below: list[Edge | None] = []
        for other, output in node.next_functions:
            if other is not None and other not in numbers:
                numbers[other] = len(nodes)
                nodes.append(other)
            below.append(None if other is None else (numbers[other], output))
        graph.append((type(node), tuple(below)))
    return numbers, tuple(graph)


@lru_cache(256)
def cut_of(
    graph: Graph, outputs: tuple[Edge, ...], inputs: frozenset[int], foreign: frozenset[int]
) -> _Cut:
    """Find the forks, and group them by their weights.

    foreign  operations that saved by other hooks than ours
    """
    above: Above = [[] for _ in graph]
    for node, number in outputs:
        above[node].append((None, number))
    for node, (_, below) in enumerate(graph):
        for edge in filter(None, below):
            above[edge[0]].append((node, edge[1]))
    trunk = inputs | _leading_to(inputs, above)
    weights = [n for n, (_, below) in enumerate(graph) if not below and n not in inputs]
    cut, needed = _Cut([], set(), {}, []), set[int]()
    for group in _groups(weights, above, trunk):
        if why := _once(group, graph, above, foreign):
            cut.together.update(dict.fromkeys(group.weights, why))
            continue
        gates = []
        for fork in sorted(group.forks & trunk):
            entered = {n for node, n in above[fork] if node is None or node in trunk}
            gates += [(fork, number) for number in sorted(entered)]
        # Off the trunk W starts with an output's own gradient: what I could leave there would have
        # been through the output's hooks, which run in W, too.
        starts = [k for k, (node, _) in enumerate(outputs) if node in group.forks - trunk]
        cut.parts.append(_Part(group.weights, gates, starts))
        cut.forks.update(group.forks)
        needed |= group.forks | group.operations
    cut.freed.extend(n for n in range(len(graph)) if n not in needed)
    return cut


def _once(group: _Group, graph: Graph, above: Above, foreign: frozenset[int]) -> str | None:
    """Why all of the group's gradients have to be computed in one go, or None."""
    for fork in sorted(group.forks):
        kind, _ = graph[fork]
        name = kind.__name__.removesuffix("0").removesuffix("Backward")
        if issubclass(kind, BackwardCFunction) or name in AT_ONCE:
            return f"{name} computes all its gradients at once"
        if fork in foreign:
            return "it is recomputed, or saved by its own hooks"
    # A walk of W that starts at the upper fork would come to the lower one along the trunk, and
    # count its part twice.
    if len(group.forks) > 1 and group.forks & _leading_to(group.forks, above):
        return "it is used several times in a chain"
    return None


def _leading_to(nodes: Iterable[int], above: Above) -> set[int]:
    """The operations through which gradients come to any of these."""
    reached: set[int] = set()
    stack = list(nodes)
    while stack:
        for node, _ in above[stack.pop()]:
            if node is not None and node not in reached:
                reached.add(node)
                stack.append(node)
    return reached


def _groups(weights: Iterable[int], above: Above, trunk: Set[int]) -> list[_Group]:
    """Forks with a weight in common, directly or through others, together."""
    owner: dict[int, _Group] = {}
    for weight in weights:
        group = _branch(weight, above, trunk)
        # Groups that this weight's forks belong to grow together through it.
        for other in {owner[fork] for fork in group.forks if fork in owner}:
            group.forks |= other.forks
            group.weights += other.weights
            group.operations |= other.operations
        owner.update(dict.fromkeys(group.forks, group))
    return list(dict.fromkeys(owner.values()))


def _branch(weight: int, above: Above, trunk: Set[int]) -> _Group:
    """Where gradients leave the trunk for a weight, or start for it alone; and its branch."""
    group = _Group(set(), [weight], {weight})
    stack = [weight]
    while stack:
        node = stack.pop()
        for other, _ in above[node]:
            if other is None or other in trunk:
                group.forks.add(node if other is None else other)
            elif other not in group.operations:
                group.operations.add(other)
                stack.append(other)
    return group


def _saved(node: Node) -> Iterator[Any]:
    """A value that an operation saved: a `Saved`, or what other hooks made of it."""
    for name in _names_of_saved(type(node)):
        value = getattr(node, name)
        for tensor in value if isinstance(value, tuple | list) else (value,):
            data = tensor.data
            if data is not None and not isinstance(data, Tensor):
                yield data


@cache
def _names_of_saved(operation: type) -> list[str]:
    return [name for name in dir(operation) if name.startswith("_raw_saved_")]
