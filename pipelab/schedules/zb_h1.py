"""ZB-H1 (Qi et al. 2023, arXiv 2401.10241, section 2.1, figure 3): 1F1B with split backwards.

0F0 0F1 0F2 .   .   0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3 0U0     stage s runs W s micro-batches
.   1F0 1F1 .   1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3 1U0     after I: the stage before waits
.   .   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3 2U0     for I alone, and W fills the drain
"""

from pipelab.schedules.rows import Rows, flush
from pipelab.table.action import Action, F, I, U, W


@flush
def zb_h1(devices: int, microbatches: int) -> Rows:
    """1F1B with W delayed: on stage s until s further micro-batches have had their I.

    So no stage holds more than the first one, p micro-batches.

    >>> zb_h1(4, 8).peak_in_flight
    [4, 4, 4, 4]
    """
    for stage in range(devices):
        yield split_stage(stage, microbatches, warmup=devices - stage - 1, behind=stage)


def split_stage(stage: int, microbatches: int, warmup: int, behind: int) -> list[Action]:
    """A stage's 1F1B row with `warmup` forwards ahead, every W `behind` micro-batches after I."""
    batch, row = range(microbatches), []
    for turn in range(microbatches + warmup + behind):
        if turn in batch:
            row.append(F(stage, turn))
        if turn - warmup in batch:
            row.append(I(stage, turn - warmup))
        if turn - warmup - behind in batch:
            row.append(W(stage, turn - warmup - behind))
    return [*row, U(stage)]
