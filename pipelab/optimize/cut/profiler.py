"""Measures what each layer of a torch model costs."""

import copy
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import chain as joined
from statistics import median
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from pipelab.optimize.cut.profiles import Layer, Profile
from pipelab.runtime.torch.ledger import Saved, TorchLedger, remaining, storages
from pipelab.runtime.torch.split_backward import Halves


def profile(
    layers: Sequence[nn.Module],
    sample: Any,
    *,
    loss: Callable[[Any, Any], Any] | None = None,
    target: Any = None,
    repeats: int = 10,
    warm_up: int = 3,
) -> Profile:
    """Times and bytes of a chain of layers for one micro-batch, `sample`, the first one's input.

    A `loss`, (output, target) -> a mean or a pair with one, counts as part of the last layer: the
    last stage computes it.

    Each layer runs alone, forward and backward, `warm_up` times unmeasured and then `repeats`
    times; times are medians, on the sample's device, with the layers as they are (with dropout, if
    they train). An input gradient is measured alone; a weight gradient is the rest of the full
    backward. Activations are the input and what autograd saves other than parameters;
    `weight_activations` are what a split backward keeps of them from I to W, with the gradients
    that I leaves. The layers (copies run) and the random generator do not change. ValueError for a
    sample that is not a micro-batch.

    >>> found = profile([nn.Linear(3, 4), nn.ReLU()], torch.ones(2, 3), repeats=1)
    >>> [(layer.kind, layer.weights, layer.output) for layer in found.layers]
    [('Linear', 64.0, 32.0), ('ReLU', 0.0, 32.0)]
    """
    tensors = _tensors(sample)
    if not tensors or not tensors[0].ndim:
        raise ValueError(f"sample={sample!r}: give a tensor whose first dimension counts samples")
    device = tensors[0].device
    found, x = [], sample
    for number, layer in enumerate(layers):
        # Running statistics are those of a copy: the caller's layer learns nothing of this.
        own = copy.deepcopy(layer)
        last = number == len(layers) - 1
        call = partial(_loss_of, own, loss, target) if loss and last else own
        # Layers are measured alone: none sees the graph of the one before.
        x = pytree.tree_map_only(Tensor, Tensor.detach, x)
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            y, costs = _measure(own, call, x, device, repeats, warm_up)
        found.append(Layer(f"{number}: {type(layer).__name__}", kind=type(layer).__name__, **costs))
        x = y
    machine = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    return Profile(tuple(found), samples=len(tensors[0]), machine=machine or platform.machine())


def _loss_of(layer: nn.Module, loss: Callable, target: Any, x: Any) -> Any:
    value = loss(layer(x), target)
    return value[0] if isinstance(value, tuple) else value


def _measure(
    layer: nn.Module, call: Callable, x: Any, device: torch.device, repeats: int, warm_up: int
) -> tuple[Any, dict[str, float]]:
    """The value of a call of the layer, and the numbers of a `Layer`."""
    weights = [p for p in layer.parameters() if p.requires_grad]

    def backward(outputs: list[Tensor], wanted: list[Tensor]) -> None:
        if outputs and wanted:
            ones = [torch.ones_like(t) for t in outputs]
            # The graph is kept: two backwards are timed on it.
            torch.autograd.grad(outputs, wanted, ones, retain_graph=True, allow_unused=True)

    times = []
    with torch.enable_grad():
        # [1] once, to see what is saved
        y, kept = _kept(layer, call, x, device)
        # [2] by the clock: forward, input gradient, full backward
        for _ in range(warm_up + repeats):
            fresh, inputs = _entering(x)
            seconds, out = _timed(device, call, fresh)
            outputs = [t for t in _tensors(out) if t.requires_grad]
            back = (_timed(device, backward, outputs, w)[0] for w in (inputs, [*inputs, *weights]))
            # One after another, so that all three meet the same disturbances; medians forget most
            # of them.
            times.append((seconds, *back))
    forward, input_grad, whole = map(median, zip(*times[warm_up:], strict=True))
    return y, {
        "forward": forward,
        # By the clock a part may take longer than the whole.
        "input_grad": min(input_grad, whole),
        "weight_grad": max(whole - input_grad, 0.0) if weights else 0.0,
        "weights": float(sum(p.nbytes for p in layer.parameters())),
        **kept,
        "output": float(sum(t.nbytes for t in _tensors(y))),
    }


def _kept(
    layer: nn.Module, call: Callable, x: Any, device: torch.device
) -> tuple[Any, dict[str, float]]:
    """The value of a call, and the bytes kept to a backward, and of a split one from I to W."""
    own = storages(joined(layer.parameters(), layer.buffers()))
    packed: list[ref[Saved]] = []

    def size(tensors: Iterable[Tensor]) -> float:
        return float(sum(n for block, n in storages(tensors).items() if block not in own))

    with TorchLedger().watch("", packed):
        fresh, inputs = _entering(x)
        y = call(fresh)
    activations = size([*remaining(packed), *_tensors(fresh)])
    edges = [get_gradient_edge(t) for t in _tensors(y) if t.requires_grad]
    ones = [torch.ones_like(t) for t in _tensors(y) if t.requires_grad]
    y = pytree.tree_map_only(Tensor, Tensor.detach, y)  # else it would keep the whole graph
    # As a stage of a run does it, so that what is counted is what it would keep.
    halves = Halves(edges, ones, inputs)
    halves.input_grad()
    edges.clear()
    weight_activations = size([*halves.kept(), *remaining(packed)])
    halves.weight_grad()
    return y, {"activations": activations, "weight_activations": weight_activations}


def _timed(device: torch.device, work: Callable, *arguments: Any) -> tuple[float, Any]:
    _wait(device)
    began = time.perf_counter()
    result = work(*arguments)
    _wait(device)
    return time.perf_counter() - began, result


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _entering(x: Any) -> tuple[Any, list[Tensor]]:
    """The input as a layer gets it, which may change it in place, and what wants a gradient."""
    leaves: list[Tensor] = []

    def enter(tensor: Tensor) -> Tensor:
        own = tensor.detach().clone()
        if not (own.is_floating_point() or own.is_complex()):
            return own
        leaves.append(own.requires_grad_())
        return torch.ops.aten._unsafe_view(own, own.shape)  # no leaf, and no view

    return pytree.tree_map_only(Tensor, enter, x), leaves
