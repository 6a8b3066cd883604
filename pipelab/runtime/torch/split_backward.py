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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from pipelab.runtime.torch.device import walk, whole_backward
from pipelab.runtime.torch.ledger import Saved

# operation -> what hands it gradients, and as which of its outputs'; None: where a backward starts
Above = dict[Node, list[tuple[Node | None, int]]]

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
    """Forks with weights in common, where gradients enter them, and with which W starts.

    weights     by the ends of their branches (AccumulateGrad)
    operations  of the branches
    gates       where I leaves gradients
    """

    forks: set[Node]
    weights: list[Any]
    operations: set[Node]
    gates: list[GradientEdge] = field(default_factory=list)
    starts: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)


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
        self._groups: list[_Group] = []
        self._above, leaves = _operations(outputs)
        whole_only = {kind.__name__ for kind in set(map(type, self._above))} & INDIVISIBLE
        if inputs and whole_only:
            name = min(whole_only).removesuffix("Backward")
            self.indivisible = f"{name} is differentiated as a whole"
        elif inputs:
            self._cut(leaves)

    def _cut(self, leaves: Sequence[Any]) -> None:
        """Find the forks, and group them by their weights."""
        of_inputs = {id(leaf) for leaf in self.inputs}
        ends = {leaf for leaf in leaves if id(leaf.variable) in of_inputs}
        trunk = ends | _leading_to(ends, self._above)
        for group in _groups([leaf for leaf in leaves if leaf not in ends], self._above, trunk):
            if why := self._once(group):
                self.together.update((weight.variable, why) for weight in group.weights)
                continue
            for fork in group.forks & trunk:
                entered = {n for node, n in self._above[fork] if node is None or node in trunk}
                group.gates += [GradientEdge(fork, number) for number in sorted(entered)]
            # Off the trunk W starts with an output's own gradient: what I could leave there would
            # have been through the output's hooks, which run in W, too.
            for output, gradient in zip(self.outputs, self.gradients, strict=True):
                if output.node in group.forks - trunk:
                    group.starts.append((output, gradient))
            self._groups.append(group)

    def _once(self, group: _Group) -> str | None:
        """Why all of the group's gradients have to be computed in one go, or None."""
        for fork in group.forks:
            name = type(fork).__name__.removesuffix("0").removesuffix("Backward")
            if isinstance(fork, BackwardCFunction) or name in AT_ONCE:
                return f"{name} computes all its gradients at once"
            if not all(isinstance(saved, Saved) for saved in _saved(fork)):
                return "it is recomputed, or saved by its own hooks"
        # A walk of W that starts at the upper fork would come to the lower one along the trunk, and
        # count its part twice.
        if len(group.forks) > 1 and group.forks & _leading_to(group.forks, self._above):
            return "it is used several times in a chain"
        return None

    def input_grad(self) -> list[Tensor | None]:
        """The gradients of the inputs, in order; None for an input without one."""
        if not self.inputs:
            return []
        if self._groups:
            found = self._down_the_trunk()
        else:
            found = whole_backward(self.outputs, self.gradients, self.inputs)
            self.inputs = []  # nothing is left to do
        self.outputs, self.gradients, self._above = [], [], {}
        return found

    def _down_the_trunk(self) -> list[Tensor | None]:
        together = list(self.together)
        gates = [gate for group in self._groups for gate in group.gates]
        wanted: list[Any] = [*self.inputs, *together, *gates]
        found = iter(
            # W will walk the branches of the same graph, so it is kept.
            torch.autograd.grad(
                self.outputs, wanted, self.gradients, retain_graph=True, allow_unused=True
            )
        )
        of_inputs = [_laid_out(next(found), leaf) for leaf in self.inputs]
        for weight in together:
            gradient = next(found)
            if gradient is not None:  # not in place, as others may hold what it was
                weight.grad = gradient.clone() if weight.grad is None else weight.grad + gradient
        for group in self._groups:
            arrived = [(gate, next(found)) for gate in group.gates]
            group.starts += [(gate, grad) for gate, grad in arrived if grad is not None]
        # What the trunk saved is given back now: this is the memory that a split backward frees.
        needed = [group.forks | group.operations for group in self._groups]
        for node in self._above.keys() - set().union(*needed):
            for saved in _saved(node):
                if isinstance(saved, Saved):  # numbers and others' hooks have nothing to give back
                    saved.tensor = None
        return of_inputs

    def weight_grad(self) -> None:
        """Accumulate the weights' gradients that I left out; frees what was kept."""
        whole_backward(self.outputs, self.gradients, [])
        while self._groups:
            group = self._groups.pop()
            if group.starts:
                operations, gradients = zip(*group.starts, strict=True)
                weights = [node.variable for node in group.weights]
                walk(operations, gradients, weights)
        self.outputs, self.gradients = [], []

    def kept(self) -> Iterator[Tensor]:
        """Memory kept until W beside `remaining`: gradients, and inputs that the graph holds."""
        yield from self.gradients
        for group in self._groups:
            yield from (gradient for _, gradient in group.starts)
        if self._groups:
            yield from self.inputs


def _laid_out(gradient: Tensor | None, leaf: Tensor) -> Tensor | None:
    """The gradient in memory as a full backward leaves it, or other kernels would take it on."""
    if gradient is None or gradient.layout is not torch.strided:
        return gradient
    like = torch.empty_like(leaf)
    same = gradient.stride() == like.stride()
    return gradient if same else like.copy_(gradient)


def _operations(outputs: Sequence[GradientEdge]) -> tuple[Above, list[Any]]:
    """All operations that gradients reach from the outputs, and those of them that are leaves'."""
    above: Above = {edge.node: [] for edge in outputs}
    for edge in outputs:
        above[edge.node].append((None, edge.output_nr))
    reached, leaves = list(above), []
    for node in reached:
        below = node.next_functions
        if not below:
            leaves.append(node)
        for other, number in below:
            if other is None:
                continue
            if other not in above:
                above[other] = []
                reached.append(other)
            above[other].append((node, number))
    return above, leaves


def _leading_to(nodes: Iterable[Node], above: Above) -> set[Node]:
    """The operations through which gradients come to any of these."""
    found: set[Node] = set()
    stack = list(nodes)
    while stack:
        for node, _ in above.get(stack.pop(), ()):  # an input may reach no output
            if node is not None and node not in found:
                found.add(node)
                stack.append(node)
    return found


def _groups(weights: Iterable[Node], above: Above, trunk: set[Node]) -> list[_Group]:
    """Forks with a weight in common, directly or through others, together."""
    owner: dict[Node, _Group] = {}
    for weight in weights:
        group = _branch(weight, above, trunk)
        # Groups that this weight's forks belong to grow together through it.
        for other in {owner[fork] for fork in group.forks if fork in owner}:
            group.forks |= other.forks
            group.weights += other.weights
            group.operations |= other.operations
        owner.update(dict.fromkeys(group.forks, group))
    return list(dict.fromkeys(owner.values()))


def _branch(weight: Node, above: Above, trunk: set[Node]) -> _Group:
    """Where gradients leave the trunk for a weight, or start for it alone; and its branch."""
    group = _Group(set(), [weight], {weight})
    stack = [weight]
    while stack:
        node = stack.pop()
        for other, _ in above[node]:
            if other is None or other in trunk:
                group.forks.add(other or node)
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
