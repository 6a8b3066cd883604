"""PipeDream-2BW (Narayanan et al. 2021, arXiv 2006.09503, figure 3): 1F1B without a flush.

0F0 0F1 0F2 .   .   0B0 0F3 0B1 0F4 0B2 0U0 0F5 0B3 ...     m = 3: an update after every third
.   1F0 1F1 .   1B0 1F2 1B1 1F3 1B2 1U0 1F4 1B3 1F5 ...     backward; batch b reads what batch
.   .   2F0 2B0 2F1 2B1 2F2 2B2 2U0 2F3 2B3 2F4 2B4 ...     b - 2 made: late, the same everywhere
"""

from pipelab.schedules.rows import Rows, generated, one_forward_one_backward
from pipelab.table.action import Reads, ScheduleError


@generated(reads=Reads.PREVIOUS)
def pipedream_2bw(devices: int, microbatches: int, batches: int = 1) -> Rows:
    """1F1B over all micro-batches, one update a batch, two versions. Needs m >= p.

    A batch reads the version before the latest.

    >>> pipedream_2bw(3, 3, batches=3).weight_versions
    [2, 2, 2]
    """
    if microbatches < devices:
        raise ScheduleError(
            f"pipedream_2bw needs microbatches >= devices, got {microbatches} < {devices}: two "
            "versions are enough only then (arXiv 2006.09503, section 3.1); use at least "
            f"{devices} micro-batches"
        )
    for stage in range(devices):
        warmup, total = devices - stage - 1, microbatches * batches
        yield one_forward_one_backward(stage, total, warmup, per_update=microbatches)
