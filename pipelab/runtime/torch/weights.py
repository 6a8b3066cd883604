"""A torch stage's weights: their versions, and the updates that make them."""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.runtime.options import Options
from pipelab.runtime.orders import Bytes, Order, Update
from pipelab.runtime.stage import CountingStage
from pipelab.runtime.torch.attributes import (
    FirstAgain,
    OptimizerWatch,
    changed,
    kept_by_modules,
    load_into_modules,
    of_modules,
)
from pipelab.runtime.torch.buffers import buffers_of, differ, load_buffers
from pipelab.runtime.torch.device import CpuDevice
from pipelab.runtime.torch.ledger import storages
from pipelab.runtime.torch.offload import Offloaded
from pipelab.runtime.torch.optimizers import make_optimizer
from pipelab.runtime.torch.state import TREES, StageState, on_cpu

PIECE = 2**20  # numbers of a gradient whose squares a GPU adds up at once


class News(NamedTuple):
    """The news that a stage sends its partners before an update.

    square  the squared norm of its own gradients
    tied    the gradients of tied weights, by the tie's number
    counts  by update, the counts of its own micro-batches
    """

    square: float
    tied: dict[int, Tensor]
    counts: dict[int, float]


class VersionedStage(CountingStage):
    """A stage's module with its weight versions, optimizer and learning-rate schedulers.

    module  the stage's layers; trained in place
    device  the device runtime, which counts the activations that are kept
    options how to train
    first, last  whether it is the model's first or last
    ties    name -> number of the weights that other stages share: their gradients are added up
    copies  the numbers of all stages that are copies of this one; empty if there are no others
    shared  names of buffers that other stages have, too: no forward may change them
    slices  of a sequence, one after another: the module then takes the past of earlier ones
    splits  whether parts of what a forward keeps go before its last backward: to W or the host
    start   what to continue from
    names   of its weights in the model: see `weight_names.names_in`
    draws   whether forwards in training are known to draw random numbers. The first one of a mode
            that is not known to shows it. Forwards that draw take turns, and if any stage's do,
            so do all backwards
    total   the gradient of the next update so far, by weight, of any versions; it stands in the
            `grad` of those of one version, where backwards add to it

    Gradients of weights narrower than float32 are added up in float32 (4 bytes a weight, and no
    time that could be measured), over micro-batches, replicas, ties and copies, and rounded once,
    when they have been divided and clipped. Error of a sum of 16, 64, 256, 512 micro-batches of a
    6 x 6 x 6 MLP in bfloat16, in % of its norm: 0.2, 0.3, 0.4, 0.2; added in bfloat16 0.3, 0.7,
    1.2, 2.4; of the undivided batch 0.3, 0.3, 0.5, 0.2.

    An update copies the latest version only if the table still has readers of it, else it steps in
    place. A micro-batch's gradient is weighted by its loss's count, in the order's `unit`: the
    count travels with the gradient.
    """

    def __init__(
        self,
        module: nn.Module,
        device: CpuDevice,
        options: Options,
        *,
        first: bool,
        last: bool,
        ties: Mapping[str, int],
        start: StageState | None,
        draws: bool,
        names: Mapping[str, str],
        copies: Sequence[int] = (),
        shared: Collection[str] = (),
        slices: int = 1,
        splits: bool = False,
    ) -> None:
        super().__init__(device, options, first=first, last=last)
        self.module, self.ties, self.copies = module, ties, copies
        self.slices, self.splits = slices, splits
        self._on_cpu = device.device.type == "cpu"
        self._modes: list[tuple[nn.Module, bool]] = []  # of the module's parts in training
        self._before: list[tuple[str, Tensor]] = []  # buffers before an evaluation
        self._past: dict[int, Any] = {}  # by slice, what its forward has left for the next one
        self._away: dict[int, Offloaded] = {}  # by micro-batch
        self._owed: dict[int, list[Tensor | None]] = {}  # by slice, the gradients of that
        self.known_to_draw = {True: True} if draws else {}
        device.turns.known.append(self.known_to_draw)
        self.weights = {0: _summed_wide(dict(module.named_parameters()))}
        # Where each weight stands in the module; in several places if layers share it.
        names_of = {id(p): name for name, p in self.weights[0].items()}
        self._places = [
            (part._parameters, attribute, names_of[id(p)])
            for part in module.modules()
            for attribute, p in part._parameters.items()
            if p is not None
        ]
        self._bound: dict[str, nn.Parameter] = {}  # the version that stands there
        self._buffered = [part for part in module.modules() if part._buffers]
        if start:
            self._load(start)
        buffers = dict(module.named_buffers())
        self._shared = {name: (buffers[name], buffers[name].clone()) for name in shared}
        self._looked: set[int] = set()  # versions whose graph was looked through for other weights
        self._make_optimizer(names, start)
        latest = self.weights[self.latest]
        self._summing, self._unsettled = latest, [*latest]
        self._note_constants()
        # Bytes of gradients and the optimizer's state; None until they are asked for.
        self._of_gradients: int | None = None
        self._of_optimizer: int | None = None

    def _make_optimizer(self, names: Mapping[str, str], start: StageState | None) -> None:
        # Handles stand for the weights in the optimizer: its state stays with them while versions
        # come and go. They are made from .data, since a detached tensor shares the weight's version
        # counter: a step would look like a change.
        latest = self.weights[self.latest]
        self._handles = {name: _parameter(p.data, p) for name, p in latest.items()}
        self._trained = [name for name, h in self._handles.items() if h.requires_grad]
        trained = [self._handles[name] for name in self._trained]
        called = [names[name] for name in self._trained]
        self.optimizer, self.schedulers = make_optimizer(self.options.optimizer, trained, called)
        self._note_as_made(called)  # before a checkpoint changes them
        if start:
            load_into_modules(self.module, start.attributes, self.placed)
        if start and self.optimizer:
            start.load_optimizer(self.optimizer, self.schedulers, self._handles)
        self._groups = self.optimizer.param_groups if self.optimizer else []

    def begin(self, stage: int, order: Order) -> None:
        if not self.training:  # an evaluated batch leaves no change in buffers
            self.take_buffers(self._before)
            if order.training:
                for part, trains in self._modes:
                    part.train(trains)
        elif not order.training:
            self._modes = [(part, part.training) for part in self.module.modules()]
            self._before = self.buffers()
            self.module.eval()
        super().begin(stage, order)
        self.device.ledger.counting = order.report or self.splits

    def placed(self, data: Any) -> Any:
        # Copies: a slice would keep, and count as, the memory of the whole batch, with its graph.
        if isinstance(data, Tensor):
            return self.device.placed(data.detach() if data.requires_grad else data)
        if data is None:  # of a stage that reads none
            return None
        return pytree.tree_map_only(Tensor, self.placed, data)

    def _load(self, start: StageState) -> None:
        parameters, newest = self.weights[0], max(start.weights)
        self.weights = {
            v: _summed_wide(
                {
                    name: _parameter(t.to(self.device.device, copy=True), p)
                    if (p := parameters[name]).requires_grad
                    else p  # the same in all versions
                    for name, t in of_version.items()
                }
            )
            for v, of_version in start.weights.items()
            if v != newest
        }
        self.weights[newest] = parameters  # which other attributes may name
        for name, t in start.weights[newest].items():
            parameters[name].data.copy_(t)
        load_buffers(self.module, start.buffers, self.device.device)

    def update(self, number: int, received: dict[int, News] | None = None) -> None:
        """Make version number + 1 from the latest one, with its gradient.

        That is summed over the versions that its micro-batches read. `received` is the news of the
        same update by stage, where stages share a clipping norm or tied weights.
        """
        self._check_unchanged()
        # On a GPU a forward that looked at its loss would wait for it: all are looked at here.
        if self.last and not self._on_cpu:
            for k, fed in self.fed.items():
                if fed.update == number and k in self.losses:
                    self.check_loss(k)
        # In the order of stages, so that all of them add up tied gradients to the same sum.
        news = [received[s] for s in sorted(received)] if received else []
        if not news and self.options.clip is not None:
            news = [self.news()]
        if received and self.copies:  # each has some of the micro-batches
            self.counts[number] = sum(received[s].counts.get(number, 0.0) for s in self.copies)
        tied = _add_up(news)
        own_square = sum(n.square for n in news)
        square = self._told_square(number, received or {}, tied)
        divisor = self.divisor(number, lambda: float(own_square + _squares(tied.values())))
        # [1] the handles take the latest weights, and the whole gradient
        latest, gradients = self.weights[number], {**self.total}
        self.total = {}
        for name, handle in self._handles.items():
            handle.data = latest[name].data
            total = gradients.pop(name, None)
            if self.ties.get(name) in tied:
                total = tied[self.ties[name]].clone()
            handle.grad = None if total is None else _rounded(total.div_(divisor), handle.dtype)
        if self.keep:  # before the step, as some optimizers work in the gradient's memory
            self.stepped = {
                name: torch.zeros_like(h) if h.grad is None else h.grad.clone()
                for name, h in self._handles.items()
            }
        # [2] where the latest version still has readers, the step works on a copy of it
        if self.read_later(number):
            for name in self._trained:  # frozen ones are the same in all versions
                self._handles[name].data = self._handles[name].data.clone()
            handles = {name: self._handles[name] for name in self._trained}
            new = {name: _parameter(h.data, h) for name, h in handles.items()}
            self.weights[number + 1] = _summed_wide(latest | new)
            self._note_constants()
        else:
            self.weights[number + 1] = self.weights.pop(number)
        self._sum_in(self.weights[number + 1])
        # [3] step
        used = [group for group in self._groups if group["params"]]
        rates = [group["lr"] for group in used if "lr" in group]
        rates = [rate.detach().clone() if isinstance(rate, Tensor) else rate for rate in rates]
        self.updates[number] = Update(square, rates)
        if self.optimizer is not None:
            self.optimizer.step()
            self._take_back(number + 1)
            self.optimizer.zero_grad()
            for scheduler in self.schedulers:
                scheduler.step()
        self._of_optimizer = None
        self.end_update(number)

    def _moved(self, version: int) -> list[str]:
        """The weights that the optimizer has elsewhere in memory than this version has them."""
        pairs = ((name, p, self._handles[name]) for name, p in self.weights[version].items())
        return [name for name, p, handle in pairs if p.data_ptr() != handle.data_ptr()]

    def _take_back(self, version: int) -> None:
        """Take the tensors that a step has put in the weights' place (p.data = ...)."""
        for name in self._moved(version):
            self.weights[version][name].data = self._handles[name].data
            self._note_constants()

    def _check_unchanged(self) -> None:
        """ValueError for what forwards have changed, though it is another stage's or frozen."""
        for name in self.total.keys() - self._trained:
            raise ValueError(
                f"weight {name} was frozen when the optimizer was made, and has a gradient since a "
                "forward said requires_grad_(): say so before the training"
            )
        for name, (buffer, before) in self._shared.items():
            if differ(before, buffer):
                raise ValueError(
                    f"buffer {name} is one with another stage's, but a forward has changed it, and "
                    "each stage has its own copy: give each its own (clone()), or put both in one "
                    "stage"
                )

    def _told_square(
        self, number: int, received: Mapping[int, News], tied: Mapping[int, Tensor]
    ) -> Any:
        """The squared norm of the gradient; that of tied weights is told by their first stage."""
        gradients = [g for name, g in self.total.items() if self.ties.get(name) not in tied]
        for tie in {*self.ties.values()} & tied.keys():
            if all(s >= self.number for s, news in received.items() if tie in news.tied):
                gradients.append(tied[tie])
        count = self.counts.get(number, 0.0) or 1.0
        # Not a number yet: a GPU would have to be waited for.
        norms = [torch.linalg.vector_norm(_values(gradient)) for gradient in gradients]
        return sum(norm.double().square() for norm in norms) / count**2 if norms else 0.0

    # ---- what is asked of it between actions and afterwards

    def finish(self, microbatch: int, count: float) -> None:
        if super().finish(microbatch, count) is not None:
            self._sum_in(self.weights[self.latest])
            self._note_constants()

    def sums(self, update: int) -> list[Tensor]:
        """Its count and the weights with a gradient, then the gradient of every trained weight.

        Replicas need a flush, so all gradients are of the latest version.
        """
        total = self.total
        for name, gradient in total.items():
            if gradient.is_sparse:
                raise ValueError(
                    f"the gradient of {name} is sparse, but replicas add up dense ones: make its "
                    "layer with sparse=False"
                )
        # All replicas send as many tensors, also of weights that one of them has not used.
        latest = self.weights[self.latest]
        gradients = [
            total[name]
            if name in total
            else torch.zeros_like(latest[name], dtype=latest[name].grad_dtype)
            for name in self._trained
        ]
        counted = [self.counts.get(update, 0.0), *(name in total for name in self._trained)]
        counts = torch.tensor(counted, dtype=torch.float64, device=self.device.device)
        return [counts, *gradients]

    def replace_sums(self, update: int, sums: list[Tensor]) -> None:
        self.counts[update], *used = sums[0].tolist()
        pairs = zip(self._trained, sums[1:], used, strict=True)
        # Without a gradient, optimizers leave a weight alone.
        used_by_some = {name: total for name, total, users in pairs if users}
        self.total = {**self.total, **used_by_some}

    @property
    def has_buffers(self) -> bool:
        return bool(self._buffered)

    def buffers(self) -> list[tuple[str, Tensor]]:
        return [(name, b.detach().clone()) for name, b in self.module.named_buffers()]

    def take_buffers(self, buffers: list[tuple[str, Tensor]]) -> None:
        load_buffers(self.module, dict(buffers), self.device.device)
        self._note_constants()

    def news(self) -> News:
        not_tied, tied = [], {}
        for name, gradient in self.total.items():
            if name in self.ties:
                # Dense, as the sum with another stage's is.
                tied[self.ties[name]] = gradient.clone().to_dense()
            elif self.options.clip is not None:
                not_tied.append(gradient)
        return News(float(_squares(not_tied)), tied, dict(self.counts))

    def held(self) -> Bytes:
        """The memory kept now, by unique storages."""
        if self._of_optimizer is None:
            states = pytree.tree_leaves([*self.optimizer.state.values()]) if self.optimizer else ()
            self._of_optimizer = _bytes(state for state in states if isinstance(state, Tensor))
        if self._of_gradients is None:
            self._of_gradients = _bytes(self.total.values())
        return Bytes(*self._of_weights, self._of_gradients, self._of_optimizer)

    def trained(self) -> dict[str, Tensor]:
        """The module's state with its latest weights, on the CPU."""
        self._bind_version(self.latest)
        return on_cpu(dict(self.module.state_dict()))

    def resume_state(self) -> StageState:
        """For a checkpoint between two batches: all that will still be read, on the CPU."""
        return replace(
            self.optimizer_state(),
            weights={v: on_cpu(of_version) for v, of_version in self.weights.items()},
            buffers=on_cpu(dict(self.module.named_buffers())),
            attributes=kept_by_modules(self.module, self._as_made, self._every_weight()),
        )

    def frozen(self, model: nn.Module) -> dict[str, str]:
        """Digests of the untrained weights that are still those of the caller's model."""
        originals = dict(model.named_parameters())
        return {
            name: TREES.digest(p)
            for name, p in self.weights[self.latest].items()
            if name not in self._trained and name in originals and not differ(originals[name], p)
        }

    def digests(self) -> dict[str, str]:
        return {name: TREES.digest(p) for name, p in self.weights[self.latest].items()}

    def attributes(self) -> dict[str, str]:
        return {
            f"{part}.{name}".removeprefix("."): str(attributes[name])
            for part, attributes in self.look().items()
            for name in changed(self._as_made.get(part, {}), attributes)
            if not name.endswith("_hooks")
        }

    def optimizer_state(self) -> StageState:
        """The same without weights and buffers."""
        state = StageState({}, {})
        if self.optimizer is not None:
            state.add_optimizer(self.optimizer, self.schedulers, self._handles)
            self._watched.check(state)
        return state

    def _note_as_made(self, names: Sequence[str]) -> None:
        """Note what is in attributes of the optimizer and of the module."""
        for name in self._moved(self.latest):
            raise ValueError(
                f"the optimizer moves weight {name} to memory of its own when it is made, where "
                "versions of it would be lost: let its step change the weights that it was given"
            )
        self._as_made = self.look()
        self._first_again = FirstAgain()
        if self.optimizer:
            trained = {name: self._handles[name] for name in self._trained}
            again = partial(make_optimizer, self.options.optimizer, names=names)
            self._watched = OptimizerWatch(self.optimizer, self.schedulers, trained, again)

    def on_host(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        return on_cpu(weights)

    def copied(self, data: Any) -> Any:
        return pytree.tree_map_only(Tensor, Tensor.clone, data)

    def given_back(self, output: Any) -> Any:
        return on_cpu(output)

    # ---- the sum of gradients

    @property
    def total(self) -> Mapping[str, Tensor]:
        return {name: p.grad for name, p in self._summing.items() if p.grad is not None}

    @total.setter
    def total(self, gradients: Mapping[str, Tensor]) -> None:
        for name, p in self._summing.items():
            p.grad = gradients.get(name)
        self._unsettled = [*self._summing]
        self._of_gradients = None

    def _sum_in(self, weights: dict[str, nn.Parameter]) -> None:
        """Let the sum stand in the weights of this version."""
        if weights is not self._summing:
            gradients, self.total = self.total, {}
            self._summing = weights
            self.total = gradients

    def _fresh(self) -> list[Tensor]:
        """The parts of the sum that are in new memory since the last time: mostly none.

        A sum of sparse gradients always is.
        """
        fresh, names, self._unsettled = [], self._unsettled, []
        for name in names:
            gradient = self._summing[name].grad
            if gradient is not None:
                fresh.append(gradient)
                self._of_gradients = None
            if gradient is None or gradient.layout is not torch.strided:
                self._unsettled.append(name)
        return fresh

    # ---- the versions

    def _bind_version(self, version: int) -> None:
        if self._bound is not self.weights[version]:
            self._bound = self.weights[version]
            for parameters, attribute, name in self._places:
                parameters[attribute] = self._bound[name]

    def _note_constants(self) -> None:
        """Weights and buffers are no activations, whoever saves them."""
        every = self._every_weight()
        self._buffers = buffers_of(self._buffered)
        buffers = (buffer for buffer in self._buffers.values() if buffer is not None)
        self.device.ledger.ignore(id(self), (*every, *buffers))
        latest = _bytes(self.weights[self.latest].values())
        self._of_weights = latest, _bytes(every) - latest  # the versions kept beside it

    def look(self) -> dict[str, dict[str, Any]]:
        """What attributes of the module and its parts hold."""
        return of_modules(self.module, self._every_weight())

    def _every_weight(self) -> list[Tensor]:
        return [p for of_version in self.weights.values() for p in of_version.values()]

    def _note_buffers(self) -> None:
        """After a forward, which may have put other tensors there."""
        if not self._buffered:
            return
        if any(now is not self._buffers.get(at) for at, now in buffers_of(self._buffered).items()):
            self._note_constants()


def _parameter(data: Tensor, like: nn.Parameter) -> nn.Parameter:
    """Another version of a weight, with its attributes, which optimizers may look at."""
    parameter = nn.Parameter(data, like.requires_grad)
    vars(parameter).update(vars(like))
    return parameter


def _summed_wide(weights: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The weights; autograd adds up the gradients of narrow ones in float32 from now on."""
    for p in weights.values():
        if p.is_floating_point() and p.itemsize < 4:
            p.grad_dtype = torch.float32
    return weights


def _rounded(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """The gradient as its weight's type has it; rows that come several times are added before."""
    if gradient.is_sparse and gradient.dtype is not dtype:
        gradient = gradient.coalesce()
    return gradient.to(dtype)


def _add_up(news: Iterable[News]) -> dict[int, Tensor]:
    """The whole gradient of every tied weight, added in the order of stages: the same for all."""
    total: dict[int, Tensor] = {}
    for told in news:
        for tie, gradient in told.tied.items():
            total[tie] = total[tie] + gradient if tie in total else gradient
    return total


def _values(gradient: Tensor) -> Tensor:
    """Its numbers, none of them twice."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient.detach()


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(storages(tensors).values())


def _squares(gradients: Iterable[Tensor]) -> Any:
    """The sum of all squares, in float64; on a GPU a number that nobody has waited for yet."""
    total: Any = 0.0
    for gradient in gradients:
        values = _values(gradient)
        # Squares in float64 take 20 bytes a number.
        total = total + sum(map(_square, _pieces(values, PIECE if values.is_cuda else math.inf)))
    return total


def _pieces(values: Tensor, most: float) -> Sequence[Tensor]:
    """The numbers in views of about `most`, cut along the largest axis."""
    if values.numel() <= most:
        return [values]
    axis = max(range(values.ndim), key=lambda i: values.shape[i])
    return values.split(max(1, int(most * values.shape[axis] / values.numel())), axis)


def _square(values: Tensor) -> Tensor:
    return values.abs().double().square().sum()
