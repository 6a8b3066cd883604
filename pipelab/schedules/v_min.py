"""V-Min (Qi et al. 2024, arXiv 2405.15362): a third of 1F1B's activations.

0F0 .   .   .   .   .   .   7F0 7I0 .   .   .   .   .   .   0I0     the building block of p = 4:
.   1F0 .   .   .   .   6F0 .   .   6I0 .   .   .   .   1I0 .       micro-batch k comes 6 k later,
.   .   2F0 .   .   5F0 .   .   .   .   5I0 .   .   2I0 .   .       W where a slot is free
.   .   .   3F0 4F0 .   .   .   .   .   .   4I0 3I0 .   .   .
"""

from pipelab.schedules._v import repeated
from pipelab.schedules.rows import Rows, flush


@flush
def v_min(devices: int, microbatches: int) -> Rows:
    """Two chunks a device in a V; a micro-batch goes down, up, down and up again without a stop.

    So no order holds activations for less time; the bubble is about two thirds of 1F1B's. The order
    is fixed for F = I = W. If they differ, there is no slack to absorb it, and the bubble grows
    with every micro-batch.

    >>> v_min(4, 8).peak_in_flight  # chunks: half of each of 2 micro-batches
    [4, 4, 4, 4]
    """
    p, gap = devices, 0 if devices % 3 else 2  # without the gap, slots would collide

    def block(d: int) -> tuple[int, int, int, int]:
        return d, 2 * p - d - 1, 2 * p + gap + d, 4 * p + gap - d - 1

    yield from repeated(block, 2 * ((p + 4) // 3), p, microbatches)
