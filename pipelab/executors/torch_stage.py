"""A stage of a torch model, and the device that it runs on."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils import _pytree as pytree

Loss = Callable[[Any, Any], Any]
OptimizerFactory = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class TorchDevice:
    """A torch device with a clock; on CUDA with a stream of its own, so that several stages can share one GPU."""

    def __init__(self, name: str | torch.device) -> None:
        self.device = torch.device(name)
        self.cuda = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if self.cuda else None
        self._origin: tuple[Any, float] | None = None

    def begin(self, began: float) -> None:
        """Tie the device's clock to the run's time zero."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record(self.stream)
            event.synchronize()
            self._origin = (event, time.perf_counter() - began)
        else:
            self._origin = (None, began)

    def active(self) -> AbstractContextManager:
        return torch.cuda.stream(self.stream) if self.cuda else nullcontext()

    def now(self) -> Any:
        """A mark: seconds on a CPU, an event in the stream on CUDA, where the host runs ahead of the device."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def finish(self) -> None:
        if self.stream is not None:
            self.stream.synchronize()

    def seconds(self, marks: list[Any]) -> list[float]:
        """Marks as seconds since the run began."""
        event, offset = self._origin or (None, 0.0)
        if event is None:
            return [mark - offset for mark in marks]
        return [event.elapsed_time(mark) / 1e3 + offset for mark in marks]

    def give(self, payload: Any) -> Any:
        """Together with what was computed, the event after which it is there."""
        if not self.cuda:
            return payload, None
        event = torch.cuda.Event()
        event.record(self.stream)
        return payload, event

    def take(self, parcel: Any) -> Any:
        """The payload of another device's `give`, on this device."""
        payload, event = parcel
        if event is not None:
            self.stream.wait_event(event) if self.stream is not None else event.synchronize()

        def move(tensor: Tensor) -> Tensor:
            if self.stream is not None and tensor.is_cuda:
                tensor.record_stream(self.stream)  # the sender may free it before this stream has read it
            return tensor.to(self.device, non_blocking=self.cuda)

        return pytree.tree_map_only(Tensor, move, payload)


class TorchStage:
    """One stage: a module, its weight versions, and what its forwards left for their backwards.

    module      the stage's layers; trained in place
    versions    (total,) the weight version that each micro-batch reads
    groups      the update group of each micro-batch
    inputs      per micro-batch, on stage 0: the data. None elsewhere
    targets     per micro-batch, on the last stage. None elsewhere
    loss        (output, target) -> mean, or (mean, how many it is the mean of); by default the samples are counted
    recompute   (total,) whether the forward runs again before its backward
    keep        whether to keep gradients and weights of every update, for the check and for dumps

    Weight versions are values: an update copies the latest version only if the table still has readers of it, else it
    steps in place. A micro-batch's gradient is weighted by what its loss counted: the count travels with the gradient.
    """

    def __init__(
        self, module: nn.Module, versions: np.ndarray, groups: np.ndarray, *, inputs: Sequence[Any] | None,
        targets: Sequence[Any] | None, loss: Loss, optimizer: OptimizerFactory, recompute: np.ndarray, keep: bool,
    ) -> None:  # fmt: skip
        self.module, self.inputs, self.targets, self.loss = module, inputs, targets, loss
        self.version_of, self.group_of, self.recompute, self.keep = versions.tolist(), groups.tolist(), recompute, keep
        self._slots = {name: (module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
                       for name, _ in module.named_parameters()}  # fmt: skip
        self.weights: dict[int, dict[str, nn.Parameter]] = {0: dict(module.named_parameters())}
        self.readers = Counter(self.version_of)
        # Handles stand for the weights in the optimizer: its state stays with them while versions come and go.
        self._handles = {name: nn.Parameter(p.detach(), p.requires_grad) for name, p in self.weights[0].items()}
        trained = [h for h in self._handles.values() if h.requires_grad]
        self.optimizer = optimizer(trained) if trained else None
        self._kept: dict[int, tuple[list[Tensor], Any, int]] = {}  # micro-batch -> input leaves, output edges, count
        self._split: dict[int, tuple[Any, Any]] = {}  # micro-batch -> edges and gradients, between I and W
        self._counts: Counter[int] = Counter()  # update group -> what its micro-batches' losses counted
        self.losses: dict[int, tuple[Tensor, int]] = {}
        self.steps: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []  # gradients and weights of each update
        self._ledger = _Ledger()
        self._note_constants()
        self.most = 0

    @property
    def held(self) -> int:
        return self._ledger.held

    # ---- the five kinds of action

    def forward(self, microbatch: int, given: Any) -> Any:
        """The stage's output, or None on the last stage, which computes the loss."""
        self.most = 0
        x = given if self.inputs is None else self.inputs[microbatch]
        if not self.recompute[microbatch]:
            output, kept = self._compute(microbatch, x)
            self._kept[microbatch] = kept
            return output
        self._bind(microbatch)
        self._ledger.hold(microbatch, pytree.tree_leaves(x))
        self._kept[microbatch] = (x, None, 0)
        with torch.no_grad():
            return self._apply(microbatch, x)[0]

    def backward(self, microbatch: int, given: Any) -> Any:
        """Accumulate the weights' gradients; returns the input's."""
        edges, gradients, leaves, count = self._prepare(microbatch, given)
        if edges:
            torch.autograd.backward(edges, gradients)
        self._drop(microbatch, count)
        return count, [leaf.grad if leaf is not None else None for leaf in leaves]

    def input_grad(self, microbatch: int, given: Any) -> Any:
        """The input's gradient alone; the graph stays for `weight_grad`."""
        edges, gradients, leaves, count = self._prepare(microbatch, given)
        wanted = [leaf for leaf in leaves if leaf is not None]
        found = iter(
            torch.autograd.grad(edges, wanted, gradients, retain_graph=True, allow_unused=True) if edges and wanted else ()
        )
        self._split[microbatch] = (edges, (gradients, count))
        return count, [next(found, None) if leaf is not None else None for leaf in leaves]

    def weight_grad(self, microbatch: int, given: Any = None) -> None:
        self.most = 0
        edges, (gradients, count) = self._split.pop(microbatch)
        weights = [p for p in self.weights[self.version_of[microbatch]].values() if p.requires_grad]
        if edges and weights:
            torch.autograd.backward(edges, gradients, inputs=weights)
        self._drop(microbatch, count)

    def update(self, number: int, given: Any = None) -> None:
        """Make version number + 1 from the latest one, with the group's gradient summed over the versions it read."""
        self.most = 0
        latest = self.weights[number]
        count = self._counts.pop(number)
        for name, handle in self._handles.items():
            handle.data = latest[name].data
            found = [p.grad for p in (w[name] for w in self.weights.values()) if p.grad is not None]
            handle.grad = torch.stack(found).sum(0).div_(count) if len(found) > 1 else found[0].div_(count) if found else None
            for w in self.weights.values():
                w[name].grad = None
        if self.readers[number]:
            for handle in self._handles.values():
                handle.data = handle.data.clone()
            self.weights[number + 1] = {n: nn.Parameter(h.data, h.requires_grad) for n, h in self._handles.items()}
            self._note_constants()
        else:
            self.weights[number + 1] = self.weights.pop(number)
        if self.optimizer is not None:
            self.optimizer.step()
        if self.keep:
            zeros = ((n, h.grad if h.grad is not None else torch.zeros_like(h)) for n, h in self._handles.items())
            self.steps.append((_to_host(zeros), _to_host(self.weights[number + 1].items())))

    def trained(self) -> dict[str, Tensor]:
        """The module's state with its latest weights, on the CPU."""
        latest = self.weights[max(self.weights)]
        return _to_host((name, latest.get(name, value)) for name, value in self.module.state_dict().items())

    # ---- pieces of them

    def _bind(self, microbatch: int) -> None:
        """Put the version that the micro-batch reads into the module; for a backward too, since recomputation reads it."""
        for name, parameter in self.weights[self.version_of[microbatch]].items():
            owner, attribute = self._slots[name]
            owner._parameters[attribute] = parameter

    def _apply(self, microbatch: int, x: Any) -> tuple[Any, Any, int]:
        """Run the module, and the loss behind the last stage: (what is sent on, what a backward starts from, count)."""
        y = self.module(x)
        if self.targets is None:
            return pytree.tree_map_only(Tensor, Tensor.detach, y), y, 0
        mean, count = counted(self.loss(y, self.targets[microbatch]), self.targets[microbatch])
        self.losses[microbatch] = (mean.detach(), count)
        return None, mean, count

    def _compute(self, microbatch: int, x: Any) -> tuple[Any, tuple]:
        self._bind(microbatch)
        leaves, spec = pytree.tree_flatten(x)
        if self.inputs is None:
            leaves = [t.detach().requires_grad_() if _differentiable(t) else t for t in leaves]
        entered = [_Entry.apply(t) if isinstance(t, Tensor) and t.requires_grad else t for t in leaves]
        with self._ledger.watch(microbatch):
            output, ends, count = self._apply(microbatch, pytree.tree_unflatten(entered, spec))
        # The edge of an output, not the output: what was sent on need not be kept.
        edges = [get_gradient_edge(t) if isinstance(t, Tensor) and t.requires_grad else None for t in pytree.tree_leaves(ends)]
        wanted = [t if isinstance(t, Tensor) and t.requires_grad and self.inputs is None else None for t in leaves]
        return output, (wanted, (edges, ends.detach() if self.targets is not None else None), count)

    def _prepare(self, microbatch: int, given: Any) -> tuple[list, list, list, int]:
        self.most = 0
        leaves, ends, count = self._kept.pop(microbatch)
        if self.recompute[microbatch]:
            self._ledger.drop(microbatch)
            _, (leaves, ends, count) = self._compute(microbatch, leaves)
            self.most = self.held
        edges, mean = ends
        if self.targets is None:
            count, gradients = given
        else:
            gradients = [torch.full_like(mean, count)]
        pairs = [(e, g) for e, g in zip(edges, gradients, strict=True) if e is not None and g is not None]
        return [e for e, _ in pairs], [g for _, g in pairs], leaves, count

    def _drop(self, microbatch: int, count: int) -> None:
        self.most = max(self.most, self.held)
        self._ledger.drop(microbatch)
        self._counts[self.group_of[microbatch]] += count
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

    def _note_constants(self) -> None:
        """Weights and buffers are no activations, whoever saves them."""
        weights = (p for version in self.weights.values() for p in version.values())
        self._ledger.constants = {t.untyped_storage().data_ptr() for t in (*weights, *self.module.buffers())}


class _Entry(torch.autograd.Function):
    """The input as no leaf and no view, so that a first layer may work in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _Ledger:
    """Bytes of the tensors that autograd saved, by micro-batch: unique storages, without weights and buffers."""

    def __init__(self) -> None:
        self.constants: set[int] = set()  # storages that do not count
        self._count: Counter[int] = Counter()
        self._of: dict[int, dict[int, int]] = {}
        self.held = 0

    def watch(self, microbatch: int) -> AbstractContextManager:
        def pack(tensor: Tensor) -> tuple[Tensor, int]:
            self.hold(microbatch, [tensor])
            return tensor.detach(), tensor._version  # the tensor itself would keep its own graph alive

        def unpack(packed: tuple[Tensor, int]) -> Tensor:
            tensor, version = packed
            if tensor._version != version:
                raise RuntimeError("a tensor saved for the backward was changed in place after the forward")
            return tensor

        return saved_tensors_hooks(pack, unpack)

    def hold(self, microbatch: int, tensors: Iterable[Any]) -> None:
        mine = self._of.setdefault(microbatch, {})
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                key = storage.data_ptr()
                if key not in self.constants and key not in mine:
                    mine[key] = storage.nbytes()
                    self._count[key] += 1
                    self.held += mine[key] if self._count[key] == 1 else 0

    def drop(self, microbatch: int) -> None:
        for key, size in self._of.pop(microbatch, {}).items():
            self._count[key] -= 1
            if not self._count[key]:
                del self._count[key]
                self.held -= size


def counted(value: Any, target: Any) -> tuple[Tensor, int]:
    """A loss as (mean, count): it may return both, or a mean over the target's samples."""
    if isinstance(value, tuple):
        mean, count = value
        return mean, int(count)
    tensors = [t for t in pytree.tree_leaves(target) if isinstance(t, Tensor)]
    return value, len(tensors[0])


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _to_host(named: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: t.detach().to("cpu", copy=True) for name, t in named}
