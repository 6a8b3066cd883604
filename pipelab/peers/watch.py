"""What a peer does, noted by hooks inside its run as our workers note what they do."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.action import Action, Kind
from pipelab.executors.result import memory_of, timeline_of
from pipelab.executors.torch.device import CudaDevice, torch_device
from pipelab.executors.torch.stage import OptimizerFactory
from pipelab.executors.worker import Bytes, Record
from pipelab.halves import storages
from pipelab.peers import PeerRun
from pipelab.schedule import Schedule


class Steps:
    """The optimizer of a stage, and its learning-rate schedulers; nothing for no parameters."""

    def __init__(self, module: nn.Module, factory: OptimizerFactory) -> None:
        self.module = module
        trained = [p for p in module.parameters() if p.requires_grad]
        made = factory(trained) if trained else None
        self.optimizer, *self.schedulers = made if isinstance(made, tuple) else (made,)

    def step(self, watch: "Watch | None", stage: int, update: int) -> None:
        """Update the weights, which is noted if somebody watches."""
        if watch:
            watch.begin(stage, Kind.U, update)
        if self.optimizer:
            self.optimizer.step()
            self.module.zero_grad()  # also of weights that the optimizer was not given
            for scheduler in self.schedulers:
                scheduler.step()
        if watch:
            watch.end()


@dataclass
class Seen:
    """What was noted of one device: its actions in their order, and our workers' record of them."""

    actions: list[Action] = field(default_factory=list)
    record: Record = field(default_factory=Record)
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)


class Watch:
    """Notes the actions of one device of a peer: `begin` and `end` stand around each.

    stages  the device's modules by number
    steps   their optimizers

    An action that goes on (a forward with the loss behind it) begins again and stays one span.
    Bytes are counted between actions, where no time is measured.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        steps: Sequence[Steps],
        device: Any = "cpu",
    ) -> None:
        self.stages, self.steps, self.seen = stages, steps, Seen()
        self.home = torch_device(device)
        if isinstance(self.home, CudaDevice):  # the peer works on the current stream
            self.home.stream = torch.cuda.current_stream(self.home.device)
        self.home.begin(0.0)
        for s, stage in stages.items():
            self.home.ignore(s, [*stage.parameters(), *stage.buffers()])
        self._summing: set[int] = set()  # stages between their first backward and their update
        self.seen.record.at_start = self._kept()
        self._saving = ExitStack()

    def begin(self, stage: int, kind: Kind, number: int, since: Any = None) -> None:
        """`since`: a mark of time before now at which the action began."""
        action, seen = Action(stage, kind, number), self.seen
        going_on = seen.actions[-1:] == [action]
        if not going_on:
            self.settle()
            seen.actions.append(action)
            self.home.ledger.most = self.home.ledger.held
        if kind is Kind.U:
            seen.gradients[stage] = {
                name: p.grad.detach().cpu().clone()
                for name, p in self.stages[stage].named_parameters()
                if p.grad is not None
            }
        if kind is Kind.F:
            self._saving.enter_context(self.home.watch((stage, number)))
        if not going_on:
            seen.record.start.append(self.home.now() if since is None else since)
            seen.record.end.append(None)

    def end(self) -> None:
        self.seen.record.end[-1] = self.home.now()
        self._saving.close()

    def around(self, method: Callable, action_of: Callable[..., tuple[int, Kind, int]]) -> Callable:
        """The method with its calls noted; `action_of` takes its arguments."""

        def noted(*arguments: Any, **more: Any) -> Any:
            self.begin(*action_of(*arguments, **more))
            try:
                return method(*arguments, **more)
            finally:
                self.end()

        return noted

    def settle(self) -> None:
        """Count what the last action left."""
        record, ledger = self.seen.record, self.home.ledger
        if len(record.kept) < len(self.seen.actions):
            stage, kind, number = self.seen.actions[-1]
            record.most.append(max(ledger.held, ledger.most))
            if kind in (Kind.B, Kind.W):
                ledger.drop((stage, number))
                self._summing.add(stage)
            if kind is Kind.U:
                self._summing.discard(stage)
            record.held.append(ledger.held)
            record.kept.append(self._kept())

    def finish(self) -> Seen:
        self.settle()
        self.home.finish()
        record = self.seen.record
        record.start, record.end = map(self.home.seconds, (record.start, record.end))
        return self.seen

    def _kept(self) -> Bytes:
        weights, gradients, values = [], [], []
        for s, stage in self.stages.items():
            weights += list(stage.parameters())
            # One backward over all micro-batches shows its sums only at the end.
            summing = s in self._summing
            gradients += [
                p for p in stage.parameters() if p.grad is not None or (summing and p.requires_grad)
            ]
        for steps in self.steps:
            states = steps.optimizer.state.values() if steps.optimizer else ()
            values += [v for state in states for v in state.values() if isinstance(v, Tensor)]
        found = (weights, (), gradients, values)
        return Bytes(*(sum(storages(tensors).values()) for tensors in found))


@dataclass
class Outcome:
    """What one device of a peer gives back.

    losses   one per batch, of the device with the last stage
    weights  by stage
    ends     seconds on a common clock: of the beginning, then of the end of every batch
    """

    losses: list[float]
    weights: dict[int, dict[str, Tensor]]
    ends: list[float]
    seen: Seen | None


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Its state dict on the CPU; a module's extra state is as it is."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().cpu(), dict(module.state_dict()))


def gather(name: str, outcomes: Sequence[Outcome], microbatches: int) -> PeerRun:
    """The devices' outcomes as one run, with its timeline and its memory."""
    weights = {s: state for outcome in outcomes for s, state in outcome.weights.items()}
    home = {s: d for d, outcome in enumerate(outcomes) for s in outcome.weights}
    in_order = sorted(weights)
    began, *ends = zip(*(outcome.ends for outcome in outcomes), strict=True)
    marks = [min(began), *map(max, ends)]  # around all that any device does
    run = PeerRun(
        next(outcome.losses for outcome in outcomes if outcome.losses),
        [weights[s] for s in in_order],
        [b - a for a, b in pairwise(marks)],
    )
    seen = [outcome.seen for outcome in outcomes if outcome.seen]
    if seen:
        gradients = {s: found for each in seen for s, found in each.gradients.items()}
        run.gradients = [gradients.get(s, {}) for s in in_order]
        rows, placement = [each.actions for each in seen], tuple(home[s] for s in in_order)
        table = Schedule(name, rows, placement, microbatches, len(run.losses))
        records = _records(table, [each.record for each in seen])
        run.timeline = timeline_of(table, records, paced=False)
        run.memory = memory_of(run.timeline, records)
    return run


def _records(table: Schedule, records: Sequence[Record]) -> Sequence[Record]:
    """With times from the first action's start. An input has arrived when its action starts: what
    peers receive, they wait for right before."""
    zero = min(min(record.start) for record in records)
    crosses = np.isin(np.arange(table.bounds[-1]), table.crossing)
    for record, first in zip(records, table.bounds, strict=False):
        record.start = [t - zero for t in record.start]
        record.end = [t - zero for t in record.end]
        here = crosses[first : first + len(record.start)]
        record.arrived = np.where(here, record.start, np.nan).tolist()
        record.received = [0] * len(record.start)
        record.on_core = [np.nan] * len(record.start)
    return records
