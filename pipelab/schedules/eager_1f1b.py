"""Eager 1F1B (Zhuang et al. 2022, arXiv 2211.05322): twice the warm-up of 1F1B hides transfers.

0F0 0F1 0F2 0F3 0F4 0B0 .   0B1 .   0B2 .   0B3 .   0B4 0U0     2 (p - s) - 1 in flight on
.   1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 .   1B3 .   1B4 1U0 .       stage s: an input is there a
.   .   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2U0 .   .       turn before it is needed
"""

from pipelab.schedules.rows import Rows, flush, one_forward_one_backward


@flush
def eager_1f1b(devices: int, microbatches: int) -> Rows:
    """1F1B with 2 (p - s - 1) forwards of warm-up on stage s instead of p - s - 1.

    >>> eager_1f1b(4, 8).peak_in_flight
    [7, 5, 3, 1]
    """
    for stage in range(devices):
        warmup = 2 * (devices - stage - 1)
        yield one_forward_one_backward(stage, microbatches, warmup, per_update=microbatches)
