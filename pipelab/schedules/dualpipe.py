"""DualPipe (DeepSeek-V3, arXiv 2412.19437, section 3.2.1): micro-batches from both ends.

Devices d and p - 1 - d hold the same two stages, one of each copy of the model. Both have the row
of a device of DualPipeV with half the devices and half the micro-batches: that schedule is this
one, cut in half.
"""

from pipelab.schedules.chimera import check_even
from pipelab.schedules.dualpipe_v import row_of
from pipelab.schedules.rows import Rows, generated
from pipelab.table.action import Action, U


@generated(copies=2)
def dualpipe(devices: int, microbatches: int) -> Rows:
    """Two copies of the model; forwards of one are paired with full backwards of the other.

    DeepSeek overlaps such a pair: see `dualpipe(...).overlap()`, except for the first pair of the
    two middle devices. The first half of the micro-batches goes down the devices, the second half
    up. Made for an even p and an even m >= 2 p; other m drop the absent micro-batches from that
    table.

    >>> dualpipe(4, 8).peak_in_flight
    [5, 5, 5, 5]
    """
    p = check_even(devices, "dualpipe")
    half = max(-(-microbatches // 2), p)
    absent = half - (microbatches + 1) // 2  # of those that go down; of the others, as many more
    for device in range(p):
        near = min(device, p - 1 - device)
        down, up = device, 2 * p - 1 - device
        # A stage of DualPipeV's first chunk is of the copy that begins at the near end.
        own, other = (down, up) if device < p // 2 else (up, down)
        row = []
        for stage, kind, number in row_of(near, p // 2, half):
            stage = own if stage == near else other
            k = number if stage == down else half - absent + number
            if number < half - absent and k < microbatches:
                row.append(Action(stage, kind, k))
        yield [*row, U(down), U(up)]
