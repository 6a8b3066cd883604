"""What one rank does with torch stages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.executors.checkpoint import StageState, save_stage
from pipelab.executors.job import Job
from pipelab.executors.result import Outcome
from pipelab.executors.torch_device import CpuDevice, torch_device
from pipelab.executors.torch_stage import Recipe, TorchStage, warm_up
from pipelab.executors.transport import Transport


@dataclass
class TorchJob(Job):
    """A job on torch stages.

    modules           the row's stages by number
    inputs, targets   per micro-batch; None where the row has not the first stage, or not the last
    samples           per micro-batch, where there are targets
    seeds             [stage][micro-batch], or None if forwards draw no random numbers
    ties              per stage, the numbers of its tied weights by name
    start             by stage, what to go on from
    later             per stage, weight versions that a checkpoint has to keep
    save              where to write the row's stages afterwards, after `updates` updates in all
    """

    modules: dict[int, nn.Module]
    recipe: Recipe
    inputs: Sequence[Any] | None = None
    targets: Sequence[Any] | None = None
    samples: Sequence[int] = ()
    seeds: Sequence[Sequence[int]] | None = None
    ties: Sequence[dict[str, int]] = ()
    start: dict[int, StageState] = field(default_factory=dict)
    later: Sequence[Sequence[int]] = ()
    save: Path | None = None
    updates: int = 0

    def home(self) -> CpuDevice:
        """The runtime of the job's device."""
        return torch_device(self.device)

    def stages(self, home: CpuDevice) -> dict[int, TorchStage]:
        """Runtimes of the row's stages on `home`, of copies of the modules."""
        first, last = 0, self.schedule.stages - 1
        warm_up(home)
        groups = np.arange(self.schedule.total) // self.schedule.per_update
        return {
            s: TorchStage(
                copy.deepcopy(module).to(home.device),
                home,
                self.recipe,
                self.schedule.versions[s],
                groups,
                later=self.later[s] if self.later else (),
                samples=self.samples,
                inputs=_onto(self.inputs, home) if s == first else None,
                targets=_onto(self.targets, home) if s == last else None,
                seeds=self.seeds[s] if self.seeds else None,
                ties=self.ties[s] if self.ties else None,
                start=self.start.get(s),
            )
            for s, module in self.modules.items()
        }

    def work(
        self,
        stages: dict[int, TorchStage],
        home: CpuDevice,
        transport: Transport,
        began: float,
        progress: Callable[[int], None] | None = None,
    ) -> Outcome:
        outcome = super().work(stages, home, transport, began, progress)
        if self.save and not self.replica:
            for s, stage in stages.items():
                save_stage(self.save, s, stage.state(self.updates))
        return outcome


def _onto(pieces: Sequence[Any] | None, home: CpuDevice) -> list[Any]:
    # Copies: a slice would keep, and count as, the memory of the whole batch.
    return [
        pytree.tree_map_only(Tensor, lambda t: t.to(home.device, copy=True), piece)
        for piece in pieces or ()
    ]
