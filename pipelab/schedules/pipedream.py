"""PipeDream (Narayanan et al. 2019; arXiv 1806.03377, figures 4 and 5): 1F1B, never a flush.

0F0 0F1 0F2 .   .   0B0 0U0 0F3 0B1 0U1 ...     device s runs p - s - 1 forwards ahead: the
.   1F0 1F1 .   1B0 1U0 1F2 1B1 1U1 1F3 ...     warm-up; then one forward and one backward
.   .   2F0 2B0 2U0 2F1 2B1 2U1 2F2 2B2 ...     alternate; an update follows every backward
"""

from pipelab.schedules.rows import Rows, generated, one_forward_one_backward


@generated(per_update=1)
def pipedream(devices: int, microbatches: int, batches: int = 1) -> Rows:
    """1F1B over all micro-batches, an update after every backward, p - s versions on stage s.

    >>> print(pipedream(2, 3).grid())
    0F0 0F1 .   0B0 0U0 0F2 0B1 0U1 .   0B2 0U2
    .   1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2 .
    """
    for stage in range(devices):
        warmup = devices - stage - 1
        yield one_forward_one_backward(stage, microbatches * batches, warmup, per_update=1)
