"""torch.distributed.pipelining, torch's own pipeline runtime, behind a call like `pipelab.run`.

A process per rank, messages over gloo. What it asks for: micro-batches of one size, a loss that is
the mean over the samples, and by 1F1B at least as many micro-batches as stages. Its first batch
also finds out the shapes of all messages, so that it takes much longer.
"""

from __future__ import annotations

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
    """Train copies of `stages`, by torch's schedule for pipelab's `name`, on the CPU.

    Stage s is on rank s % devices. A batch's seconds go from the end of the one before it (the
    first: from a barrier) to the end of the last rank's optimizer step. Raises ValueError for
    uneven micro-batches, which torch's runtime does not take, and RunError as `pipelab.run` does.
    """
    if name not in SCHEDULES:
        known = ", ".join(SCHEDULES)
        raise ValueError(
            f"torch.distributed.pipelining has no schedule for {name!r}: use one of {known}"
        )
    for b, (x, _) in enumerate(batches):
        if len(x) % microbatches:
            raise ValueError(
                f"batch {b}: {len(x)} samples do not make {microbatches} micro-batches of one size"
            )
    last = (len(stages) - 1) % devices
    jobs = [
        _Job(
            rank,
            name,
            {s: stage for s, stage in enumerate(stages) if s % devices == rank},
            len(stages),
            len(batches),
            microbatches,
            loss,
            optimizer,
            inputs=[x for x, _ in batches] if rank == 0 else [],
            targets=[y for _, y in batches] if rank == last else [],
        )
        for rank in range(devices)
    ]
    done = run_processes(jobs, _train, timeout)
    ends = [max(times) for times in zip(*(outcome.ends for outcome in done), strict=True)]
    weights = {s: state for outcome in done for s, state in outcome.weights.items()}
    return PeerRun(
        done[last].losses,
        [weights[s] for s in range(len(stages))],
        [b - a for a, b in pairwise(ends)],
    )


@dataclass
class _Job:
    """What one rank needs: its stages by number, and data if it has the first or the last one."""

    rank: int
    name: str
    stages: dict[int, nn.Module]
    count: int  # of all stages
    batches: int
    microbatches: int
    loss: Loss
    optimizer: OptimizerFactory
    inputs: list[Tensor]
    targets: list[Tensor]

    @property
    def where(self) -> str:
        return f"rank {self.rank} of torch.distributed.pipelining"

    def doing(self, mark: int) -> str:
        return f"batch {mark}"


@dataclass
class _Outcome:
    losses: list[float]
    weights: dict[int, dict[str, Tensor]]
    ends: list[float]  # of the barrier, then of every batch, on the clock that processes share


def _train(job: _Job, progress: Callable[[int], None]) -> _Outcome:
    cpu, schedule = torch.device("cpu"), SCHEDULES[job.name]
    parts = [PipelineStage(module, s, job.count, cpu) for s, module in job.stages.items()]
    runtime = schedule(
        parts if job.name == "interleaved" else parts[0], job.microbatches, loss_fn=job.loss
    )
    step = job.optimizer([p for module in job.stages.values() for p in module.parameters()])
    losses: list[list[Tensor]] = [[] for _ in range(job.batches)]
    dist.barrier()
    ends = [time.perf_counter()]
    for b in range(job.batches):
        progress(b)
        x, target = job.inputs[b : b + 1], job.targets[b] if job.targets else None
        runtime.step(
            *x, target=target, losses=losses[b] if job.targets else None, return_outputs=False
        )
        step.step()
        step.zero_grad()
        ends.append(time.perf_counter())
    dist.barrier()  # nobody leaves while its messages are on their way
    means = [
        float(torch.stack(of_batch).detach().double().mean()) for of_batch in losses if of_batch
    ]
    weights = {
        s: {n: t.detach() for n, t in module.state_dict().items()}
        for s, module in job.stages.items()
    }
    return _Outcome(means, weights, ends)
