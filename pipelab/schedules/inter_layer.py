"""Inter-layer (naive model) parallelism: the model is cut into stages, one device works at a time.

0F0 .   .   .   .   0B0 0U0 0F1 .   .   .   .   0B1 0U1
.   1F0 .   .   1B0 1U0 .   .   1F1 .   .   1B1 1U1
.   .   2F0 2B0 2U0 .   .   .   .   2F1 2B1 2U1
"""

import numpy as np

from pipelab.action import Kind, one_kind
from pipelab.schedule import Schedule, one_stage_each
from pipelab.schedules.pipedream import one_forward_one_backward


def inter_layer(devices: int, microbatches: int = 1, batches: int = 1) -> Schedule:
    """Each micro-batch goes all the way forward and back before the next one starts.

    >>> print(inter_layer(2).grid())
    0F0 .   .   0B0 0U0
    .   1F0 1B0 1U0 .
    """

    def order(stage: int) -> np.ndarray:
        every = np.arange(microbatches * batches)
        forwards, backwards = one_kind(stage, Kind.F, every), one_kind(stage, Kind.B, every)
        return one_forward_one_backward(forwards, backwards, warmup=0)

    return one_stage_each("inter_layer", order, devices, microbatches, batches)
