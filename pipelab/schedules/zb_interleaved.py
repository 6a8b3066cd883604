"""Interleaved 1F1B with split backwards: torch's InterleavedZeroBubble, after arXiv 2401.10241.

0F0 0F1 2F0 .   2I0 2W0 2F1 .   2I1 2W1 0I0 0W0 0I1 0W1 0U0 2U0     half of interleaved's warm-up,
.   1F0 1F1 3F0 3I0 3F1 3I1 3W0 1I0 3W1 1I1 1W0 1W1 1U0 3U0 .       and a W a rank behind its I
"""

from collections.abc import Iterable, Iterator
from itertools import chain

from pipelab.schedules.interleaved import even_rounds, in_turns
from pipelab.schedules.rows import Rows, flush
from pipelab.table.action import Action, Kind, U


@flush
def zb_interleaved(devices: int, microbatches: int, virtual: int = 2) -> Rows:
    """`interleaved` with split backwards: on device d, W comes d backwards after its I.

    If p does not divide m, rounds are longer than p, as torch's: floor(m / p) of them, or one. So
    none waits for micro-batches that are absent, but more are in flight. With virtual=1 it is
    `zb_h1`, row for row.

    >>> zb_interleaved(4, 8, virtual=2).peak_in_flight
    [8, 8, 8, 8]
    """
    rounds = even_rounds(max(1, microbatches // devices), microbatches)
    for device in range(devices):
        warmup = devices - device - 1 + (virtual - 1) * len(rounds[0])
        turns = in_turns(device, devices, rounds, virtual, warmup)
        row = _split(chain(*turns), behind=device)
        yield [*row, *map(U, range(device, devices * virtual, devices))]


def _split(row: Iterable[Action], behind: int) -> Iterator[Action]:
    """Every B as I, and its W after the I of as many further ones."""
    waiting: list[Action] = []
    for action in row:
        if action.kind is Kind.B:
            yield action._replace(kind=Kind.I)
            waiting.append(action._replace(kind=Kind.W))
            if len(waiting) > behind:
                yield waiting.pop(0)
        else:
            yield action
    yield from waiting
