"""A peer that has one process a device: what each rank is sent, and how all are run."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from pipelab.action import check_counts
from pipelab.executors.batches import cut, samples_of
from pipelab.executors.torch.arguments import TREES
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
    stages: Sequence[Any]
    batches: Sequence[tuple[Any, Any]]
    loss: Loss
    optimizer: OptimizerFactory
    microbatches: int
    watch: bool
    options: Any = None
    rank: int = 0
    ends: list[float] = field(default_factory=list, init=False)

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
    job: PeerJob,
) -> PeerRun:
    """`work` in a process for each rank, on this job.

    ValueError for a batch that cannot be cut evenly, since these peers average over micro-batches,
    and for weights that stages share, since each rank has its own.
    """
    m = job.microbatches
    check_counts(stages=len(job.stages), batches=len(job.batches), microbatches=m)
    owned = [id(p) for stage in job.stages for p in stage.parameters()]
    if len({*owned}) < len(owned):
        raise ValueError(
            f"{name}: stages share a weight, which would be trained apart: give each its own"
        )
    for b, batch in enumerate(job.batches):
        sizes = [samples_of(piece, TREES) for piece in cut(batch, m, b, TREES)]
        if len({*sizes}) > 1:
            raise ValueError(
                f"batch {b}: {sum(sizes)} samples do not make {m} micro-batches of one size"
            )
    # Nobody asks for the gradients of the data.
    batches = pytree.tree_map_only(Tensor, Tensor.detach, list(job.batches))
    jobs = [replace(job, batches=batches, rank=rank) for rank in range(ranks)]
    return gather(name, run_processes(jobs, work, timeout), m)


def shape_of(x: Any) -> tuple:
    """The shape and type of every tensor."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in pytree.tree_leaves(x))
