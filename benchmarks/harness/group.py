"""A peer that has one process a device: what each rank is sent, and how all are run."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from pipelab.peers import PeerRun
from pipelab.peers.record import PeerRecord, gather, recorded, trace_files
from pipelab.runtime.batches import cut_batch, samples_of
from pipelab.runtime.torch.processes import run_processes
from pipelab.runtime.torch.stage import Loss, OptimizerFactory
from pipelab.runtime.torch.state import TREES
from pipelab.table.action import check_counts


@dataclass
class PeerJob:
    """A rank's job.

    library  whose pipeline it is, for errors
    trace    whether torch.profiler records the run
    options  what else that library is told
    file     where this rank leaves its trace
    ends     when the rank began, and ended each batch, on the clock that all processes share
    """

    library: str
    stages: Sequence[Any]
    batches: Sequence[tuple[Any, Any]]
    loss: Loss
    optimizer: OptimizerFactory
    microbatches: int
    trace: bool
    options: Any = None
    rank: int = 0
    file: Path | None = None
    ends: list[float] = field(default_factory=list, init=False)

    @property
    def row(self) -> int:
        return self.rank

    @property
    def where(self) -> str:
        return f"rank {self.rank} of {self.library}"

    def doing(self, mark: int) -> str:
        return f"batch {mark}"

    def each_batch(self, progress: Callable[[int], None]) -> Iterator[tuple[int, Any]]:
        """(number, batch), recorded; all ranks begin and leave together."""
        with recorded(self.file):
            dist.barrier()
            self.ends.append(time.perf_counter())
            for b, batch in enumerate(self.batches):
                progress(b)
                yield b, batch
                self.ends.append(time.perf_counter())
            dist.barrier()  # nobody leaves while its messages are on their way


def run_ranks(
    work: Callable[[PeerJob, Callable[[int], None]], PeerRecord],
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
            f"{job.library}: stages share a weight, which would be trained apart: give each its own"
        )
    for b, batch in enumerate(job.batches):
        sizes = [samples_of(piece, TREES) for piece in cut_batch(batch, m, b, TREES)]
        if len({*sizes}) > 1:
            raise ValueError(
                f"batch {b}: {sum(sizes)} samples do not make {m} micro-batches of one size"
            )
    # Nobody asks for the gradients of the data.
    batches = pytree.tree_map_only(Tensor, Tensor.detach, list(job.batches))
    with trace_files(ranks, job.trace) as files:
        jobs = [
            replace(job, batches=batches, rank=rank, file=files[rank] if files else None)
            for rank in range(ranks)
        ]
        return gather(run_processes(jobs, work, timeout), files)


def shapes_of(x: Any) -> tuple:
    """The shape and type of every tensor."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in pytree.tree_leaves(x))
