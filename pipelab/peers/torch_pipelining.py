"""torch.distributed.pipelining, torch's own pipeline runtime, behind a call like `pipelab.run`.

A process per rank, gloo. What it asks for: micro-batches of one size, a loss that is the mean over
the samples, and for 1F1B at least as many micro-batches as stages. Its first batch also finds out
the shapes of all messages, so that it takes much longer.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)

from pipelab.executors.torch.processes import run_processes
from pipelab.executors.torch.stage import Loss, OptimizerFactory
from pipelab.peers import PeerRun

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "pipedream_flush": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
}


def run_torch_pipelining(
    name: str,
    stages: Sequence[nn.Module],
    batches: Sequence[tuple[Tensor, Tensor]],
    loss: Loss,
    optimizer: OptimizerFactory,
    *,
    devices: int,
    microbatches: int,
    timeout: float = 60.0,
) -> PeerRun:
    """Train copies of `stages`, stage s on rank s % devices, by torch's schedule for `name`.

    On the CPU. A batch's seconds go from the end of the one before it (the first: from a barrier)
    to the end of the last rank's optimizer step. Raises ValueError for uneven micro-batches, which
    torch's runtime does not take, and RunError as `pipelab.run` does.
    """
    if name not in SCHEDULES:
        raise ValueError(
            f"torch.distributed.pipelining has no schedule for {name!r}: use one of "
            f"{', '.join(SCHEDULES)}"
        )
    for b, (x, _) in enumerate(batches):
        if len(x) % microbatches:
            raise ValueError(
                f"batch {b}: {len(x)} samples do not make {microbatches} micro-batches of one size"
            )
    jobs = [
        _Job(rank, devices, name, microbatches, list(stages), list(batches), loss, optimizer)
        for rank in range(devices)
    ]
    done = run_processes(jobs, _train, timeout)
    ends = [max(times) for times in zip(*(outcome.ends for outcome in done), strict=True)]
    weights = {s: state for outcome in done for s, state in outcome.weights.items()}
    return PeerRun(
        next(outcome.losses for outcome in done if outcome.losses),
        [weights[s] for s in range(len(stages))],
        [b - a for a, b in pairwise(ends)],
    )


@dataclass
class _Job:
    """What one rank needs to find its part: stage s is on rank s % devices."""

    rank: int
    devices: int
    name: str
    microbatches: int
    stages: list[nn.Module]
    batches: list[tuple[Tensor, Tensor]]
    loss: Loss
    optimizer: OptimizerFactory

    @property
    def where(self) -> str:
        return f"rank {self.rank} of torch.distributed.pipelining"

    def doing(self, mark: int) -> str:
        return f"batch {mark}"


@dataclass
class _Outcome:
    losses: list[float]  # of the rank with the last stage
    weights: dict[int, dict[str, Tensor]]
    ends: list[float]  # of the barrier, then of every batch, on the clock that all processes share


def _train(job: _Job, progress: Callable[[int], None]) -> _Outcome:
    count = len(job.stages)
    mine = {s: job.stages[s] for s in range(job.rank, count, job.devices)}
    cpu = torch.device("cpu")
    parts = [PipelineStage(module, s, count, cpu) for s, module in mine.items()]
    runtime = SCHEDULES[job.name](
        parts if job.name == "interleaved" else parts[0], job.microbatches, loss_fn=job.loss
    )
    step = job.optimizer([p for module in mine.values() for p in module.parameters()])
    first, last = 0 in mine, count - 1 in mine
    losses: list[list[Tensor]] = [[] for _ in job.batches]
    dist.barrier()
    ends = [time.perf_counter()]
    for b, (x, y) in enumerate(job.batches):
        progress(b)
        data = {"target": y, "losses": losses[b]} if last else {}
        runtime.step(*([x] if first else []), **data, return_outputs=False)
        step.step()
        step.zero_grad()
        ends.append(time.perf_counter())
    dist.barrier()  # nobody leaves while its messages are on their way
    means = [float(torch.stack(some).detach().double().mean()) for some in losses if some]
    weights = {
        s: {name: t.detach() for name, t in module.state_dict().items()}
        for s, module in mine.items()
    }
    return _Outcome(means, weights, ends)
