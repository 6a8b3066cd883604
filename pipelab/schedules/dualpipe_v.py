"""DualPipeV (DeepSeek-V3, arXiv 2412.19437, section 3.2.1): DualPipe cut in half, into a V.

0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3 0U0 3U0     p = 2,
.   1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3 1U0 2U0     m = 4

DualPipe feeds micro-batches in from both ends and keeps two copies of the model; of its devices,
half with one copy do the same work.
"""

from collections import Counter, deque

from pipelab.schedules.rows import Rows, flush
from pipelab.table.action import Action, Kind, U


@flush
def dualpipe_v(devices: int, microbatches: int) -> Rows:
    """Two chunks a device in a V; forwards of one are paired with full backwards of the other.

    DeepSeek overlaps such a pair, hiding each one's transfers behind the other's compute: see
    `dualpipe_v(...).overlap()`, except for the last device's first pair. Here the forward runs
    first. Only the warm-up and the drain split backwards. Made for m >= 2 p; smaller m drop the
    absent micro-batches from the table of 2 p.

    >>> dualpipe_v(4, 8).peak_in_flight
    [9, 9, 9, 9]
    """
    made_for = max(microbatches, 2 * devices)
    for device in range(devices):
        row = row_of(device, devices, made_for)
        present = [action for action in row if action.microbatch < microbatches]
        yield [*present, U(device), U(2 * devices - device - 1)]


def row_of(device: int, devices: int, microbatches: int) -> list[Action]:
    """A device's row for one batch of at least 2 p micro-batches, without updates."""
    p, later = devices, devices - device - 1
    first, second = device, 2 * p - device - 1  # its stages
    f0, f1 = (first, Kind.F), (second, Kind.F)
    b0, b1 = (first, Kind.B), (second, Kind.B)
    i0, i1 = (first, Kind.I), (second, Kind.I)
    w = (-1, Kind.W)  # of the oldest I that has none
    steps = [  # and how often
        ([f0], 2 * later),
        ([f0, f1], device + 1),
        ([i1, w, f1], later),
        ([f0, b1, f1, b0], microbatches - 2 * p + device + 1),
        ([b1, f1, b0], later),
        # The last backwards are split: the device before waits for I alone.
        (([b1, b0] * (device + 1))[: device + 1], 1),
        (([i1, i0] * (device + 1))[device + 1 :], 1),
        ([w, i0], later),
        ([w], device + 1),
    ]
    return _counted([cell for cells, times in steps for cell in cells * times])


def _counted(cells: list[tuple[int, Kind]]) -> list[Action]:
    """Stages and kinds with micro-batches: a stage's forwards, and its backwards, are in order."""
    count: Counter[tuple[int, bool]] = Counter()
    split: deque[Action] = deque()  # I that have no W
    row = []
    for stage, kind in cells:
        if kind is Kind.W:
            row.append(split.popleft()._replace(kind=kind))
            continue
        chain = stage, kind is Kind.F
        row.append(Action(stage, kind, count[chain]))
        count[chain] += 1
        if kind is Kind.I:
            split.append(row[-1])
    return row
