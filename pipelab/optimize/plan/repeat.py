"""Seconds of tables with millions of actions: of a steady state, one period is enough.

A shorter table with the same warm-up and drain is simulated. If all actions in its middle come one
period later than those some rounds before, the rest of the whole table just adds periods. If
nothing repeats, a longer table is simulated, finally the whole one.
"""

from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from pipelab.predict.costs import Costs
from pipelab.predict.simulate import delays, durations, waits
from pipelab.schedules import make, takes
from pipelab.table.action import Kind
from pipelab.table.schedule import Schedule

ALIKE = 1e-12  # relative: seconds that differ by rounding
ROUNDS = 8  # of `round_of` micro-batches: the table in which a period is first looked for
IN_ROUNDS = ("pipedream_flush", "interleaved", "overlapped_1f1b", "zb_h1", "zb_h2", "seq1f1b")


def makespan(name: str, p: int, m: int, costs: Costs, **sizes: Any) -> float:
    """Seconds of one batch of a schedule with a flush, including its updates and the overhead of
    its first action; equal to the whole simulation's up to rounding.

    sizes  as for `table_of`

    >>> makespan("gpipe", 4, 8, Costs()), makespan("pipedream_flush", 4, 100_000, Costs())
    (33.0, 300009.0)
    """
    return settled(name, p, m, costs, **sizes)[1]


@lru_cache(maxsize=4096)
def settled(name: str, p: int, m: int, costs: Costs, **sizes: Any) -> tuple[int, float]:
    """Micro-batches of a table whose middle repeats, and `makespan`, of all m."""
    rounds = ROUNDS
    while True:
        slices = sizes.get("slices", 1)
        short = shorter(name, p, m, rounds, slices) if sizes.get("longest", 1) == 1 else m
        table = table_of(name, p, short, costs=costs, **sizes)
        ends = ends_of(table, costs)
        each = round_of(p, slices)
        more = (m - short) // each  # rounds that the whole table has
        if not more:
            return m, max(ends)
        turns, seconds = _period(table, ends, each * table.per_sequence)
        if turns and more % turns == 0:
            return short, max(ends) + more // turns * seconds
        rounds += more % turns if turns else rounds


def shorter(name: str, p: int, m: int, rounds: int = ROUNDS, slices: int = 1) -> int:
    """Micro-batches of a table with all parts of one with m: warm-up, rounds, drain."""
    each = round_of(p, slices)
    return min(m, m % each + rounds * each) if name in IN_ROUNDS else m


def round_of(p: int, slices: int) -> int:
    """Micro-batches of a round: p, or sequences with more slices than a device holds at once."""
    return p if slices == 1 else p // slices + 2


def table_of(
    name: str,
    p: int,
    m: int,
    *,
    virtual: int = 1,
    longest: int = 1,
    slices: int = 1,
    batches: int = 1,
    memory: float | None = None,
    costs: Costs,
) -> Schedule:
    """The table of a plan; if its schedule depends on costs, it is made for these. All slices of a
    sequence take equally long."""
    sizes: dict[str, Any] = {"virtual": virtual if takes(name, "virtual") else 1}
    sizes |= {"longest": longest, "slices": slices if takes(name, "slices") else None}
    if takes(name, "costs"):
        return _searched(name, p, m, batches=batches, costs=costs, memory=memory, **sizes)
    table = _table(name, p, m, batches=batches, **sizes)
    if slices > 1:
        return replace(table, slices=costs.even_slices(slices))
    paired = name == "dualpipe_v" and costs.together is not None
    return _in_pairs(table) if paired else table


def _make(name: str, p: int, m: int, **sizes: Any) -> Schedule:
    return make(name, p, m, **sizes)


# Many choices differ only in their costs. A searched table is asked for again and again.
_table, _searched = lru_cache(maxsize=32)(_make), lru_cache(maxsize=64)(_make)
_in_pairs = lru_cache(maxsize=32)(Schedule.overlap)


def ends_of(table: Schedule, costs: Costs) -> list[float]:
    """When each action of a table ends."""
    taken = [a + b for a, b in zip(durations(table, costs), waits(table, costs), strict=True)]
    return table.walk(taken, delays(table, costs)).end


def _period(table: Schedule, ends: list[float], p: int) -> tuple[int, float]:
    """A number of rounds, and the seconds by which actions in the middle of the table come later
    than those that many rounds before; (0, 0.0) if these seconds differ between actions.

    No action needs one that is more than two rounds older, in its row or in another. So if two
    rounds come that much later, all rounds after them do, too.
    """
    at: dict[tuple[int, Kind], np.ndarray] = {}
    for action, end in zip(table.actions, ends, strict=True):
        if action.kind is not Kind.U:
            cell = action.stage, action.kind
            at.setdefault(cell, np.zeros(table.microbatches))[action.microbatch] = end
    rounds = table.microbatches // p - 4  # without two of the warm-up and two of the drain
    middle = np.array([x[2 * p : (2 + rounds) * p] for x in at.values()])
    # Micro-batches between two turns of a critical circuit are at most p.
    for turns in range(1, min(rounds - 2, p) + 1):
        later = middle[:, turns * p :] - middle[:, : -turns * p]
        if np.ptp(later) <= ALIKE * max(ends):
            return turns, float(later.mean())
    return 0, 0.0
