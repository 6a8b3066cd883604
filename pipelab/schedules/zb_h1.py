"""ZB-H1 (Qi et al. 2023, arXiv 2401.10241, section 2.1, figure 3): 1F1B with split backwards.

0F0 0F1 0F2 .   .   0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3 0U0     stage s runs W s micro-batches
.   1F0 1F1 .   1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3 1U0     after I: the stage before waits
.   .   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3 2U0     for I alone, and W fills the drain
"""

import numpy as np

from pipelab.action import Kind, every_batch, one_kind
from pipelab.schedule import Schedule, one_stage_each
from pipelab.schedules.pipedream import one_forward_one_backward


def zb_h1(devices: int, microbatches: int, batches: int = 1) -> Schedule:
    """1F1B in which W waits: on stage s until s further micro-batches had their I.

    So no stage keeps more than the first one does, p micro-batches.

    >>> zb_h1(4, 8).peak_in_flight
    [4, 4, 4, 4]
    """

    def order(stage: int) -> np.ndarray:
        one = split_stage(stage, microbatches, warmup=devices - stage - 1, behind=stage)
        return every_batch(one, batches, microbatches)

    return one_stage_each("zb_h1", order, devices, microbatches, batches)


def split_stage(stage: int, microbatches: int, warmup: int, behind: int) -> np.ndarray:
    """A stage's 1F1B order with `warmup` forwards ahead, every W `behind` micro-batches after I."""
    every = np.arange(microbatches)
    forwards, input_grads = one_kind(stage, Kind.F, every), one_kind(stage, Kind.I, every)
    row = one_forward_one_backward(forwards, input_grads, warmup)
    # W k stands after I k + behind; the last ones, that have no such, at the end.
    after = np.full(microbatches, len(row))
    later = np.flatnonzero(row[:, 1] == Kind.I)[behind:] + 1
    after[: len(later)] = later
    return np.insert(row, after, one_kind(stage, Kind.W, every), axis=0)
