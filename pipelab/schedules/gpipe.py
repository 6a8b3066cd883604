"""GPipe (Huang et al. 2019, arXiv 1811.06965, figure 2c): all forwards, all backwards, the update.

    0F0 0F1 0F2 .   .   .   .   0B0 0B1 0B2 0U0
    .   1F0 1F1 1F2 .   .   1B0 1B1 1B2 1U0
    .   .   2F0 2F1 2F2 2B0 2B1 2B2 2U0

Backwards run first in, first out, as in torch.distributed.pipelining and the later papers' figures;
the original figure and torchgpipe run them last in, first out, in the same time and memory.
"""

from pipelab.schedules.rows import Rows, flush
from pipelab.table.action import B, F, U


@flush
def gpipe(devices: int, microbatches: int) -> Rows:
    """All forwards of a batch, then all its backwards, then the update.

    >>> print(gpipe(2, 2).grid())
    0F0 0F1 .   .   0B0 0B1 0U0
    .   1F0 1F1 1B0 1B1 1U0 .
    """
    batch = range(microbatches)
    for stage in range(devices):
        yield [*(F(stage, k) for k in batch), *(B(stage, k) for k in batch), U(stage)]
