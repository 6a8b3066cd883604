"""Seconds of tables with millions of actions: a steady state is one period, counted once.

Warm-up and drain are simulated. As soon as all clocks and messages stand as they stood c
micro-batches ago, only later by the same time, all that follows repeats until no forward is left:
so many periods are added at once. Where nothing repeats the whole table is simulated.

1F1B is simulated a diagonal at a time, all devices at once, without a table (stage s, p = 4):

    s = 0   F0 F1 F2 F3  .  .  . B0 F4 B1 F5      warm-up: F k at s + k
    s = 1    . F0 F1 F2  .  . B0 F3 B1 F4 B2      then: F k at 2 k + s, B k at 2 (k + p) - 1 - s
    s = 2    .  . F0 F1  . B0 F2 B1 F3 B2 F4
    s = 3    .  .  . F0 B0 F1 B1 F2 B2 F3 B3

p = 1024 and m = 4096, 8 million actions, take a third of a second.
"""

from functools import lru_cache
from typing import Any

import numpy as np

from pipelab.predict.costs import Costs
from pipelab.predict.simulate import compute_seconds, delays, durations, transfer_seconds, waits
from pipelab.schedules import make, takes
from pipelab.table.action import Kind
from pipelab.table.placement import loop_placement
from pipelab.table.schedule import Schedule

ALIKE = 1e-12  # relative: seconds that differ by rounding
ROUNDS = 8  # of p micro-batches: the table in which a period is looked for
IN_ROUNDS = ("interleaved", "zb_h1", "zb_h2")


def makespan(name: str, p: int, m: int, costs: Costs, virtual: int = 1, longest: int = 1) -> float:
    """Seconds of one batch of a schedule that flushes, its updates and what the first action loses
    before it starts included; to rounding those of the whole simulation.

    >>> makespan("pipedream_flush", 4, 8, Costs()), makespan("gpipe", 1024, 4096, Costs())
    (33.0, 15357.0)
    """
    if name in ("pipedream_flush", "gpipe"):
        forward, backward, last, link, update = _of_stages(p, costs)
        way = _one_forward_one_backward if name == "pipedream_flush" else _gpipe
        return float((way(forward, backward, last, link, m) + update).max())
    short = shorter(name, p, m)
    if name in IN_ROUNDS and m > short and longest == 1:
        table = table_of(name, p, short, virtual)
        ends = ends_of(table, costs)
        period = _period(table, ends, p)
        if period:
            return max(ends) + (m - short) // p * period
    return max(ends_of(table_of(name, p, m, virtual, longest=longest, costs=costs), costs))


def shorter(name: str, p: int, m: int) -> int:
    """Micro-batches of a table that has all that one of m has: warm-up, rounds, drain."""
    repeats = name == "pipedream_flush" or name in IN_ROUNDS
    return min(m, m % p + ROUNDS * p) if repeats else m


def table_of(
    name: str,
    p: int,
    m: int,
    virtual: int = 1,
    *,
    batches: int = 1,
    longest: int = 1,
    costs: Costs | None = None,
) -> Schedule:
    """The table of a plan; of one that is made for its costs, the one for these."""
    sizes = {"virtual": virtual if takes(name, "virtual") else 1, "longest": longest}
    return _table(
        name, p, m, batches=batches, costs=costs if takes(name, "costs") else None, **sizes
    )


# Many choices differ in their costs alone; of one that is searched for, time and memory are asked.
@lru_cache(maxsize=32)
def _table(name: str, p: int, m: int, **sizes: Any) -> Schedule:
    return make(name, p, m, **sizes)


def _of_stages(p: int, costs: Costs) -> tuple[np.ndarray, ...]:
    """Seconds of each stage's forward, backward, last backward, link behind it, and update; with
    what every action loses before it starts."""
    home = loop_placement(p)
    modes = [compute_seconds(costs, home, again) for again in (False, True)]
    again = costs.recomputed(2, 2)
    seconds = modes[0][Kind.F], modes[again[0]][Kind.B], modes[again[1]][Kind.B], modes[0][Kind.U]
    *passes, update = (np.array(x) + costs.overhead for x in seconds)
    return *passes, np.array([*transfer_seconds(costs, home), 0.0]), update


def _one_forward_one_backward(
    forward: np.ndarray,
    backward: np.ndarray,
    last: np.ndarray,
    link: np.ndarray,
    m: int,
) -> np.ndarray:
    """When each device has ended its last backward."""
    p, stages = len(forward), np.arange(len(forward))
    # [0] the device's clock; its last forward's and backward's end: all that the rest depends on
    state = np.zeros((3, p))
    clock, sent, back = state
    before, seen, gap = state.copy(), 0, 1

    def run(out: np.ndarray, first: int, stop: int, arrived: np.ndarray, own: np.ndarray) -> None:
        at = slice(first, stop, 1 if warm else 2)
        clock[at] = out[at] = np.maximum(clock[at], arrived[at]) + own[at]

    t, end = 0, 2 * (m + p) - 1
    while t < end:
        warm = t < p
        # [1] forwards: all at or above the diagonal, later every second one
        arrived = np.append(0.0, sent[:-1] + link[:-1])
        if warm:
            run(sent, max(0, t - m + 1), t + 1, arrived, forward)
        else:
            low = max(2 * p - 1 - t, t - 2 * m + 2, 0)
            low += (low - t) % 2
            run(sent, low, p, arrived, forward)
            # [2] backwards; the last micro-batch's is on the diagonal that the others have left
            low = max(2 * p - 1 - t, 0)
            low += (low - t - 1) % 2
            high = min(p, 2 * m + 2 * p - 1 - t)
            arrived = np.append(back[1:] + link[:-1], 0.0)
            own = np.where(stages == 2 * m + 2 * p - 3 - t, last, backward)
            run(back, low, high, arrived, own)
        t += 1
        # [3] a period: the same state, later by the same time on every device
        if 2 * p <= t < 2 * m and t % 2 == 0:
            later = state - before
            if seen and np.ptp(later) <= ALIKE * state.max():
                turns = (2 * m - 1 - t) // (t - seen)
                state += turns * later
                t += turns * (t - seen)
                seen = 0
            if not seen or t >= seen + gap:
                before, seen, gap = state.copy(), t, max(2, 2 * (t - seen) if seen else 2)
    return clock


def _gpipe(
    forward: np.ndarray, backward: np.ndarray, last: np.ndarray, link: np.ndarray, m: int
) -> np.ndarray:
    """The same of GPipe: on each device a micro-batch follows the one before it, or its input."""
    clock, number, ends = np.zeros(len(forward)), np.arange(m), np.zeros(m)
    for s, taken in enumerate(forward):
        ends = (number + 1) * taken + np.maximum.accumulate(ends - number * taken)
        clock[s] = ends[-1]
        ends = ends + link[s]
    ends = np.zeros(m)
    for s in reversed(range(len(forward))):
        ready = np.maximum(ends, clock[s])
        ends = (number + 1) * backward[s] + np.maximum.accumulate(ready - number * backward[s])
        ends[-1] += last[s] - backward[s]
        clock[s] = ends[-1]
        ends = ends + link[s - 1]
    return clock


def ends_of(table: Schedule, costs: Costs) -> list[float]:
    """When each action of a table ends."""
    taken = [a + b for a, b in zip(durations(table, costs), waits(table, costs), strict=True)]
    return table.walk(taken, delays(table, costs)).end


def _period(table: Schedule, ends: list[float], p: int) -> float:
    """Seconds of p micro-batches, if every stage's actions of three rounds in the middle come so
    much after those of the round before; 0 if they do not.

    No action needs one that is more than two rounds older, in its row or in another.
    """
    at: dict[Any, np.ndarray] = {}
    for action, end in zip(table.actions, ends, strict=True):
        if action.kind is not Kind.U:
            key = action.stage, action.kind
            at.setdefault(key, np.zeros(table.microbatches))[action.microbatch] = end
    middle = np.array([x[p * (ROUNDS - 6) : p * (ROUNDS - 2)] for x in at.values()])
    later = middle[:, p:] - middle[:, :-p]
    return float(later.mean()) if np.ptp(later) <= ALIKE * max(ends) else 0.0
