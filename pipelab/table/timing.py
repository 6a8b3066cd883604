"""When actions run: spans, and the walk that the validator, the simulator and the grid share."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from pipelab.table.action import Action


class Span(NamedTuple):
    """An action's compute, in seconds.

    version        the weight version that it reads, or that an update makes; -1 for a transfer
    sent, arrived  when its input was, if that came from another device
    """

    device: int
    action: Action
    version: int
    start: float
    end: float
    sent: float | None = None
    arrived: float | None = None


class Walk(NamedTuple):
    """Start and end of every action, flat over the table; head: the first action of each row that
    can never start, or the row's bound."""

    start: list[float]
    end: list[float]
    head: list[int]


def earliest(
    bounds: Sequence[int],
    needs: Sequence[int | None],
    device: Sequence[int],
    duration: Sequence[float],
    delay: Sequence[float],
    joined: Collection[int] = (),
) -> Walk:
    """Start every action as soon as its row and its input allow; linear in the table.

    All arguments are flat over the table, rows from bounds[d] to bounds[d + 1]. Action i needs what
    needs[i] makes, if any, delay[i] after its end. Two actions that need each other start together.
    A joined one starts with the one before it, and the row continues when both have ended.
    """
    start, end = [0.0] * len(needs), [-1.0] * len(needs)  # an end below 0: it has not run
    waiter: dict[int, int] = {}  # action -> the device that waits for it; an output has one taker
    head, clock, ready = [*bounds[:-1]], [0.0] * (len(bounds) - 1), [*range(len(bounds) - 1)]
    while ready:
        # [1] Take a row that may go on, from its first action that has not run.
        d = ready.pop()
        i, now, stop = head[d], clock[d], bounds[d + 1]
        while i < stop:
            source = needs[i]
            if source is not None:
                if end[source] >= 0:
                    # [2] What it needs is made: it arrives after its delay.
                    arrived = end[source] + delay[i]
                    if arrived > now:
                        now = arrived
                elif needs[source] == i:
                    # [3] A rendezvous: the row that comes second to it runs both sides.
                    other = device[source]
                    if other == d or head[other] != source:
                        break
                    now = max(now, clock[other])
                    start[source] = now
                    clock[other] = end[source] = now + duration[source]
                    head[other] = source + 1
                    ready.append(other)
                else:
                    # [4] What it needs is not made: the row stops until its maker wakes it.
                    waiter[source] = d
                    break
            # [5] One that the next is joined to waits for that one's input, too.
            if joined and i + 1 in joined and (source := needs[i + 1]) is not None:
                if end[source] < 0:
                    waiter[source] = d
                    break
                now = max(now, end[source] + delay[i + 1])
            # [6] The action runs, and wakes the row that waits for its output.
            start[i] = start[i - 1] if joined and i in joined else now
            end[i] = start[i] + duration[i]
            now = max(now, end[i])
            if i in waiter:
                ready.append(waiter[i])
            i += 1
        clock[d], head[d] = now, i
    return Walk(start, end, head)
