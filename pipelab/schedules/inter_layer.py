"""Inter-layer (naive model) parallelism: the model is cut into stages, one device works at a time.

0F0 .   .   .   .   0B0 0U0 0F1 .   .   .   .   0B1 0U1
.   1F0 .   .   1B0 1U0 .   .   1F1 .   .   1B1 1U1
.   .   2F0 2B0 2U0 .   .   .   .   2F1 2B1 2U1
"""

from pipelab.schedules.rows import Rows, flush, one_forward_one_backward


@flush
def inter_layer(devices: int, microbatches: int = 1) -> Rows:
    """Each micro-batch goes all the way forward and back before the next one starts.

    >>> print(inter_layer(2).grid())
    0F0 .   .   0B0 0U0
    .   1F0 1B0 1U0 .
    """
    for stage in range(devices):
        yield one_forward_one_backward(stage, microbatches, 0, per_update=microbatches)
