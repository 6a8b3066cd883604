"""Recording a peer's run: its optimizers, the ends of batches, torch.profiler's trace."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch._C._profiler import _ExperimentalConfig
from torch.autograd.profiler import profile
from torch.utils import _pytree as pytree

from pipelab.measure.trace import from_trace
from pipelab.peers import PeerRun
from pipelab.runtime.torch.optimizers import make_optimizer
from pipelab.runtime.torch.stage import OptimizerFactory
from pipelab.table.schedule import Schedule


class StepRecorder:
    """The optimizer of a stage, and its learning-rate schedulers; nothing for no parameters."""

    def __init__(self, module: nn.Module, factory: OptimizerFactory) -> None:
        self.module = module
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.optimizer: Any = None
        self.schedulers: list[Any] = []
        if trained:
            self.optimizer, self.schedulers = make_optimizer(
                factory, [*trained.values()], [*trained]
            )

    def step(self) -> None:
        if self.optimizer:
            self.optimizer.step()
            self.module.zero_grad()  # also of weights that the optimizer was not given
            for scheduler in self.schedulers:
                scheduler.step()


@dataclass
class PeerRecord:
    """One device's share of a peer's run.

    losses   one per batch, of the device with the last stage
    weights  by stage
    ends     seconds on a common clock: of the beginning, then of the end of every batch
    """

    losses: list[float]
    weights: dict[int, dict[str, Tensor]]
    ends: list[float]


@contextmanager
def trace_files(count: int, wanted: bool) -> Iterator[list[Path]]:
    """A file for the trace of each process, while its run lasts; none if traces are not wanted."""
    with tempfile.TemporaryDirectory(prefix="pipelab-") as folder:
        yield [Path(folder, f"{rank}.json") for rank in range(count)] if wanted else []


@contextmanager
def recorded(file: Path | None) -> Iterator[None]:
    """Record the process with torch's profiler, all its threads; its trace is in `file` then.

    It uses the class under `torch.profiler.profile`, which starts in a millisecond, not in seconds.
    """
    if file is None:
        yield
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else it prints that it starts
    with profile(
        use_kineto=True,
        experimental_config=_ExperimentalConfig(profile_all_threads=True, trace_only=True),
    ) as seen:
        yield
    seen.export_chrome_trace(str(file))


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """Its state dict on the CPU; a module's extra state stays as it is."""
    return pytree.tree_map_only(Tensor, lambda t: t.detach().cpu(), dict(module.state_dict()))


def gather(
    outcomes: Sequence[PeerRecord], files: Sequence[Path], schedule: Schedule | None = None
) -> PeerRun:
    """The devices' outcomes as one run, with the timeline of its traces."""
    weights = {s: state for outcome in outcomes for s, state in outcome.weights.items()}
    began, *ends = zip(*(outcome.ends for outcome in outcomes), strict=True)
    marks = [min(began), *map(max, ends)]  # around all that any device does
    return PeerRun(
        next(outcome.losses for outcome in outcomes if outcome.losses),
        [weights[s] for s in sorted(weights)],
        [b - a for a, b in pairwise(marks)],
        from_trace(files, schedule) if files else None,
    )
