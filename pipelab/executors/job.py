"""What one rank does and what comes of it: the same for a thread, a process, and a process on another machine."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.executors.torch_device import CpuDevice
from pipelab.executors.torch_stage import Loss, OptimizerFactory, TorchStage
from pipelab.executors.transport import Transport
from pipelab.executors.worker import Pace, Record, Worker
from pipelab.schedule import Schedule


@dataclass
class Job:
    """Row `rank` of a schedule with all that it needs, and nothing of the other ranks.

    modules           the row's stages by number
    inputs, targets   per micro-batch; None where the row has not the first stage, or not the last
    samples           per micro-batch
    recompute         per micro-batch, whether its forward runs again
    """

    schedule: Schedule
    rank: int
    device: str
    modules: dict[int, nn.Module]
    inputs: Sequence[Any] | None
    targets: Sequence[Any] | None
    samples: Sequence[int]
    loss: Loss
    optimizer: OptimizerFactory
    recompute: np.ndarray
    keep: bool
    clip: float | None
    pace: Pace | None

    @property
    def shares_news(self) -> bool:
        """Whether its updates wait for what all stages tell each other."""
        return self.clip is not None and not self.schedule.asynchronous

    def stages(self, home: CpuDevice) -> dict[int, TorchStage]:
        """Runtimes of the row's stages on `home`, of copies of the modules."""
        first, last = 0, self.schedule.stages - 1
        groups = np.arange(self.schedule.total) // self.schedule.per_update
        return {
            s: TorchStage(
                copy.deepcopy(module).to(home.device), home, self.schedule.versions[s], groups, self.samples,
                inputs=_onto(self.inputs, home) if s == first else None,
                targets=_onto(self.targets, home) if s == last else None,
                loss=self.loss, optimizer=self.optimizer, recompute=self.recompute, keep=self.keep, clip=self.clip,
                shared_clip=self.shares_news,
            )
            for s, module in self.modules.items()
        }  # fmt: skip

    def work(
        self, stages: dict[int, TorchStage], home: CpuDevice, transport: Transport, began: float,
        progress: Callable[[int], None] | None = None,
    ) -> Outcome:  # fmt: skip
        """Carry the row out; `progress` is told the flat index of each action before it starts."""
        worker = Worker(self.schedule, self.rank, stages, home, transport, began, self.pace, progress)
        record = worker.work()
        losses = {k: (float(mean), count) for stage in stages.values() for k, (mean, count) in stage.losses.items()}
        steps = {s: stage.steps for s, stage in stages.items()}
        return Outcome(record, losses, steps, {s: stage.trained() for s, stage in stages.items()})


@dataclass
class Outcome:
    """What a rank gives back: its record, losses as (mean, count) by micro-batch, kept steps and trained weights by stage."""

    record: Record
    losses: dict[int, tuple[float, float]]
    steps: dict[int, list[tuple[dict[str, Tensor], dict[str, Tensor]]]]
    weights: dict[int, dict[str, Tensor]]


def _onto(pieces: Sequence[Any] | None, home: CpuDevice) -> list[Any]:
    # Copies: a slice would keep, and count as, the memory of the whole batch.
    return [pytree.tree_map_only(Tensor, lambda t: t.to(home.device, copy=True), piece) for piece in pieces or ()]
