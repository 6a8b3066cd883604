"""Looped breadth-first (Lamy-Poirier 2022, arXiv 2211.05953, section 4): chunk by chunk.

0F0 0F1 2F0 2F1 .   .   2B0 2B1 0B0 0B1 0U0 2U0     p = 2, v = 2, m = 2: device 0 holds stages
.   1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1 1U0 3U0 .       0 and 2, device 1 1 and 3
"""

from pipelab.schedules.rows import Rows, flush
from pipelab.table.action import B, F, U


@flush
def looped_bfs(devices: int, microbatches: int, virtual: int = 2) -> Rows:
    """GPipe over v chunks a device, placed in a loop (stage s on device s mod p): all forwards of a
    chunk before the next one's, then the backwards, last chunk first.

    It has the bubble of `interleaved` and the activations of GPipe. A chunk's weights are needed in
    two stretches, so data-parallel gathers and reductions overlap with the rest. With virtual=1 it
    is `gpipe`, row for row.

    >>> looped_bfs(4, 8, virtual=2).peak_in_flight
    [16, 16, 16, 16]
    """
    batch = range(microbatches)
    for device in range(devices):
        chunks = range(device, devices * virtual, devices)  # its stages
        forwards = [F(stage, k) for stage in chunks for k in batch]
        backwards = [B(stage, k) for stage in reversed(chunks) for k in batch]
        yield [*forwards, *backwards, *map(U, chunks)]
