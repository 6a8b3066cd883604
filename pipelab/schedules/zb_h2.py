"""ZB-H2 (Qi et al. 2023, arXiv 2401.10241, section 2.2, figure 3): no bubble, twice the memory.

0F0 0F1 0F2 0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3 0U0 .       p = 2, m = 4: a parallelogram;
.   1F0 1I0 1F1 1I1 1F2 1I2 1W0 1F3 1I3 1W1 1W2 1W3 1U0     no device waits, where F = I = W
"""

from pipelab.schedules.rows import Rows, flush
from pipelab.schedules.zb_h1 import split_stage


@flush
def zb_h2(devices: int, microbatches: int) -> Rows:
    """ZB-H1 with twice the warm-up, to fill the wait for the first I, and W twice as late.

    If F = I = W and m >= 2 p - 1, no device has a bubble: each starts and ends later than the one
    before by the same time. The update follows the last W as in every flush; the paper's optimizer,
    which validates a step afterwards, is not part of the table.

    >>> zb_h2(4, 8).peak_in_flight
    [7, 7, 7, 7]
    """
    for stage in range(devices):
        warmup = 2 * (devices - stage - 1)
        yield split_stage(stage, microbatches, warmup, behind=2 * stage)
