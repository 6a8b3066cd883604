"""Where idle time goes.

device 0   F F . . . . B     device 0 waits while stage 1 computes, and then while the gradient is
device 1   . F F B B . .     on its way
"""

import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import accumulate, pairwise
from operator import attrgetter
from typing import NamedTuple

from pipelab.table.action import HOST, Kind
from pipelab.table.schedule import Schedule
from pipelab.table.timing import Span


class Cause(StrEnum):
    """Why a device is idle; see `attribution`."""

    TRANSFER = "transfer"
    HELD = "held back by the order"
    FORWARD = "waiting for a forward"
    GRADIENT = "waiting for a gradient"
    NOTHING = "nothing left"
    OVERHEAD = "overhead"


class Stretch(NamedTuple):
    """A stretch of a device's time, spent in one way.

    cause  why it is idle; None: it computes
    stage  of the action that it computes or waits to start; None: nothing is left
    asks   the device that it waits for, if another one
    """

    begin: float
    end: float
    cause: Cause | None
    stage: int | None = None
    asks: int | None = None


def attribution(schedule: Schedule, spans: Sequence[Span]) -> dict[Cause, list[float]]:
    """Idle seconds of each device by cause; they add up to makespan - busy exactly.

    Before an action whose input was sent at e: `transfer` from e until it arrived; before e
    `held back by the order` if the input of a later forward of the row has arrived already and the
    action is not a forward, else `waiting for a forward` or `for a gradient`. After the last
    action: `nothing left`. Two that overlap wait for the later of their inputs. `overhead` is the
    time between the arrival of an action's input and its start: measured, or in a simulation
    `Costs.overhead`. If a copy to or from the host outlasts the action it overlaps with, the rest
    is `transfer`. The table must not have transfers written out.
    """
    idle = {cause: [0.0] * schedule.devices for cause in Cause}
    for d, row in enumerate(stretches(schedule, spans)):
        for begin, end, cause, *_ in row:
            if cause:
                idle[cause][d] += end - begin
    return idle


def waited_for(
    schedule: Schedule, spans: Sequence[Span]
) -> Iterator[tuple[float, float, str | int]]:
    """All idle time, by what makes a device wait: (begin, end, a stage or `transfer`, `overhead`).

    If an input is not ready, the device that makes it is asked: it computes for a stage, or is idle
    for a cause of its own. A device with nothing left asks the one that ends last.
    """
    rows = stretches(schedule, spans)

    def asked(device: int, begin: float, end: float, depth: int) -> Iterator:
        row = rows[device]
        first = max(bisect_right(row, begin, key=attrgetter("begin")) - 1, 0)
        for i in range(first, len(row)):
            if row[i].begin >= end:
                break
            since, until = max(row[i].begin, begin), min(row[i].end, end)
            if since < until:
                yield from known(row[i], since, until, depth)

    def known(stretch: Stretch, begin: float, end: float, depth: int) -> Iterator:
        if stretch.cause is None:
            yield begin, end, stretch.stage
        elif stretch.asks is not None and depth < schedule.devices:
            yield from asked(stretch.asks, begin, end, depth + 1)
        else:  # its own affair, or a circle of rounded times
            moves = stretch.cause is Cause.TRANSFER
            yield begin, end, Cause.TRANSFER if moves else Cause.OVERHEAD

    for row in rows:
        for stretch in row:
            if stretch.cause:
                yield from known(stretch, stretch.begin, stretch.end, 0)


def stretches(schedule: Schedule, spans: Sequence[Span]) -> list[list[Stretch]]:
    """The activity of each device from the first start to the last end, without gaps."""
    begin, finish = min(span.start for span in spans), max(span.end for span in spans)
    last = max(spans, key=lambda span: span.end).device
    arrival, device_of = schedule.arrivals(spans), schedule.device_of
    rows = []
    for a, b in pairwise(schedule.bounds):
        # [1] For each action, when the first input of this or a later forward of the row is there.
        forward = [span.action.kind is Kind.F for span in spans[a:b]]
        ready = [arrival[i] if forward[i - a] else math.inf for i in range(a, b)]
        soonest = [math.inf, *accumulate(reversed(ready), min)][::-1]
        free, row = begin, []
        for i, span in enumerate(spans[a:b]):
            # [2] The gap before the action: from when the row is free to its start. Of two that
            # overlap it is before the one whose input came later.
            closes = max(span.start, free)
            late = a + i
            if late + 1 in schedule.joined and arrival[late + 1] > arrival[late]:
                late += 1
            fed, stage = spans[late], spans[late].action.stage
            is_forward = forward[late - a]
            # [3] In it, when the input was sent and arrived; an input that never moved: at once.
            sent = free if fed.sent is None else min(max(fed.sent, free), closes)
            arrived = sent if fed.arrived is None else min(max(fed.arrived, sent), closes)
            # [4] In it, from when on this or a later forward of the row could have run instead.
            held = sent if is_forward else min(max(soonest[i], free), sent)
            source = schedule.inputs[late]
            maker = None if source is None else device_of[source]
            copies = Cause.TRANSFER if span.action.kind in HOST else None
            row += [
                Stretch(free, held, Cause.FORWARD if is_forward else Cause.GRADIENT, stage, maker),
                Stretch(held, sent, Cause.HELD, stage, maker),
                Stretch(sent, arrived, Cause.TRANSFER, stage),
                Stretch(arrived, closes, Cause.OVERHEAD, stage),
                Stretch(closes, max(closes, span.end), copies, span.action.stage),
            ]
            free = max(free, span.end)
        row.append(Stretch(free, finish, Cause.NOTHING, None, last))
        rows.append([stretch for stretch in row if stretch.begin < stretch.end])
    return rows
