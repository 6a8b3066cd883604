"""How a draft could go on: finish it, the next move with its ties, one micro-batch's block stamped
over all."""

from functools import lru_cache
from math import inf
from operator import add
from typing import NamedTuple

from pipelab.editor.puzzle.draft import Draft, Refused
from pipelab.editor.puzzle.recognise import known_rows
from pipelab.editor.puzzle.task import Task
from pipelab.table.action import Action, Kind, insert_updates

STEPS = 300  # of a search: a third of a second
PROOF = 20_000  # steps
SLACK = 1e-9  # the same seconds are added up in different orders
Times = dict[Action, float]


class Advice(NamedTuple):
    """The move that the coach would make, others that lead to as good a table, and its makespan.

    reason  a clause: why this move
    """

    move: Action
    ties: list[Action]
    makespan: float
    reason: str


@lru_cache(maxsize=64)
def coach(draft: Draft, steps: int = STEPS) -> Advice:
    """The next move of the best way to go on, in the order of time; ties are as good.

    Of forwards that begin a micro-batch only the first counts: the others are the same table with
    other numbers. Refused where nothing is left, or `finish` refuses.
    """
    best = finish(draft, steps)
    if draft.whole:
        raise Refused("the table is complete: nothing is left to place")
    # The next one of every device: by their times alone, those of no length could come too early.
    rows = zip(best.rows, draft.rows, strict=True)
    following = [a for row, placed in rows for a in row[len(placed) :][:1]]
    move = min(draft.able(following), key=lambda a: (best.spans[a], a.stage))
    makespan = best.timeline.makespan
    instead = {
        a: finish(draft.put(a), steps).timeline.makespan
        for a in draft.ready()
        if a != move
        and draft.task.device(a) == draft.task.device(move)
        and a not in _begins(draft.left(0))[1:]
    }
    ties = [a for a, span in instead.items() if span <= makespan * (1 + SLACK)]
    return Advice(move, ties, makespan, _reason(draft, move, makespan, instead))


def _reason(draft: Draft, move: Action, makespan: float, instead: Times) -> str:
    """A clause on why a move is the coach's: what others would cost, or who waits for it."""
    task, device = draft.task, draft.task.device(move)
    for action, span in instead.items():
        if span > makespan * (1 + SLACK):
            return f"with {action} in its place I find nothing below {span:g}"
    waiting = [a for a in task.needs if move in task.needs[a] and task.device(a) != device]
    if waiting:
        return f"since {waiting[0]} on device {task.device(waiting[0])} waits for it"
    if task.caps and sum(task.in_flight(draft.rows[device])[-1:]) == task.caps[device]:
        return f"since device {device} holds all that it may"
    return "since any other is no better" if instead else f"since device {device} can do no other"


def _begins(actions: list[Action]) -> list[Action]:
    """The forwards among them that begin a micro-batch."""
    return [a for a in actions if a.kind is Kind.F and a.stage == 0]


def finish(draft: Draft, steps: int = STEPS) -> Draft:
    """The best whole table that is found to go on from a draft.

    The rest in the order of each schedule of the library is tried, then a search for something
    shorter. Of equally short ones the one that holds least counts. Refused if what is placed cannot
    become whole.
    """
    if draft.problem:
        raise Refused(f"this cannot be finished: {draft.problem}")
    if stuck := draft.placed - draft.running.placed:
        raise Refused(
            f"this cannot be finished yet: {min(stuck)} waits for an action that is not placed"
        )
    if not draft.can_finish:
        raise Refused(
            "this cannot be finished: within the cap, no micro-batch can reach its last stage and "
            "come back"
        )
    if draft.whole:
        return draft
    found = []
    for _, rows in known_rows(draft.task):
        # What is placed, then the rest as the schedule has it.
        rest = [[a for a in row if a not in draft.placed] for row in rows]
        tried = Draft.of(draft.task, map(add, draft.rows, map(tuple, rest)))
        if not tried.problem:
            found.append(tried)
    below = min((tried.timeline.makespan for tried in found), default=inf)
    found += best_finish(draft, below, max(steps, draft.size + 1))[0]
    assert found, "a search without a limit goes straight to a whole table"
    # Updates that follow by themselves are not in the search's times.
    return min(found, key=lambda d: (d.timeline.makespan, sum(d.completed.peak_in_flight)))


# ---- the shortest way to go on, by branch and bound


def best_finish(draft: Draft, below: float, steps: int) -> tuple[list[Draft], int]:
    """Whole tables found in so many steps, each shorter than the one before it and than `below`,
    and how many steps are left: with any left, there is no shorter table.

    At each step one device goes on: the one that would be the first to be done with something.
    Its choices are all that it could start until then, since it may pay to wait. A choice is given
    up when no order of the rest could be shorter than the best table so far.
    """
    found = []
    stack = [(draft, _ends(draft))]
    while stack and steps:
        now, ends = stack.pop()
        steps -= 1
        least, starts = _least(now, ends)
        if least >= below - SLACK:
            continue
        if now.whole:
            found.append(now)
            below = least
            continue
        for action in reversed(_choices(now, starts)):
            end = starts[action] + now.task.seconds[action]
            stack.append((now.put(action), {**ends, action: end}))
    return found, steps


def _choices(draft: Draft, starts: Times) -> list[Action]:
    """Actions that the device that would be done first could start until then: backwards first."""
    task, able = draft.task, draft.ready()
    ends = {a: starts[a] + task.seconds[a] for a in able}
    first = min(able, key=ends.__getitem__)
    rivals = [
        a
        for a in able
        if a == first or (task.device(a) == task.device(first) and starts[a] < ends[first] - SLACK)
    ]
    rivals.sort(
        key=lambda a: (a.kind is Kind.W, a.kind is Kind.F, starts[a], a.microbatch, -a.stage)
    )
    twins = [] if task.by_hand else _begins(rivals)[1:]  # the same tables with other numbers
    return [a for a in rivals if a not in twins]


def least_makespan(draft: Draft) -> float:
    """The makespan that no table can beat which begins like this legal draft."""
    return _least(draft, _ends(draft))[0]


def _ends(draft: Draft) -> Times:
    return {a: draft.spans[a][1] for a in draft.placed}


def _least(draft: Draft, ends: Times) -> tuple[float, Times]:
    """The least makespan where these actions end then, and the earliest start of all others.

    Every micro-batch has its way to go; every device has its work, before it what has to be there
    first, and after it what follows on other devices. A makespan counts from the first start, after
    what that action loses before it.
    """
    task, seconds, follows = draft.task, draft.task.seconds, seconds_after(draft.task)
    free = [max((ends[a] for a in row), default=0.0) for row in draft.rows]
    least = max(free)
    starts: Times = {}
    work: list[list[Action]] = [[] for _ in free]
    for action in task.needs:
        if action not in ends:
            device = task.device(action)
            start = free[device]
            for need in task.needs[action]:
                end = ends[need] if need in ends else starts[need] + seconds[need]
                start = max(start, end + task.way(need, action))
            starts[action] = start
            least = max(least, start + seconds[action] + follows[action])
            if seconds[action]:
                work[device].append(action)
    for mine in filter(None, work):
        begin = min(starts[a] for a in mine)
        least = max(least, begin + sum(seconds[a] for a in mine) + min(follows[a] for a in mine))
    return least - task.costs.overhead, starts


@lru_cache(maxsize=8)
def seconds_after(task: Task) -> Times:
    """The seconds that follow every action at the least."""
    follows = dict.fromkeys(task.needs, 0.0)
    for action in reversed(task.needs):
        for need in task.needs[action]:
            after = task.way(need, action) + task.seconds[action] + follows[action]
            follows[need] = max(follows[need], after)
    return follows


def prove(task: Task, par: float) -> str:
    """Why no table of a task ends before `par`, in sentences.

    >>> print(prove(Task(devices=2, microbatches=2), 9))
    Device 1 has 6 of work. 1 pass before it can begin, and 2 follow its last action: 9 at least.
    """
    empty, follows = Draft.of(task), seconds_after(task)
    least, starts = _least(empty, {})
    bounds = []
    for device, row in enumerate(task.actions):
        takes = [a for a in row if task.seconds[a]]
        work = sum(task.seconds[a] for a in takes)
        before, after = min(starts[a] for a in takes), min(follows[a] for a in takes)
        words = f"{before:g} pass before it can begin, and {after:g} follow its last action"
        bounds.append((before + work + after, f"Device {device} has {work:g} of work. {words}"))
    total, words = max(bounds)
    said = f"{words}: {total:g} at least."
    if least >= par - SLACK:
        return said
    # Only where micro-batches are alike does the search leave out no table that could be shorter.
    found, left = best_finish(empty, par, PROOF) if task.simple else ([], 0)
    if found or not left:
        raise Refused(f"there is no proof that nothing ends before {par:g}")
    return (
        f"{said} That alone does not forbid an end before {par:g}, so a search tries every way to "
        "begin. It drops a beginning as soon as what is left of it takes too long: after "
        f"{PROOF - left} beginnings, none is left."
    )


# ---- a block


def stamp(draft: Draft, microbatch: int = 0, interval: float | None = None) -> Draft:
    """The whole table in which every micro-batch does what this one does, `interval` later.

    The block of a micro-batch is when its actions start in the draft. Its copies are put in the
    order of their starts; where two want a device at once, the one that began earlier goes first.
    The interval is what the busiest device does for one micro-batch, if it is not given. Refused
    where the block is not whole, or where its copies do not make a table.

    >>> from pipelab.editor.puzzle import Task, read
    >>> first = read(Task(devices=2, microbatches=4), "0F0 0B0 ~ 1F0 1B0")
    >>> stamp(first).completed.peak_in_flight
    [2, 1]
    """
    task = draft.task
    block = [a for a in task.needs if a.microbatch == microbatch and a.kind is not Kind.U]
    missing = [a for a in block if a not in draft.placed]
    if missing or not block:
        what = f"{missing[0]} is not placed yet" if missing else "there is no such micro-batch"
        raise Refused(f"micro-batch {microbatch} cannot be stamped: {what}")
    if draft.problem:
        raise Refused(f"this cannot be stamped: {draft.problem}")
    if interval is None:
        load = [0.0] * task.devices
        for action in block:
            load[task.device(action)] += task.seconds[action]
        interval = max(load)
    begins = {
        a._replace(microbatch=k): (draft.spans[a][0] + k * interval, k)
        for a in block
        for k in range(task.table.total)
    }
    rows = [sorted(begins.keys() & {*row}, key=lambda a: begins[a]) for row in task.actions]
    if task.by_hand:
        rows = insert_updates(rows, task.per_update)
    stamped = Draft.of(task, rows)
    if stamped.problem:
        raise Refused(f"stamped every {interval:g}, this does not run: {stamped.problem}")
    return stamped
