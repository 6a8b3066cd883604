"""PipeOffload (Wan et al. 2025, arXiv 2503.01328): activations wait in the host's memory.

0F0 0F1+0OFFLOAD0 0F2+0OFFLOAD1 0RELOAD0 .   .             0B0+0OFFLOAD2 0F3+0RELOAD1 0B1 ...
.   1F0           1F1           .        .   1B0           1F2           1B1          1F3 ...
.   .             2F0           2B0      2F1 2B1           2F2           2B2          2F3 ...
"""

from dataclasses import replace

from pipelab.schedules.interleaved import interleaved
from pipelab.table.schedule import Schedule


def pipeoffload(devices: int, microbatches: int, virtual: int = 1, batches: int = 1) -> Schedule:
    """1F1B, or interleaved 1F1B, with offloaded activations: a device holds two micro-batches,
    whatever the number of stages.

    It takes no longer than 1F1B if a copy takes at most a forward. `Schedule.offload` does the same
    to any table, or to some of its stages.

    >>> pipeoffload(8, 16).peak_in_flight, pipeoffload(8, 16, virtual=2).peak_in_flight
    ([2, 2, 2, 2, 2, 2, 2, 1], [4, 4, 4, 3, 3, 3, 3, 2])
    """
    table = interleaved(devices, microbatches, virtual, batches=batches).offload()
    return replace(table, name="pipeoffload")
