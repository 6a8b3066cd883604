"""A stage of a torch model: what a worker's five kinds of action do to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from pipelab.executors.checkpoint import StageState
from pipelab.executors.torch_device import CpuDevice
from pipelab.executors.worker import Bytes

Loss = Callable[[Any, Any], Any]
OptimizerFactory = Callable[
    [Iterable[nn.Parameter]], Any
]  # an optimizer, or a tuple of one and its LR schedulers


@dataclass(frozen=True)
class Recipe:
    """How to train, the same for all stages.

    loss         (output, target) -> mean, or (mean, how many it is the mean of); by default the samples are counted
    optimizer    a factory: parameters -> torch.optim.Optimizer, or a tuple of one and learning-rate schedulers
    recompute    (total,) whether a micro-batch's forward runs again before its backward
    microbatches in a batch
    clip         largest norm of a step's gradient: over all stages if `shared_clip`, else per stage
    autocast     type of mixed precision, or None
    finite       whether a loss that is no number ends the run
    training     else the forwards only evaluate
    keep         whether to keep gradients and weights of every update, for the check and for dumps
    """

    loss: Loss
    optimizer: OptimizerFactory | None
    recompute: np.ndarray
    microbatches: int
    clip: float | None = None
    shared_clip: bool = True
    autocast: torch.dtype | None = None
    finite: bool = True
    training: bool = True
    keep: bool = False


class News(NamedTuple):
    """What a stage tells its partners before an update: the squared norm of its own gradients, and those of tied weights."""

    square: float
    tied: dict[int, Tensor]


class TorchStage:
    """One stage: a module, its weight versions, and what its forwards left for their backwards.

    module      the stage's layers; trained in place
    device      the device runtime, which counts the activations that are kept
    recipe      how to train
    versions    (total,) the weight version that each micro-batch reads
    groups      (total,) the update group of each micro-batch
    later       versions that are read after the last micro-batch here: kept for a checkpoint
    samples     (total,) how many samples each micro-batch has
    inputs      per micro-batch, on stage 0: the data. None elsewhere
    targets     per micro-batch, on the last stage. None elsewhere
    seeds       (total,) the random numbers that each forward draws from; None if forwards draw none
    ties        name -> number of the weights that other stages have too: their gradients are added up
    start       what to go on from, its versions numbered as here

    Weight versions are values: an update copies the latest version only if the table still has readers of it, else it
    steps in place. A micro-batch's gradient is weighted by what its loss counted: the count travels with the gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        device: CpuDevice,
        recipe: Recipe,
        versions: np.ndarray,
        groups: np.ndarray,
        *,
        later: Iterable[int] = (),
        samples: Sequence[int] = (),
        inputs: Sequence[Any] | None = None,
        targets: Sequence[Any] | None = None,
        seeds: Sequence[int] | None = None,
        ties: dict[str, int] | None = None,
        start: StageState | None = None,
    ) -> None:
        self.module, self.device, self.recipe = module, device, recipe
        self.inputs, self.targets, self.samples, self.seeds, self.ties = (
            inputs,
            targets,
            samples,
            seeds,
            ties or {},
        )
        self.version_of, self.group_of = versions.tolist(), groups.tolist()
        self.weights: dict[int, dict[str, nn.Parameter]] = {0: dict(module.named_parameters())}
        self._slots = _slots(module)
        self.readers = Counter([*self.version_of, *later])
        if start:
            self._load(start)
        # Handles stand for the weights in the optimizer: its state stays with them while versions come and go. They are
        # made from .data, since a detached tensor shares the weight's version counter: a step would look like a change.
        latest = self.weights[max(self.weights)]
        self._handles = {name: nn.Parameter(p.data, p.requires_grad) for name, p in latest.items()}
        trained = [h for h in self._handles.values() if h.requires_grad]
        made = recipe.optimizer(trained) if trained and recipe.optimizer else None
        self.optimizer, *self.schedulers = made if isinstance(made, tuple) else (made,)
        if start:
            self._load_optimizer(start)
        self._left = Counter(self.group_of)  # update group -> backwards to come
        self._kept: dict[
            int, tuple[Any, Any, float]
        ] = {}  # micro-batch -> input leaves, output edges, count
        self._split: dict[
            int, tuple[list, list, float]
        ] = {}  # micro-batch -> edges, gradients, count, between I and W
        self._counts: dict[
            int, float
        ] = {}  # update group -> what its micro-batches' losses counted
        self.losses: dict[int, tuple[Tensor, float]] = {}
        self.steps: list[
            tuple[dict[str, Tensor], dict[str, Tensor]]
        ] = []  # gradients and weights of each update
        self._stepped: dict[
            str, Tensor
        ] = {}  # the gradients of an update that `steps` does not have yet
        self._ledger = device.ledger
        self._note_constants()
        module.train(module.training and recipe.training)

    @property
    def versions_held(self) -> int:
        """Weight versions kept, by unique storages of a weight."""
        first = next(iter(self._handles), None)
        return (
            len({w[first].untyped_storage().data_ptr() for w in self.weights.values()})
            if first
            else 1
        )

    # ---- the five kinds of action

    def forward(self, microbatch: int, given: Any) -> Any:
        """The stage's output, or None on the last stage, which computes the loss."""
        x = given if self.inputs is None else self.inputs[microbatch]
        if self.recipe.training and not self.recipe.recompute[microbatch]:
            output, self._kept[microbatch] = self._compute(microbatch, x)
        else:
            self._bind(microbatch)
            if self.recipe.training:
                self._ledger.hold((id(self), microbatch), pytree.tree_leaves(x))
                self._kept[microbatch] = (x, None, 0)
            with torch.no_grad():  # on a copy: a layer that works in place must not change what the second forward starts from
                output = self._apply(microbatch, pytree.tree_map_only(Tensor, Tensor.clone, x))[0]
        if (
            self.targets is not None and self.device.device.type == "cpu"
        ):  # a GPU would have to be waited for: see `update`
            self._check_loss(microbatch)
        return output

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
            torch.autograd.grad(edges, wanted, gradients, retain_graph=True, allow_unused=True)
            if edges and wanted
            else ()
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

    def update(self, number: int, given: dict[int, News] | None = None) -> None:
        """Make version number + 1 from the latest one, with the group's gradient summed over the versions it read.

        `given` is the news of the group by stage, where stages share a clipping norm or tied weights.
        """
        if self.targets is not None and self.device.device.type != "cpu":
            for k in [k for k, group in enumerate(self.group_of) if group == number]:
                self._check_loss(k)
        news = (
            [given[s] for s in sorted(given)]
            if given
            else [self.news()]
            if self.recipe.clip is not None
            else []
        )
        latest, count, tied = self.weights[number], self._counts.pop(number) or 1.0, _add_up(news)
        if self.recipe.clip is not None:  # as torch.nn.utils.clip_grad_norm_
            square = sum(n.square for n in news) + sum(
                float(g.double().square().sum()) for g in tied.values()
            )
            count /= min(1.0, self.recipe.clip / (square**0.5 / count + 1e-6))
        for name, handle in self._handles.items():
            handle.data = latest[name].data
            found = [p.grad for p in (w[name] for w in self.weights.values()) if p.grad is not None]
            total = torch.stack(found).sum(0) if len(found) > 1 else found[0] if found else None
            if self.ties.get(name) in tied:
                total = tied[self.ties[name]].to(handle.device, copy=True)
            handle.grad = None if total is None else total.div_(count)
            for w in self.weights.values():
                w[name].grad = None
        if (
            self.recipe.keep
        ):  # before the step: some optimizers use the gradient's memory for their own
            self._stepped = {
                n: torch.zeros_like(h) if h.grad is None else h.grad.clone()
                for n, h in self._handles.items()
            }
        if self.readers[number]:
            for handle in self._handles.values():
                handle.data = handle.data.clone()
            self.weights[number + 1] = {
                n: nn.Parameter(h.data, h.requires_grad) for n, h in self._handles.items()
            }
            self._note_constants()
        else:
            self.weights[number + 1] = self.weights.pop(number)
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
            for scheduler in self.schedulers:
                scheduler.step()

    # ---- what is asked of it between actions and afterwards

    def snapshot(self) -> None:
        """Keep the last update's gradients and weights; not part of the update, so that its time is its own."""
        if self._stepped:
            latest = self.weights[max(self.weights)]
            self.steps.append((_to_host(self._stepped.items()), _to_host(latest.items())))
            self._stepped = {}

    def complete(self, group: int) -> bool:
        return not self._left[group]

    def sums(self, group: int) -> list[Tensor]:
        """The group's count, then the gradient of every trained weight (a flush: all are of the latest version)."""
        latest = self.weights[max(self.weights)].values()
        gradients = [
            torch.zeros_like(p) if p.grad is None else p.grad for p in latest if p.requires_grad
        ]
        return [torch.tensor([self._counts[group]], dtype=torch.float64), *gradients]

    def replace_sums(self, group: int, sums: list[Tensor]) -> None:
        self._counts[group] = float(sums[0])
        trained = (p for p in self.weights[max(self.weights)].values() if p.requires_grad)
        for p, total in zip(trained, sums[1:], strict=True):
            p.grad = total

    def news(self) -> News:
        square, tied = 0.0, {}
        for name in self._handles:
            found = [p.grad for p in (w[name] for w in self.weights.values()) if p.grad is not None]
            if found and name in self.ties:
                tied[self.ties[name]] = torch.stack(found).sum(0)
            elif self.recipe.clip is not None:
                square += sum(float(g.double().square().sum()) for g in found)
        return News(square, tied)

    def held(self) -> Bytes:
        """What is kept now, by unique storages."""
        latest = max(self.weights)
        weights = _storages(self.weights[latest].values())
        older = _storages(
            p for v, named in self.weights.items() if v != latest for p in named.values()
        )
        gradients = _storages(
            p.grad for named in self.weights.values() for p in named.values() if p.grad is not None
        )
        values = (
            (value for state in self.optimizer.state.values() for value in state.values())
            if self.optimizer
            else ()
        )
        optimizer = _storages(value for value in values if isinstance(value, Tensor))
        versions = {at: size for at, size in older.items() if at not in weights}
        return Bytes(*(sum(x.values()) for x in (weights, versions, gradients, optimizer)))

    def trained(self) -> dict[str, Tensor]:
        """The module's state with its latest weights, on the CPU."""
        latest = self.weights[max(self.weights)]
        names = {alias: name for name, slots in self._slots.items() for _, _, alias in slots}
        return _to_host(
            (name, latest.get(names.get(name, ""), value))
            for name, value in self.module.state_dict().items()
        )

    def state(self, updates: int) -> StageState:
        """For a checkpoint after `updates` updates in all: what is still to be read, on the CPU."""
        ahead = updates - max(self.weights)
        weights = {v + ahead: _to_host(named.items()) for v, named in self.weights.items()}
        aliases = {alias for slots in self._slots.values() for *_, alias in slots}
        buffers = {name: t for name, t in self.trained().items() if name not in aliases}
        states = self.optimizer.state if self.optimizer else {}
        by_name = {
            name: {
                k: v.detach().to("cpu", copy=True) if isinstance(v, Tensor) else v
                for k, v in states[h].items()
            }
            for name, h in self._handles.items()
            if h in states
        }
        groups = (
            [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
            if self.optimizer
            else []
        )
        return StageState(
            weights,
            buffers,
            by_name,
            groups,
            [scheduler.state_dict() for scheduler in self.schedulers],
        )

    # ---- pieces of the actions

    def _load(self, start: StageState) -> None:
        on = self.device.device
        trains = {name: p.requires_grad for name, p in self.weights[0].items()}
        self.weights = {
            v: {name: nn.Parameter(t.to(on, copy=True), trains[name]) for name, t in named.items()}
            for v, named in start.weights.items()
        }
        self.module.load_state_dict(start.buffers, strict=False)

    def _load_optimizer(self, start: StageState) -> None:
        if self.optimizer is None:
            return
        for name, values in start.optimizer.items():
            handle = self._handles[name]
            self.optimizer.state[handle] = {
                k: v.to("cpu" if k == "step" else handle.device, copy=True)
                if isinstance(v, Tensor)
                else v
                for k, v in values.items()
            }
        for group, saved in zip(self.optimizer.param_groups, start.groups, strict=True):
            group.update(saved)
        for scheduler, saved in zip(self.schedulers, start.schedulers, strict=True):
            scheduler.load_state_dict(saved)

    def _check_loss(self, microbatch: int) -> None:
        mean, count = self.losses[microbatch]
        if self.recipe.finite and count and not bool(torch.isfinite(mean)):
            batch = microbatch // self.recipe.microbatches
            raise FloatingPointError(
                f"the loss of micro-batch {microbatch} (batch {batch}) is {float(mean)}; to go on all the same: finite=False"
            )

    def _bind(self, microbatch: int) -> None:
        """Put the version that the micro-batch reads into the module; for a backward too, since recomputation reads it."""
        for name, parameter in self.weights[self.version_of[microbatch]].items():
            for owner, attribute, _ in self._slots[name]:
                owner._parameters[attribute] = parameter

    def _apply(self, microbatch: int, x: Any) -> tuple[Any, Any, float]:
        """Run the module, and the loss behind the last stage: (what is sent on, what a backward starts from, count)."""
        with self.device.forward_context(
            self.seeds[microbatch] if self.seeds else None, self.recipe.autocast
        ):
            y = self.module(x)
            if self.targets is None:
                return pytree.tree_map_only(Tensor, Tensor.detach, y), y, 0
            value = self.recipe.loss(y, self.targets[microbatch])
        mean, count = value if isinstance(value, tuple) else (value, self.samples[microbatch])
        self.losses[microbatch] = (mean.detach(), float(count))
        return None, mean, float(count)

    def _compute(self, microbatch: int, x: Any) -> tuple[Any, tuple]:
        """A forward with its graph: what is sent on, and what a backward needs (input leaves, output edges, count)."""
        self._bind(microbatch)
        leaves, spec = pytree.tree_flatten(x)
        if self.inputs is None:
            leaves = [t.detach().requires_grad_() if _differentiable(t) else t for t in leaves]
        wanted = [
            t if isinstance(t, Tensor) and t.requires_grad and self.inputs is None else None
            for t in leaves
        ]
        entered = [
            _Entry.apply(t) if w is not None else t for t, w in zip(leaves, wanted, strict=True)
        ]
        key = (id(self), microbatch)
        self._ledger.hold(key, wanted)
        with self._ledger.watch(key):
            output, ends, count = self._apply(microbatch, pytree.tree_unflatten(entered, spec))
        # The edge of an output, not the output: what was sent on need not be kept.
        edges = [
            get_gradient_edge(t) if isinstance(t, Tensor) and t.requires_grad else None
            for t in pytree.tree_leaves(ends)
        ]
        return output, (wanted, (edges, ends.detach() if self.targets is not None else None), count)

    def _prepare(self, microbatch: int, given: Any) -> tuple[list, list, list, float]:
        """What autograd starts from: edges and their gradients, the input leaves, and the count."""
        leaves, ends, count = self._kept.pop(microbatch)
        if self.recipe.recompute[microbatch]:
            self._ledger.drop((id(self), microbatch))
            _, (leaves, ends, count) = self._compute(microbatch, leaves)
        edges, mean = ends
        if self.targets is None:
            count, gradients = given
        else:  # a micro-batch that counts nothing (all its tokens masked) has no gradient, whatever its mean is
            gradients = [torch.full_like(mean, count) if count else None]
        pairs = [
            (e, g) for e, g in zip(edges, gradients, strict=True) if e is not None and g is not None
        ]
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
            for (
                name,
                p,
            ) in old.items():  # its gradient belongs to the group that is being accumulated
                if p.grad is not None:
                    sofar = latest[name].grad
                    latest[name].grad = p.grad if sofar is None else sofar + p.grad
            self._note_constants()

    def _note_constants(self) -> None:
        """Weights and buffers are no activations, whoever saves them."""
        weights = (p for version in self.weights.values() for p in version.values())
        self._ledger.ignore(id(self), (*weights, *self.module.buffers()))


@torch.enable_grad()
def warm_up(device: CpuDevice) -> None:
    """Do once what torch sets up when it first differentiates on a device, so that no measured action pays for it."""
    x = torch.ones(2, 2, device=device.device, requires_grad=True)
    with device.ledger.watch(warm_up):
        y = _Entry.apply(x) @ x
    torch.autograd.backward([get_gradient_edge(y)], [torch.ones_like(y)])
    device.ledger.drop(warm_up)


def _slots(module: nn.Module) -> dict[str, list[tuple[nn.Module, str, str]]]:
    """Where each parameter stands in the module: (owner, attribute, full name); more than one place if it is shared."""
    names = {id(p): name for name, p in module.named_parameters()}
    slots: dict[str, list[tuple[nn.Module, str, str]]] = {name: [] for name in names.values()}
    for alias, p in module.named_parameters(remove_duplicate=False):
        owner, _, attribute = alias.rpartition(".")
        slots[names[id(p)]].append((module.get_submodule(owner), attribute, alias))
    return slots


def _add_up(news: Iterable[News]) -> dict[int, Tensor]:
    """The whole gradient of every tied weight, added in the order of stages: the same for all of them."""
    total: dict[int, Tensor] = {}
    for _, tied in news:
        for tie, gradient in tied.items():
            total[tie] = total[tie] + gradient.to(total[tie].device) if tie in total else gradient
    return total


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


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
