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
trunk gives back what it saved, but for its forks.

Forks with a weight in common are one group: one walk of W starts from all of them. That is right
only where none of them leads to another; else the walk would go down the trunk again. The weights
of such a group are computed by I, as are those of a fork that may run only once: a custom Function,
whose backward gives all its gradients at once, and operations whose saved tensors have hooks of
their own, as under torch.utils.checkpoint, which would compute its layers again.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

Below = dict[Node, list[tuple[Node, int]]]  # operation -> where it hands gradients to

# Their backwards start one of their own, or refuse to run for some gradients only.
INDIVISIBLE = {"CheckpointFunctionBackward", "CompiledFunctionBackward"}


class Saved:
    """What autograd saved of a tensor for the backward.

    last  whether it is given back when it is used next
    """

    __slots__ = ("last", "tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        # The tensor itself would keep its graph alive.
        self.tensor: Tensor | None = tensor.detach()
        self.version = tensor._version
        self.last = False

    def unpack(self) -> Tensor:
        tensor = self.tensor
        assert tensor is not None, "given back before its last use"
        if tensor._version != self.version:
            raise RuntimeError(
                "a tensor saved for the backward was changed in place after the forward"
            )
        if self.last:
            self.tensor = None
        return tensor


@dataclass(eq=False)
class _Group:
    """Forks with weights in common, where gradients enter them, and what I left there for W.

    weights  by the ends of their branches (AccumulateGrad)
    """

    forks: list[Node]
    weights: set[Any]
    gates: list[GradientEdge] = field(default_factory=list)
    arrived: list[Tensor | None] = field(default_factory=list)


def whole(
    outputs: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Iterable[Tensor]
) -> list[Tensor | None]:
    """A full backward: accumulates the weights' gradients and returns those of the inputs."""
    if outputs:
        torch.autograd.backward(outputs, gradients)
    found = []
    for leaf in inputs:
        found.append(leaf.grad)
        leaf.grad = None
    return found


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
        self._below = _operations(edge.node for edge in outputs)
        self._kept = list(self._below)  # operations that W needs
        whole_only = {type(node).__name__ for node in self._below} & INDIVISIBLE
        if inputs and whole_only:
            name = min(whole_only).removesuffix("Backward")
            self.indivisible = f"{name} is differentiated as a whole"
        elif inputs:
            self._cut()

    def _cut(self) -> None:
        """Find the forks, and group them by their weights."""
        leaves = {get_gradient_edge(leaf).node for leaf in self.inputs}
        trunk, weights_of = _trunk_and_branches(self._below, leaves)
        entered: dict[Node, set[int]] = {}  # operation -> which of its outputs get a gradient
        for edge in self.outputs:
            entered.setdefault(edge.node, set()).add(edge.output_nr)
        first = set(entered)  # an output may depend on weights alone
        for node in trunk:
            for other, place in self._below[node]:
                entered.setdefault(other, set()).add(place)
        forks = [node for node in self._below if node in trunk or node in first]
        late: set[Node] = set()  # forks of W, and its weights
        for group in _grouped({fork: weights_of[fork] for fork in forks if weights_of[fork]}):
            if why := self._once(group):
                self.together.update((weight.variable, why) for weight in group.weights)
                continue
            for fork in group.forks:
                group.gates += [GradientEdge(fork, place) for place in sorted(entered[fork])]
            late |= {*group.forks, *group.weights}
            self._groups.append(group)
        self._kept = [
            node
            for node in self._below
            if node in late or (node not in trunk and weights_of[node] & late)
        ]

    def _once(self, group: _Group) -> str | None:
        """Why all of the group's gradients have to be computed in one go, or None."""
        for fork in group.forks:
            if isinstance(fork, BackwardCFunction):
                name = type(fork).__name__.removesuffix("Backward")
                return f"the custom function {name} gives all its gradients at once"
            if not all(isinstance(saved, Saved) for saved in _saved(fork)):
                return "it is recomputed, or saved by hooks of its own"
        if _one_leads_to_another(group.forks, self._below):
            return "it is used more than once, in turn"
        return None

    def input_grad(self) -> list[Tensor | None]:
        """The gradients of the inputs, in their order; None for one that has none."""
        if not self.inputs:
            return []
        if self._groups:
            found = self._down_the_trunk()
        else:
            found = whole(self.outputs, self.gradients, self.inputs)
            self._kept = []
        self.outputs, self.gradients, self._below = [], [], {}
        return found

    def _down_the_trunk(self) -> list[Tensor | None]:
        once = []
        for node in self._below.keys() - set(self._kept):
            for saved in _saved(node):
                if isinstance(saved, Saved):
                    once.append(saved)
                    # A custom Function may look at what it saved as often as it likes.
                    saved.last = not isinstance(node, BackwardCFunction)
        together = list(self.together)
        gates = [gate for group in self._groups for gate in group.gates]
        wanted: list[Any] = [*self.inputs, *together, *gates]
        found = iter(
            torch.autograd.grad(
                self.outputs, wanted, self.gradients, retain_graph=True, allow_unused=True
            )
        )
        of_inputs: list[Tensor | None] = [next(found) for _ in self.inputs]
        for weight in together:
            gradient = next(found)
            if gradient is not None:  # not in place, as others may hold what it was
                weight.grad = gradient.clone() if weight.grad is None else weight.grad + gradient
        for group in self._groups:
            group.arrived = [next(found) for _ in group.gates]
        for saved in once:
            saved.tensor = None  # no gradient may have come there
        return of_inputs

    def weight_grad(self) -> None:
        """Accumulate the gradients of the weights that I left out; gives back what was kept."""
        whole(self.outputs, self.gradients, [])
        while self._groups:
            group = self._groups.pop()
            pairs = zip(group.gates, group.arrived, strict=True)
            starts = [(gate, gradient) for gate, gradient in pairs if gradient is not None]
            if starts:
                gates, arrived = zip(*starts, strict=True)
                weights = [node.variable for node in group.weights]
                torch.autograd.backward(gates, arrived, inputs=weights)
        self.outputs, self.gradients, self._kept = [], [], []

    def kept(self) -> Iterator[Tensor]:
        """What is kept until W: saved tensors, gradients, and inputs that the graph holds."""
        yield from self.gradients
        for group in self._groups:
            yield from (gradient for gradient in group.arrived if gradient is not None)
        for node in self._kept:
            for saved in _saved(node):
                if isinstance(saved, Saved) and saved.tensor is not None:
                    yield saved.tensor
        if self._groups:
            yield from self.inputs


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The memory of tensors, {address: bytes}, each once."""
    blocks = (tensor.untyped_storage() for tensor in tensors)
    return {block.data_ptr(): block.nbytes() for block in blocks}


def _operations(roots: Iterable[Node]) -> Below:
    """All operations that gradients reach from the roots; each stands behind those below it."""
    below: Below = {}
    order: list[Node] = []
    stack = [(node, False) for node in roots]
    while stack:
        node, left = stack.pop()
        if left:
            order.append(node)
        elif node not in below:
            below[node] = [(n, place) for n, place in node.next_functions if n is not None]
            stack.append((node, True))
            stack.extend((other, False) for other, _ in below[node])
    return {node: below[node] for node in order}


def _trunk_and_branches(
    below: Below, leaves: set[Node]
) -> tuple[set[Node], dict[Node, frozenset[Node]]]:
    """The operations that lead to a leaf of `leaves`; and the weights of each operation's branches.

    For an operation of the trunk those that branch off there.
    """
    trunk: set[Node] = set()
    weights: dict[Node, frozenset[Node]] = {}
    for node, others in below.items():
        if node in leaves or any(other in trunk for other, _ in others):
            trunk.add(node)
        elif not others:
            weights[node] = frozenset([node])
            continue
        branches = (weights[other] for other, _ in others if other not in trunk)
        weights[node] = frozenset[Node]().union(*branches)
    return trunk, weights


def _grouped(forks: dict[Node, frozenset[Node]]) -> list[_Group]:
    """Forks with a weight in common, directly or through others, together."""
    owner: dict[Node, _Group] = {}
    for fork, weights in forks.items():
        group = _Group([fork], set(weights))
        for other in {owner[weight] for weight in weights if weight in owner}:
            group.forks += other.forks
            group.weights |= other.weights
        owner.update(dict.fromkeys(group.weights, group))
    return list(dict.fromkeys(owner.values()))


def _one_leads_to_another(forks: list[Node], below: Below) -> bool:
    if len(forks) == 1:
        return False
    for fork in forks:
        found = _operations(other for other, _ in below[fork])
        if not found.keys().isdisjoint(forks):
            return True
    return False


def _saved(node: Node) -> Iterator[Any]:
    """What an operation saved: a `Saved`, or what other hooks made of it; numbers have no hooks."""
    for name in _names_of_saved(type(node)):
        value = getattr(node, name)
        for tensor in value if isinstance(value, tuple | list) else (value,):
            if tensor.data is not None and not isinstance(tensor.data, Tensor):
                yield tensor.data


@cache
def _names_of_saved(operation: type) -> list[str]:
    return [name for name in dir(operation) if name.startswith("_raw_saved_")]
