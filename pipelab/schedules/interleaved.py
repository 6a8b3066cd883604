"""Interleaved 1F1B (Narayanan et al. 2021, arXiv 2104.04473, figure 4): v chunks on every device.

0F0 0F1 2F0 2F1 .   2B0 .   2B1 0B0 0B1 0U0 2U0     p = 2, v = 2, m = 2: device 0 holds stages
.   1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 1U0 3U0 .       0 and 2, device 1 1 and 3; chunks take turns
"""

from itertools import accumulate, chain, pairwise, repeat, zip_longest

from pipelab.schedules.rows import Rows, flush, one_forward_one_backward
from pipelab.table.action import Action, B, F, ScheduleError, U


@flush
def interleaved(devices: int, microbatches: int, virtual: int = 2, longest: int = 1) -> Rows:
    """1F1B over v chunks a device, placed in a loop (stage s on device s mod p); a flush after each
    batch.

    Chunks take turns by rounds of p micro-batches. If p does not divide m, absent micro-batches,
    spread evenly over the rounds, are dropped from the table of the next multiple. Dependencies
    stay inside a micro-batch, so the table stays valid, with no more in flight. With virtual=1 it
    is `pipedream_flush`, row for row.

    longest  the most micro-batches in a round, more than p: Megatron-LM's group size. Then no
             micro-batch is absent: if p does not divide m, this is faster but holds more.
             ScheduleError if rounds of p to `longest` do not add up to m

    >>> interleaved(4, 8, virtual=2).peak_in_flight
    [11, 9, 7, 5]
    """
    rounds = rounds_of(devices, microbatches, longest)
    for device in range(devices):
        if virtual == 1:  # a micro-batch waits for no round
            warmup = devices - device - 1
            yield one_forward_one_backward(device, microbatches, warmup, per_update=microbatches)
        else:
            # A chunk's first backward comes back after a trip over all later devices and return.
            warmup = 2 * (devices - device - 1) + (virtual - 1) * len(rounds[0])
            turns = in_turns(device, devices, rounds, virtual, warmup)
            yield [*chain(*turns), *map(U, range(device, devices * virtual, devices))]


ABSENT = -1  # of the full table's micro-batches one that the batch does not have


def rounds_of(devices: int, microbatches: int, longest: int = 1) -> list[list[int]]:
    """Rounds of p micro-batches, of which the absent are spread evenly; or with `longest`, of p and
    more, the longer ones first.

    >>> rounds_of(4, 6), rounds_of(4, 9, longest=5)
    ([[0, 1, 2, -1], [3, 4, 5, -1]], [[0, 1, 2, 3, 4], [5, 6, 7, 8]])
    """
    most = longest if longest > 1 else devices
    count = -(-microbatches // most)  # rounded up
    if longest > 1 and microbatches // count < devices:
        raise ScheduleError(
            f"longest={longest!r}: rounds of {devices} to that many cannot make up {microbatches} "
            "micro-batches; leave it out, or give more"
        )
    return [[*r, *[ABSENT] * (devices - len(r))] for r in even_rounds(count, microbatches)]


def even_rounds(count: int, microbatches: int) -> list[list[int]]:
    """Micro-batches in order in `count` rounds, the longer ones first.

    >>> even_rounds(2, 5)
    [[0, 1, 2], [3, 4]]
    """
    size, longer = divmod(microbatches, count)
    ends = [*accumulate(size + (i < longer) for i in range(count))]
    return [[*range(a, b)] for a, b in pairwise((0, *ends))]


def in_turns(
    device: int, devices: int, rounds: list[list[int]], virtual: int, warmup: int
) -> list[list[Action]]:
    """What 1F1B over the chunks does in each turn, without the absent micro-batches."""
    chunks = range(device, devices * virtual, devices)  # its stages
    forwards = [F(stage, k) for batch in rounds for stage in chunks for k in batch]
    backwards = [B(stage, k) for batch in rounds for stage in reversed(chunks) for k in batch]
    turns = zip_longest(forwards, [*repeat(None, warmup), *backwards])
    return [[a for a in turn if a and a.microbatch != ABSENT] for turn in turns]
