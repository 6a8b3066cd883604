"""Interleaved 1F1B with more forwards in its warm-up, so that pairs overlap: Kimi K2 (arXiv
2507.20534, section 2.4.2), Megatron-LM's overlapped all-to-all of experts.

0F0 0F1 2F0 2F1 0F2     0F3+2B0 2F2+2B1 2F3+0B0 0B1     2B2 2B3 0B2 0B3 0U0 2U0     p = 2, v = 2,
.   1F0 1F1 3F0 3F1+3B0 1F2+3B1 1F3+1B0 3F2+1B1 3F3+3B2 3B3 1B2 1B3 1U0 3U0 .       m = 4
"""

from itertools import chain

from pipelab.schedules.interleaved import in_turns, rounds_of
from pipelab.table.action import U, check_counts
from pipelab.table.placement import loop_placement
from pipelab.table.schedule import Schedule
from pipelab.table.transform import repeat


def overlapped_1f1b(
    devices: int, microbatches: int, virtual: int = 1, batches: int = 1
) -> Schedule:
    """Each steady-state forward overlaps with a backward that does not depend on it.

    The warm-up has one forward more than that of `interleaved`, whose rounds these are. A pair
    gains time if it takes less than its two actions in turn: see `Costs(together=...)`.

    >>> overlapped_1f1b(4, 8, virtual=2).peak_in_flight
    [12, 10, 8, 6]
    """
    devices, microbatches, virtual = check_counts(
        devices=devices, microbatches=microbatches, virtual=virtual
    )
    rounds = rounds_of(devices if virtual > 1 else 1, microbatches)  # one chunk has no turns
    rows, overlapped = [], set()
    for device in range(devices):
        warmup = 2 * (devices - device - 1) + (virtual - 1) * len(rounds[0]) + 1
        turns = in_turns(device, devices, rounds, virtual, warmup)
        rows.append([*chain(*turns), *map(U, range(device, devices * virtual, devices))])
        overlapped |= {turn[1] for turn in turns if len(turn) > 1}
    placement = tuple(loop_placement(devices, virtual))
    name, numbers = "overlapped_1f1b", (placement, microbatches)
    return repeat(Schedule(name, rows, *numbers, overlapped=frozenset(overlapped)), batches)
