"""PipeDream-Flush (arXiv 2006.09503, figure 4b), Megatron-LM's 1F1B: backwards as early as can be.

0F0 0F1 0F2 .   .   0B0 0F3 0B1 .   0B2 .   0B3 0U0     at most p - s micro-batches in flight on
.   1F0 1F1 .   1B0 1F2 1B1 1F3 1B2 .   1B3 1U0 .       stage s, where GPipe keeps all m; the
.   .   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2U0 .   .       same bubble
"""

from pipelab.schedules.rows import Rows, flush, one_forward_one_backward


@flush
def pipedream_flush(devices: int, microbatches: int) -> Rows:
    """1F1B within each batch, then a flush: one weight version, the gradients of GPipe.

    >>> pipedream_flush(4, 8).peak_in_flight
    [4, 3, 2, 1]
    """
    for stage in range(devices):
        warmup = devices - stage - 1
        yield one_forward_one_backward(stage, microbatches, warmup, per_update=microbatches)
