"""How a draft could go on: finish it, the next move with its ties, one micro-batch's block stamped
over all."""

from collections.abc import Iterator
from functools import lru_cache
from math import inf
from typing import NamedTuple

from pipelab.action import Action, Kind, insert_updates
from pipelab.puzzle.draft import Draft, Refused, can_finish
from pipelab.puzzle.known import known_rows
from pipelab.puzzle.search import search


class Advice(NamedTuple):
    """The move that the coach would make, others that lead to as good a table, and its makespan."""

    move: Action
    ties: list[Action]
    makespan: float


STEPS = 300  # of a search: a third of a second


def finish(draft: Draft, steps: int = STEPS) -> Draft:
    """The best whole table that is found to go on from a draft.

    The rest in the order of each schedule of the library is tried, then a search for something
    shorter. Of equally short ones the one that holds least counts. Refused if what is placed cannot
    become whole.
    """
    if draft.problem:
        raise Refused(f"this cannot be finished: {draft.problem}")
    if stuck := draft.placed - draft.running.placed:
        raise Refused(f"this cannot be finished yet: {min(stuck)} waits for what is not placed")
    if not can_finish(draft):
        raise Refused("no micro-batch can go on to its last stage and back within the cap")
    if draft.whole:
        return draft
    known = [tried for tried in _as_known(draft) if not tried.problem]
    best = min(known, key=_length_and_memory, default=None)
    below = best.timeline.makespan if best else inf
    found = search(draft, below, max(steps, draft.size + 1))
    assert best or found, "a search without a limit goes straight to a whole table"
    # Updates that follow by themselves are not in the search's times.
    return min(filter(None, (best, found)), key=_length_and_memory)


def _length_and_memory(draft: Draft) -> tuple[float, int]:
    return draft.timeline.makespan, sum(draft.completed.peak_in_flight)


def _as_known(draft: Draft) -> Iterator[Draft]:
    """What is placed, then the rest as each known schedule has it."""
    for _, rows in known_rows(draft.task):
        rest = [[a for a in row if a not in draft.placed] for row in rows]
        both = zip(draft.rows, rest, strict=True)
        yield Draft.of(draft.task, [[*row, *more] for row, more in both])


@lru_cache(maxsize=64)
def coach(draft: Draft, steps: int = STEPS) -> Advice:
    """The next move of the best way to go on, in the order of time; ties are as good.

    Of forwards that begin a micro-batch only the first counts: the others are the same table with
    other numbers. Refused where nothing is left, or `finish` refuses.
    """
    best = finish(draft, steps)
    if draft.whole:
        raise Refused("the table is whole: there is nothing left to place")
    # The next one of every device: by their times alone, those of no length could come too early.
    rows = zip(best.rows, draft.rows, strict=True)
    following = [a for row, placed in rows for a in row[len(placed) :][:1]]
    able = [a for a in following if draft.placed.issuperset(draft.task.needs[a])]
    move = min(able, key=lambda a: (best.span(a), a.stage))
    makespan = best.timeline.makespan
    ties = [
        a
        for a in draft.ready()
        if a != move
        and draft.task.device(a) == draft.task.device(move)
        and not (a.kind is Kind.F and a.stage == 0 and a > _next_start(draft))
        and finish(draft.put(a), steps).timeline.makespan <= makespan * (1 + 1e-9)
    ]
    return Advice(move, ties, makespan)


def _next_start(draft: Draft) -> Action:
    """The forward that begins the first micro-batch that has none yet."""
    return next(a for a in draft.left(0) if a.kind is Kind.F and a.stage == 0)


def stamp(draft: Draft, microbatch: int = 0, interval: float | None = None) -> Draft:
    """The whole table in which every micro-batch does what this one does, `interval` later.

    The block of a micro-batch is when its actions start in the draft. Its copies are put in the
    order of their starts; where two want a device at once, the one that began earlier goes first.
    The interval is what the busiest device does for one micro-batch, if it is not given. Refused
    where the block is not whole, or where its copies do not make a table.

    >>> from pipelab.puzzle import Task, read
    >>> first = read(Task(devices=2, microbatches=4), "0F0 0B0 ~ 1F0 1B0")
    >>> stamp(first).completed.peak_in_flight
    [2, 1]
    """
    task = draft.task
    block = _block(draft, microbatch)
    if draft.problem:
        raise Refused(f"this cannot be stamped: {draft.problem}")
    if interval is None:
        load = [0.0] * task.devices
        for action in block:
            load[task.device(action)] += task.seconds[action]
        interval = max(load)
    begins = {
        a._replace(microbatch=k): (draft.span(a)[0] + k * interval, k)
        for a in block
        for k in range(task.total)
    }
    rows = [
        sorted((a for a in row if a in begins), key=lambda a: begins[a]) for row in task.actions
    ]
    if task.by_hand:
        with_updates = insert_updates(rows, task.per_update)
        rows = [[*row] for row in task.schedule_of("stamped", with_updates).rows]
    stamped = Draft.of(task, rows)
    if stamped.problem:
        raise Refused(f"stamped every {interval:g}, this block makes no table: {stamped.problem}")
    return stamped


def _block(draft: Draft, microbatch: int) -> list[Action]:
    """All that a micro-batch has to do; Refused if it is not placed."""
    every = (a for row in draft.task.actions for a in row)
    block = [a for a in every if a.microbatch == microbatch and a.kind is not Kind.U]
    missing = [a for a in block if a not in draft.placed]
    if missing or not block:
        what = f"{missing[0]} is missing" if missing else "there is no such micro-batch"
        raise Refused(f"the block of micro-batch {microbatch} is not whole: {what}")
    return block
