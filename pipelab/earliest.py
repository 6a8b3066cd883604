"""When each action can start: the one walk over a table that the validator, the simulator and the grid share."""

from __future__ import annotations

from collections.abc import Sequence


def earliest(
    bounds: Sequence[int],
    needs: Sequence[int],
    device: Sequence[int],
    duration: Sequence[float],
    delay: Sequence[float],
) -> tuple[list[float], list[float], list[int]]:
    """Start and end of every action when each starts as soon as its row and its input allow; linear in the table.

    All arguments are flat over the table, rows from bounds[d] to bounds[d + 1]. `needs[i]` is the action whose output i
    takes, which arrives `delay[i]` after that action ends; -1 for none; -2 - j for a rendezvous with j: both start together.
    Returns starts, ends and the head of each row: a head before the row's bound is an action that can never start.
    """
    count = len(needs)
    start, end = [0.0] * count, [-1.0] * count
    waiter = [-1] * count  # the device that waits for an action, as every output has one taker
    head, clock = list(bounds[:-1]), [0.0] * (len(bounds) - 1)
    ready = list(range(len(head)))
    while ready:
        d = ready.pop()
        i, t, stop = head[d], clock[d], bounds[d + 1]
        while i < stop:
            j = needs[i]
            if j >= 0:
                there = end[j]
                if there < 0:
                    waiter[j] = d
                    break
                there += delay[i]
                if there > t:
                    t = there
            elif j < -1:
                j = -2 - j
                other = device[j]
                if other == d or head[other] != j:
                    break  # its row looks here when it gets to j
                t = max(t, clock[other])
                start[j], end[j] = t, t + duration[j]
                clock[other], head[other] = end[j], j + 1
                ready.append(other)
            start[i] = t
            t += duration[i]
            end[i] = t
            if waiter[i] >= 0:
                ready.append(waiter[i])
            i += 1
        clock[d], head[d] = t, i
    return start, end, head
