"""V-Half (Qi et al. 2024, arXiv 2405.15362): half of 1F1B's activations, about half of its bubble.

0F0 .   .   .   .   .   .   5F0 5I0 .   .   .   .   .   .   .   0I0     the building block, p = 3;
.   .   1F0 .   .   .   4F0 .   .   .   4I0 .   .   .   .   1I0 .       micro-batch k is 6 k later,
.   .   .   .   2F0 3F0 .   .   .   .   .   .   3I0 .   2I0 .   .       W where a slot is free
"""

from pipelab.schedules._v import repeated
from pipelab.schedules.rows import Rows, flush


@flush
def v_half(devices: int, microbatches: int) -> Rows:
    """Two chunks a device in a V; a micro-batch holds the same on every device.

    Forwards of the first chunk go down slowly, those of the second return fast: early devices hold
    the first chunk longer, late ones the second. A fixed order for F = I = W.

    >>> v_half(4, 8).peak_in_flight  # chunks: half of each of 3 micro-batches
    [6, 6, 6, 6]
    """
    p, gap = devices, 0 if devices % 2 else 3  # without the gap, slots of an even p would collide

    def block(d: int) -> tuple[int, int, int, int]:
        return 2 * d, 3 * p - d - 2, 3 * p + gap + 2 * d - 1, 6 * p + gap - d - 2

    yield from repeated(block, 2 * ((p + 2) // 2), p, microbatches)
