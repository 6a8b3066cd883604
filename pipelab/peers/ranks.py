"""A peer that has one process a device: what each rank is sent, and how all are run."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

from pipelab.executors.torch.processes import run_processes
from pipelab.executors.torch.stage import Loss, OptimizerFactory
from pipelab.peers import PeerRun
from pipelab.peers.watch import Outcome, gather


@dataclass
class PeerJob:
    """A rank's job.

    library  whose pipeline it is, for errors
    options  what else that library is told
    ends     when the rank began, and ended each batch, on the clock that all processes share
    """

    library: str
    rank: int
    stages: Sequence[Any]
    batches: Sequence[tuple[Any, Any]]
    loss: Loss
    optimizer: OptimizerFactory
    microbatches: int
    watch: bool
    options: Any = None
    ends: list[float] = field(default_factory=list)

    @property
    def where(self) -> str:
        return f"rank {self.rank} of {self.library}"

    def doing(self, mark: int) -> str:
        return f"batch {mark}"

    def each_batch(self, progress: Callable[[int], None]) -> Iterator[tuple[int, Any]]:
        """(number, batch); all ranks begin and leave together."""
        dist.barrier()
        self.ends.append(time.perf_counter())
        for b, batch in enumerate(self.batches):
            progress(b)
            yield b, batch
            self.ends.append(time.perf_counter())
        dist.barrier()  # nobody leaves while its messages are on their way


def run_ranks(
    name: str,
    work: Callable[[PeerJob, Callable[[int], None]], Outcome],
    ranks: int,
    timeout: float,
    **fields: Any,
) -> PeerRun:
    """`work` in a process for each rank, on a job with these fields.

    ValueError for a batch that cannot be cut evenly, since these peers average over micro-batches,
    and for weights that stages share, since each rank has its own.
    """
    owned = [id(p) for stage in fields["stages"] for p in stage.parameters()]
    if len({*owned}) < len(owned):
        raise ValueError(
            f"{name}: stages share a weight, which would be trained apart: give each its own"
        )
    for b, (x, _) in enumerate(fields["batches"]):
        if len(x) % fields["microbatches"]:
            raise ValueError(
                f"batch {b}: {len(x)} samples do not make {fields['microbatches']} micro-batches "
                "of one size"
            )
    jobs = [PeerJob(rank=rank, **fields) for rank in range(ranks)]
    return gather(name, run_processes(jobs, work, timeout), fields["microbatches"])
