"""Seq1F1B (Sun et al. 2024, arXiv 2406.03488): 1F1B on slices of sequences.

0F0 0F1 0F2 .   0B1 0F3 0B0 .   0B3 0B2 0U0     p = 2, m = 2 sequences of two slices: 0F2 is the
.   1F0 1F1 1B1 1F2 1B0 1F3 1B3 1B2 1U0 .       first slice of the second one
"""

from pipelab.schedules.rows import Rows, flush
from pipelab.table.action import B, F, U


@flush
def seq1f1b(devices: int, microbatches: int, slices: int = 2) -> Rows:
    """1F1B on slices: forwards go slice by slice, backwards start with a sequence's last slice.

    A slice attends to earlier ones, so keys and values stay until the backwards that use them. A
    device holds a sequence and p - s - 1 slices, where 1F1B holds p - s sequences. With slices=1 it
    is `pipedream_flush`, row for row.

    slices  per sequence, of equal length; actions number the slices

    >>> seq1f1b(4, 8, slices=4).peak_in_flight
    [7, 6, 5, 4]
    """
    pieces = range(microbatches * slices)
    backwards = [k + slices - 1 - j for k in pieces[::slices] for j in range(slices)]
    for stage in range(devices):
        warmup = devices - stage - 2 + slices
        row = []
        for turn in range(len(pieces) + warmup):
            row += [F(stage, k) for k in pieces[turn : turn + 1]]
            row += [
                B(stage, k) for k in backwards[max(turn - warmup, 0) : max(turn - warmup + 1, 0)]
            ]
        yield [*row, U(stage)]
