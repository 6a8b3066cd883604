"""A stage of a torch model: what a worker's five kinds of action do to it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from pipelab.action import Kind
from pipelab.executors.batches import check_leaves
from pipelab.executors.stage import Feed, Recipe, Stage
from pipelab.executors.torch.checkpoint import StageState, load_optimizer, on_cpu
from pipelab.executors.torch.device import CpuDevice, torch_func_refused
from pipelab.executors.worker import Bytes
from pipelab.halves import Halves, Saved, remaining, storages, whole

Loss = Callable[[Any, Any], Any]
OptimizerFactory = Callable[
    [Iterable[nn.Parameter]], Any
]  # an optimizer, or a tuple of one and its learning-rate schedulers


class News(NamedTuple):
    """What a stage tells its partners before an update.

    square  the squared norm of its own gradients
    tied    the gradients of tied weights, by the tie's number
    """

    square: float
    tied: dict[int, Tensor]


class _Kept(NamedTuple):
    """What a forward leaves for its backward.

    x       the input, where the forward runs again; else only its leaves that want a gradient
    edges   where the output's gradients enter the graph. Not the outputs: what was sent on need not
            be kept
    saved   by autograd
    mean    the loss, on the last stage
    counted by the loss
    """

    x: Any
    edges: list[Any]
    saved: list[ref[Saved]]
    mean: Tensor | None
    counted: float


class TorchStage(Stage):
    """One stage: a module, its weight versions, and what its forwards left for their backwards.

    module  the stage's layers; trained in place
    device  the device runtime, which counts the activations that are kept
    recipe  how to train
    feed    what the table and the data hold for it
    ties    name -> number of the weights that other stages have too: their gradients are added up
    start   what to go on from, its versions numbered as here

    An update copies the latest version only if the table still has readers of it, else it steps in
    place. A micro-batch's gradient is weighted by what its loss counted: the count travels with the
    gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        device: CpuDevice,
        recipe: Recipe,
        feed: Feed,
        *,
        ties: Mapping[str, int],
        start: StageState | None,
    ) -> None:
        super().__init__(device, recipe, feed)
        self.module, self.ties = module, ties
        self.weights = {0: dict(module.named_parameters())}
        self._slots = _slots(module)
        if start:
            self._load(start)
        # Handles stand for the weights in the optimizer: its state stays with them while versions
        # come and go. They are made from .data, since a detached tensor shares the weight's version
        # counter: a step would look like a change.
        self._handles = {
            name: _parameter(p.data, p) for name, p in self.weights[self.latest].items()
        }
        trained = [h for h in self._handles.values() if h.requires_grad]
        made = recipe.optimizer(trained) if trained and recipe.optimizer else None
        self.optimizer, *self.schedulers = made if isinstance(made, tuple) else (made,)
        if trained and recipe.optimizer:
            _check_optimizer(self.optimizer, trained)
        if start and self.optimizer:
            load_optimizer(start, self.optimizer, self.schedulers, self._handles)
        self._note_constants()
        if not recipe.training:
            module.eval()

    @property
    def versions_held(self) -> int:
        """Weight versions kept, by unique storages of a weight."""
        first = next(iter(self._handles), None)
        return len(storages(w[first] for w in self.weights.values())) if first else 1

    # ---- forward and update; the backwards are every stage's

    def forward(self, microbatch: int, received: Any) -> Any:
        """The stage's output, or None on the last stage, which computes the loss."""
        x = received if self.feed.inputs is None else self.feed.inputs[microbatch]
        if self.recipe.training and not self.recipe.recompute[microbatch]:
            output, self._kept[microbatch] = self._compute(microbatch, x)
        else:
            self._bind(microbatch)
            if self.recipe.training:
                self.device.hold(self.key(microbatch), pytree.tree_leaves(x))
                self._kept[microbatch] = _Kept(x, [], [], None, 0)
            # On a copy: a layer that works in place must not change what the second forward takes.
            copied = pytree.tree_map_only(Tensor, Tensor.clone, x)
            with torch.no_grad():
                output = self._apply(microbatch, copied)[0]
        # A number on a GPU would have to be waited for: see `update`.
        if self.feed.targets is not None and (self._on_cpu or not self.recipe.finite):
            self.check_loss(microbatch)
        return output

    def update(self, number: int, received: dict[int, News] | None = None) -> None:
        """Make version number + 1 from the latest one, with the group's gradient.

        That is summed over the versions that its micro-batches read. `received` is the news of the
        group by stage, where stages share a clipping norm or tied weights.
        """
        if self.feed.targets is not None and not self._on_cpu:
            for k, group in enumerate(self.feed.groups):
                if group == number:
                    self.check_loss(k)
        news = [received[s] for s in sorted(received)] if received else []
        if not news and self.recipe.clip is not None:
            news = [self.news()]
        tied = _add_up(news)
        own_square = sum(n.square for n in news)
        divisor = self.divisor(number, lambda: own_square + sum(map(_square, tied.values())))
        # [1] the handles take the latest weights, and the whole gradient
        latest = self.weights[number]
        for name, handle in self._handles.items():
            handle.data = latest[name].data
            total = self._gradient(name)
            if self.ties.get(name) in tied:
                total = tied[self.ties[name]].clone()
            handle.grad = None if total is None else total.div_(divisor)
            for weights in self.weights.values():
                weights[name].grad = None
        if self.recipe.keep:  # before the step, as some optimizers work in the gradient's memory
            self.stepped = {
                name: torch.zeros_like(h) if h.grad is None else h.grad.clone()
                for name, h in self._handles.items()
            }
        # [2] where the latest version still has readers, the step works on a copy of it
        if self.readers[number]:
            for handle in self._handles.values():
                handle.data = handle.data.clone()
            self.weights[number + 1] = {n: _parameter(h.data, h) for n, h in self._handles.items()}
            self._note_constants()
        else:
            self.weights[number + 1] = self.weights.pop(number)
        # [3] step
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
            for scheduler in self.schedulers:
                scheduler.step()

    # ---- what is asked of it between actions and afterwards

    def finish(self, microbatch: int, count: float) -> None:
        old = super().finish(microbatch, count)
        if old is not None:
            for name, p in old.items():  # its gradient belongs to the group that is accumulated
                heir = self.weights[self.latest][name]
                if p.grad is not None:
                    heir.grad = p.grad if heir.grad is None else heir.grad + p.grad
            self._note_constants()

    def sums(self, group: int) -> list[Tensor]:
        """The group's count and who has a gradient, then the gradient of every trained weight.

        Replicas need a flush, so that all of them are of the latest version.
        """
        trained = self._trained()
        used = [p.grad is not None for p in trained]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        counted = [self.counts[group], *used]
        counts = torch.tensor(counted, dtype=torch.float64, device=self.device.device)
        return [counts, *gradients]

    def replace_sums(self, group: int, sums: list[Tensor]) -> None:
        self.counts[group], *used = sums[0].tolist()
        for p, total, users in zip(self._trained(), sums[1:], used, strict=True):
            p.grad = total if users else None  # without one, optimizers leave a weight alone

    def news(self) -> News:
        square, tied = 0.0, {}
        for name in self._handles:
            gradient = self._gradient(name)
            if gradient is not None and name in self.ties:
                tied[self.ties[name]] = gradient.clone()
            elif gradient is not None and self.recipe.clip is not None:
                square += _square(gradient)
        return News(square, tied)

    def held(self) -> Bytes:
        """What is kept now, by unique storages."""
        gradients = (p.grad for p in self._every_version() if p.grad is not None)
        states = self.optimizer.state.values() if self.optimizer else ()
        values = (v for state in states for v in state.values() if isinstance(v, Tensor))
        return Bytes(*self._of_weights, _bytes(gradients), _bytes(values))

    def trained(self) -> dict[str, Tensor]:
        """The module's state with its latest weights, on the CPU."""
        self._bind_version(self.latest)
        return on_cpu(self.module.state_dict())

    def state(self, updates: int) -> StageState:
        """For a checkpoint after `updates` updates in all: what is still to be read, on the CPU."""
        ahead = updates - self.latest
        state = StageState(
            {v + ahead: on_cpu(of_version) for v, of_version in self.weights.items()},
            on_cpu(dict(self.module.named_buffers())),
        )
        if self.optimizer is not None:
            state.add_optimizer(self.optimizer, self.schedulers, self._handles)
        return state

    def on_host(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return on_cpu(weights)

    # ---- pieces of the actions

    @property
    def _on_cpu(self) -> bool:
        return self.device.device.type == "cpu"

    def _trained(self) -> list[nn.Parameter]:
        return [p for p in self.weights[self.latest].values() if p.requires_grad]

    def _gradient(self, name: str) -> Tensor | None:
        """A weight's accumulated gradient, over all versions."""
        found = [w[name].grad for w in self.weights.values() if w[name].grad is not None]
        return torch.stack(found).sum(0) if len(found) > 1 else found[0] if found else None

    def _load(self, start: StageState) -> None:
        parameters = self.weights[0]
        self.weights = {
            v: {
                name: _parameter(t.to(self.device.device, copy=True), parameters[name])
                for name, t in of_version.items()
            }
            for v, of_version in start.weights.items()
        }
        for name, buffer in self.module.named_buffers():
            buffer.data.copy_(start.buffers[name])

    def _bind(self, microbatch: int) -> None:
        """Put the version that the micro-batch reads into the module.

        For a backward too, since recomputation, ours or torch.utils.checkpoint's, reads it.
        """
        self._bind_version(self.feed.versions[microbatch])

    def _bind_version(self, version: int) -> None:
        for name, parameter in self.weights[version].items():
            for owner, attribute in self._slots[name]:
                owner._parameters[attribute] = parameter

    def _apply(self, microbatch: int, x: Any) -> tuple[Any, Any, float]:
        """Run the module, and the loss behind the last stage.

        Returns what is sent on, what a backward starts from, and what the loss counted.
        """
        with self.device.forward_context(self._seed(microbatch), self.recipe.autocast):
            y = self.module(x)
            if self.feed.targets is None:
                check_leaves(pytree.tree_leaves(y), "a stage's output")
                return pytree.tree_map_only(Tensor, self._sent, y), y, 0
            value = self.recipe.loss(y, self.feed.targets[microbatch])
        pair = isinstance(value, tuple)
        mean, count = value if pair else (value, self.feed.samples[microbatch])
        _check_mean(mean, y)
        self.losses[microbatch] = (mean.detach(), float(count))
        return None, mean, float(count)

    def _sent(self, output: Tensor) -> Tensor:
        """Without its graph; a weight or buffer may change before another thread has read it."""
        return output.detach().clone() if self.device.ignores(output) else output.detach()

    def _compute(self, microbatch: int, x: Any) -> tuple[Any, _Kept]:
        """A forward with its graph: what is sent on, and what its backward needs."""
        self._bind(microbatch)
        inputs, spec = pytree.tree_flatten(x)
        inner = self.feed.inputs is None
        wanted = [
            t.detach().requires_grad_() if inner and _differentiable(t) else None for t in inputs
        ]
        entered = [
            t if leaf is None else _entered(leaf) for t, leaf in zip(inputs, wanted, strict=True)
        ]
        key = self.key(microbatch)
        self.device.hold(key, wanted)
        saved: list[ref[Saved]] = []
        with torch_func_refused(), self.device.watch(key, saved):
            output, ends, count = self._apply(microbatch, pytree.tree_unflatten(entered, spec))
        edges = [
            get_gradient_edge(t) if isinstance(t, Tensor) and t.requires_grad else None
            for t in pytree.tree_leaves(ends)
        ]
        mean = None if self.feed.targets is None else ends.detach()
        return output, _Kept(wanted, edges, saved, mean, count)

    def _prepare(self, microbatch: int, received: Any) -> tuple[_Kept, list, float]:
        kept = self._kept.pop(microbatch)
        if self.recipe.recompute[microbatch]:
            self.device.ledger.drop(self.key(microbatch))
            _, kept = self._compute(microbatch, kept.x)
        if kept.mean is None:
            count, gradients = received
            return kept, gradients, count
        return kept, [torch.full_like(kept.mean, kept.counted)], kept.counted

    def _pull(
        self, microbatch: int, kept: Any, gradients: list, count: float, kind: Kind
    ) -> list[Tensor | None]:
        self._bind(microbatch)
        found: list[Tensor | None] = []
        held: list[Tensor] = []
        with self.device.backward_context(self._seed(microbatch)):
            if kind is Kind.W:
                kept.weight_grad()
            else:
                found, held = self._pull_input(microbatch, kept, gradients, count, kind)
        for name, p in self.weights[self.feed.versions[microbatch]].items():
            if p.grad is not None and p.grad.is_sparse:
                p.grad = None
                raise ValueError(
                    f"the gradient of {name} is sparse, which is not supported: use sparse=False"
                )
        # Autograd may give one memory to an input's gradient, a weight's, which is added to later,
        # and what is kept for W.
        of_weights = (p.grad for p in self._every_version() if p.grad is not None)
        shared = storages([*held, *of_weights])
        return [
            g.clone() if g is not None and g.untyped_storage().data_ptr() in shared else g
            for g in found
        ]

    def _pull_input(
        self, microbatch: int, kept: _Kept, gradients: list, count: float, kind: Kind
    ) -> tuple[list[Tensor | None], list[Tensor]]:
        """The input's gradient by B or I, a leaf each; and what is kept from I to W."""
        starts = [
            (e, g)
            for e, g in zip(kept.edges, gradients, strict=True)
            if e is not None and g is not None and count
        ]
        edges, of_edges = [e for e, _ in starts], [g for _, g in starts]
        leaves = [leaf for leaf in kept.x if leaf is not None]
        held: list[Tensor] = []
        if kind is Kind.B:
            of_leaves = iter(whole(edges, of_edges, leaves))
        else:
            halves = Halves(list(edges), of_edges, leaves)
            of_leaves = iter(halves.input_grad())
            for of_graph in (kept.edges, starts, edges):
                of_graph.clear()  # what W does not need goes now, and is not counted
            held = [*halves.kept(), *remaining(kept.saved)]
            self._split[microbatch] = halves, None, count  # in place of the whole graph
            self.device.ledger.drop(self.key(microbatch))
            self.device.hold(self.key(microbatch), held)
            self._note_unsplit(halves)
        return [None if leaf is None else next(of_leaves) for leaf in kept.x], held

    def _note_unsplit(self, halves: Halves) -> None:
        """Which weights' gradients I computed, and why; once."""
        if halves.indivisible:
            self.unsplit["all"] = halves.indivisible
        for weight, why in halves.together.items():
            names = {p: name for of in self.weights.values() for name, p in of.items()}
            self.unsplit.setdefault(names.get(weight, "a tensor outside the module"), why)

    def _note_constants(self) -> None:
        """Weights and buffers are no activations, whoever saves them."""
        every = self._every_version()
        self.device.ignore(id(self), (*every, *self.module.buffers()))
        latest = _bytes(self.weights[self.latest].values())
        self._of_weights = latest, _bytes(every) - latest  # the versions kept beside it

    def _every_version(self) -> list[nn.Parameter]:
        return [p for of_version in self.weights.values() for p in of_version.values()]


@torch.enable_grad()
def warm_up(device: CpuDevice) -> None:
    """Do once what torch sets up when it first differentiates on a device.

    So that no measured action pays for it.
    """
    x = torch.ones(2, 2, device=device.device, requires_grad=True)
    with device.watch(warm_up):
        y = _entered(x) @ x
    torch.autograd.backward([get_gradient_edge(y)], [torch.ones_like(y)])
    device.ledger.drop(warm_up)


def _parameter(data: Tensor, like: nn.Parameter) -> nn.Parameter:
    """Another version of a weight, with its attributes, which optimizers may look at."""
    made = nn.Parameter(data, like.requires_grad)
    vars(made).update(vars(like))
    return made


def _slots(module: nn.Module) -> dict[str, list[tuple[nn.Module, str]]]:
    """Where each parameter stands in the module: (owner, attribute); several places if shared."""
    names = {id(p): name for name, p in module.named_parameters()}
    slots: dict[str, list[tuple[nn.Module, str]]] = {name: [] for name in names.values()}
    for alias, p in module.named_parameters(remove_duplicate=False):
        owner, _, attribute = alias.rpartition(".")
        slots[names[id(p)]].append((module.get_submodule(owner), attribute))
    return slots


def _add_up(news: Iterable[News]) -> dict[int, Tensor]:
    """The whole gradient of every tied weight, added in the order of stages: the same for all."""
    total: dict[int, Tensor] = {}
    for _, tied in news:
        for tie, gradient in tied.items():
            total[tie] = total[tie] + gradient if tie in total else gradient
    return total


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(storages(tensors).values())


def _square(gradient: Tensor) -> float:
    return float(gradient.abs().double().square().sum())


def _entered(x: Tensor) -> Tensor:
    """An input as no leaf and no view, so that a first layer may work in place."""
    return torch.ops.aten._unsafe_view(x, x.shape)


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _check_optimizer(optimizer: Any, trained: Sequence[Tensor]) -> None:
    """ValueError for what is no optimizer, or one of the caller's own weights."""
    groups = getattr(optimizer, "param_groups", [{"params": [None]}])
    found = {id(p) for group in groups for p in group["params"]}
    if not found <= set(map(id, trained)):
        raise ValueError(
            f"the optimizer's factory made a {type(optimizer).__name__} of other weights than it "
            "was called with: give one that uses its argument, such as torch.optim.SGD"
        )


def _check_mean(mean: Any, output: Any) -> None:
    """ValueError for a loss that no backward can start from."""
    if not isinstance(mean, Tensor) or mean.ndim:
        found = f"shape {tuple(mean.shape)}" if isinstance(mean, Tensor) else type(mean).__name__
        raise ValueError(f"the loss is a {found}: give the mean over the samples, one number")
    graph = any(isinstance(t, Tensor) and t.requires_grad for t in pytree.tree_leaves(output))
    if torch.is_grad_enabled() and graph and not mean.requires_grad:
        raise ValueError(
            "the loss is detached from the model's output, so that nothing would be trained: "
            "leave out detach(), item() and no_grad() in the loss"
        )
