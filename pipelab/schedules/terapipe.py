"""TeraPipe (Li et al. 2021, arXiv 2102.07988): GPipe on slices of sequences.

0F0 0F1 0F2 0F3 .   .   0B3 0B2 0B1 0B0 0U0     p = 2, m = 2 sequences of two slices
.   1F0 1F1 1F2 1F3 1B3 1B2 1B1 1B0 1U0 .
"""

from pipelab.schedules.rows import Rows, flush
from pipelab.table.action import B, F, U


@flush
def terapipe(devices: int, microbatches: int, slices: int = 2) -> Rows:
    """All forwards, slice by slice, then all backwards in reverse.

    The bubble is that of GPipe with as many micro-batches as there are slices.

    slices  per sequence, of equal length; actions number the slices

    >>> from pipelab import simulate
    >>> simulate(terapipe(4, 2, slices=4)).bubble.over_ideal
    0.375
    """
    pieces = range(microbatches * slices)
    for stage in range(devices):
        yield [*(F(stage, k) for k in pieces), *(B(stage, k) for k in reversed(pieces)), U(stage)]
