"""A stage of a torch model: what a worker's five kinds of action do to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from pipelab.executors.torch_device import CpuDevice

Loss = Callable[[Any, Any], Any]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], Any]  # an optimizer, or a tuple of one and its LR schedulers


class TorchStage:
    """One stage: a module, its weight versions, and what its forwards left for their backwards.

    module      the stage's layers; trained in place
    device      the device runtime, which counts the activations that are kept
    versions    (total,) the weight version that each micro-batch reads
    groups      the update group of each micro-batch
    samples     (total,) how many samples each micro-batch has
    inputs      per micro-batch, on stage 0: the data. None elsewhere
    targets     per micro-batch, on the last stage. None elsewhere
    loss        (output, target) -> mean, or (mean, how many it is the mean of); by default the samples are counted
    recompute   (total,) whether the forward runs again before its backward
    keep        whether to keep gradients and weights of every update, for the check and for dumps
    clip        largest norm of a step's gradient: over all stages if `shared_clip`, else over this one

    Weight versions are values: an update copies the latest version only if the table still has readers of it, else it
    steps in place. A micro-batch's gradient is weighted by what its loss counted: the count travels with the gradient.
    """

    def __init__(
        self, module: nn.Module, device: CpuDevice, versions: np.ndarray, groups: np.ndarray, samples: Sequence[int], *,
        inputs: Sequence[Any] | None, targets: Sequence[Any] | None, loss: Loss, optimizer: OptimizerFactory,
        recompute: np.ndarray, keep: bool, clip: float | None = None, shared_clip: bool = True,
    ) -> None:  # fmt: skip
        self.module, self.inputs, self.targets, self.loss = module, inputs, targets, loss
        self.version_of, self.group_of, self.samples = versions.tolist(), groups.tolist(), samples
        self.recompute, self.keep = recompute, keep
        self._slots = {name: (module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
                       for name, _ in module.named_parameters()}  # fmt: skip
        self.weights: dict[int, dict[str, nn.Parameter]] = {0: dict(module.named_parameters())}
        self.readers = Counter(self.version_of)
        # Handles stand for the weights in the optimizer: its state stays with them while versions come and go. They are
        # made from .data, since a detached tensor shares the weight's version counter: a step would look like a change.
        self._handles = {name: nn.Parameter(p.data, p.requires_grad) for name, p in self.weights[0].items()}
        trained = [h for h in self._handles.values() if h.requires_grad]
        made = optimizer(trained) if trained else None
        self.optimizer, *self.schedulers = made if isinstance(made, tuple) else (made,)
        self.clip, self.shares_news = clip, clip is not None and shared_clip
        self._left = Counter(self.group_of)  # update group -> backwards to come
        self._kept: dict[int, tuple[Any, Any, float]] = {}  # micro-batch -> input leaves, output edges, count
        self._split: dict[int, tuple[list, list, float]] = {}  # micro-batch -> edges, gradients, count, between I and W
        self._counts: dict[int, float] = {}  # update group -> what its micro-batches' losses counted
        self.losses: dict[int, tuple[Tensor, float]] = {}
        self.steps: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []  # gradients and weights of each update
        self._stepped: dict[str, Tensor] = {}  # the gradients of an update that `steps` does not have yet
        self._ledger = device.ledger
        self._note_constants()

    @property
    def versions_held(self) -> int:
        """Weight versions kept, by unique storages of a weight."""
        first = next(iter(self._handles), None)
        return len({w[first].untyped_storage().data_ptr() for w in self.weights.values()}) if first else 1

    # ---- the five kinds of action

    def forward(self, microbatch: int, given: Any) -> Any:
        """The stage's output, or None on the last stage, which computes the loss."""
        x = given if self.inputs is None else self.inputs[microbatch]
        if not self.recompute[microbatch]:
            output, self._kept[microbatch] = self._compute(microbatch, x)
            return output
        self._bind(microbatch)
        self._ledger.hold((id(self), microbatch), pytree.tree_leaves(x))
        self._kept[microbatch] = (x, None, 0)
        with torch.no_grad():  # on a copy: a layer that works in place must not change what the second forward starts from
            return self._apply(microbatch, pytree.tree_map_only(Tensor, Tensor.clone, x))[0]

    def backward(self, microbatch: int, given: Any) -> Any:
        """Accumulate the weights' gradients; returns the input's."""
        edges, gradients, leaves, count = self._prepare(microbatch, given)
        if edges:
            torch.autograd.backward(edges, gradients)
        self._finish(microbatch, count)
        return count, [leaf.grad if leaf is not None else None for leaf in leaves]

    def input_grad(self, microbatch: int, given: Any) -> Any:
        """The input's gradient alone; the graph stays for `weight_grad`."""
        edges, gradients, leaves, count = self._prepare(microbatch, given)
        wanted = [leaf for leaf in leaves if leaf is not None]
        found = iter(
            torch.autograd.grad(edges, wanted, gradients, retain_graph=True, allow_unused=True) if edges and wanted else ()
        )
        self._split[microbatch] = (edges, gradients, count)
        return count, [next(found, None) if leaf is not None else None for leaf in leaves]

    def weight_grad(self, microbatch: int, given: Any = None) -> None:
        """Accumulate the weights' gradients, which `input_grad` left out."""
        edges, gradients, count = self._split.pop(microbatch)
        weights = [p for p in self.weights[self.version_of[microbatch]].values() if p.requires_grad]
        if edges and weights:
            torch.autograd.backward(edges, gradients, inputs=weights)
        self._finish(microbatch, count)

    def update(self, number: int, given: Any = None) -> None:
        """Make version number + 1 from the latest one, with the group's gradient summed over the versions it read.

        `given` is every stage's news of the group, where stages share any: their gradients' squared norms.
        """
        latest = self.weights[number]
        count = self._counts.pop(number) or 1.0
        if self.clip is not None:
            squares = given if self.shares_news else [self._square()]
            count /= min(1.0, self.clip / (sum(squares) ** 0.5 / count + 1e-6))  # as torch.nn.utils.clip_grad_norm_
        for name, handle in self._handles.items():
            handle.data = latest[name].data
            found = [p.grad for p in (w[name] for w in self.weights.values()) if p.grad is not None]
            handle.grad = torch.stack(found).sum(0).div_(count) if len(found) > 1 else found[0].div_(count) if found else None
            for w in self.weights.values():
                w[name].grad = None
        if self.keep:  # before the step: some optimizers use the gradient's memory for their own
            self._stepped = {n: torch.zeros_like(h) if h.grad is None else h.grad.clone() for n, h in self._handles.items()}
        if self.readers[number]:
            for handle in self._handles.values():
                handle.data = handle.data.clone()
            self.weights[number + 1] = {n: nn.Parameter(h.data, h.requires_grad) for n, h in self._handles.items()}
            self._note_constants()
        else:
            self.weights[number + 1] = self.weights.pop(number)
        if self.optimizer is not None:
            self.optimizer.step()
            for scheduler in self.schedulers:
                scheduler.step()

    # ---- what is asked of it between actions and afterwards

    def snapshot(self) -> None:
        """Keep the last update's gradients and weights; not part of the update, so that its time is its own."""
        if self._stepped:
            latest = self.weights[max(self.weights)]
            self.steps.append((_to_host(self._stepped.items()), _to_host(latest.items())))
            self._stepped = {}

    def news(self, microbatch: int) -> float | None:
        """What other stages need before they update: after the last backward of a group, the squared norm of its gradient."""
        return self._square() if self.shares_news and not self._left[self.group_of[microbatch]] else None

    def trained(self) -> dict[str, Tensor]:
        """The module's state with its latest weights, on the CPU."""
        latest = self.weights[max(self.weights)]
        return _to_host((name, latest.get(name, value)) for name, value in self.module.state_dict().items())

    # ---- pieces of the actions

    def _bind(self, microbatch: int) -> None:
        """Put the version that the micro-batch reads into the module; for a backward too, since recomputation reads it."""
        for name, parameter in self.weights[self.version_of[microbatch]].items():
            owner, attribute = self._slots[name]
            owner._parameters[attribute] = parameter

    def _apply(self, microbatch: int, x: Any) -> tuple[Any, Any, float]:
        """Run the module, and the loss behind the last stage: (what is sent on, what a backward starts from, count)."""
        y = self.module(x)
        if self.targets is None:
            return pytree.tree_map_only(Tensor, Tensor.detach, y), y, 0
        value = self.loss(y, self.targets[microbatch])
        mean, count = value if isinstance(value, tuple) else (value, self.samples[microbatch])
        self.losses[microbatch] = (mean.detach(), float(count))
        return None, mean, float(count)

    def _compute(self, microbatch: int, x: Any) -> tuple[Any, tuple]:
        """A forward with its graph: what is sent on, and what a backward needs (input leaves, output edges, count)."""
        self._bind(microbatch)
        leaves, spec = pytree.tree_flatten(x)
        if self.inputs is None:
            leaves = [t.detach().requires_grad_() if _differentiable(t) else t for t in leaves]
        wanted = [t if isinstance(t, Tensor) and t.requires_grad and self.inputs is None else None for t in leaves]
        entered = [_Entry.apply(t) if w is not None else t for t, w in zip(leaves, wanted, strict=True)]
        key = (id(self), microbatch)
        self._ledger.hold(key, wanted)
        with self._ledger.watch(key):
            output, ends, count = self._apply(microbatch, pytree.tree_unflatten(entered, spec))
        # The edge of an output, not the output: what was sent on need not be kept.
        edges = [get_gradient_edge(t) if isinstance(t, Tensor) and t.requires_grad else None for t in pytree.tree_leaves(ends)]
        return output, (wanted, (edges, ends.detach() if self.targets is not None else None), count)

    def _prepare(self, microbatch: int, given: Any) -> tuple[list, list, list, float]:
        """What autograd starts from: edges and their gradients, the input leaves, and the count."""
        leaves, ends, count = self._kept.pop(microbatch)
        if self.recompute[microbatch]:
            self._ledger.drop((id(self), microbatch))
            _, (leaves, ends, count) = self._compute(microbatch, leaves)
        edges, mean = ends
        if self.targets is None:
            count, gradients = given
        else:  # a micro-batch that counts nothing (all its tokens masked) has no gradient, whatever its mean is
            gradients = [torch.full_like(mean, count) if count else None]
        pairs = [(e, g) for e, g in zip(edges, gradients, strict=True) if e is not None and g is not None]
        return [e for e, _ in pairs], [g for _, g in pairs], leaves, count

    def _finish(self, microbatch: int, count: float) -> None:
        """The micro-batch is through: free its activations, and its weight version if nobody reads that again."""
        self._ledger.drop((id(self), microbatch))
        group = self.group_of[microbatch]
        self._counts[group] = self._counts.get(group, 0.0) + count
        self._left[group] -= 1
        version = self.version_of[microbatch]
        self.readers[version] -= 1
        if not self.readers[version] and version != max(self.weights):
            old = self.weights.pop(version)
            latest = self.weights[max(self.weights)]
            for name, p in old.items():  # its gradient belongs to the group that is being accumulated
                if p.grad is not None:
                    sofar = latest[name].grad
                    latest[name].grad = p.grad if sofar is None else sofar + p.grad
            self._note_constants()

    def _square(self) -> float:
        gradients = [p.grad for w in self.weights.values() for p in w.values() if p.grad is not None]
        return float(sum(g.double().square().sum() for g in gradients)) if gradients else 0.0

    def _note_constants(self) -> None:
        """Weights and buffers are no activations, whoever saves them."""
        weights = (p for version in self.weights.values() for p in version.values())
        self._ledger.ignore(id(self), (*weights, *self.module.buffers()))


class _Entry(torch.autograd.Function):
    """The input as no leaf and no view, so that a first layer may work in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _to_host(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: t.detach().to("cpu", copy=True) for name, t in named}
