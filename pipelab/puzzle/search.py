"""The shortest way to go on from a draft, by branch and bound."""

from graphlib import TopologicalSorter

from pipelab.action import Action, Kind
from pipelab.puzzle.draft import Draft, can_finish, over_cap
from pipelab.puzzle.task import Task

SLACK = 1e-9  # the same seconds are added up in different orders
Ends = dict[Action, float]


def search(draft: Draft, below: float, steps: int) -> Draft | None:
    """The shortest whole table found in so many steps, if it takes less than `below`.

    At each step one device goes on: the one that would be the first to be done with something.
    Its choices are all that it could start until then, since it may pay to wait. A choice is given
    up when no order of the rest could be shorter than the best table so far.
    """
    best, bound = None, Bound(draft.task)
    stack = [(draft, {a: draft.span(a)[1] for a in draft.placed})]
    while stack and steps:
        now, ends = stack.pop()
        steps -= 1
        least, starts = bound(now, ends)
        if least >= below - SLACK:
            continue
        if now.whole:
            best, below = now, least
            continue
        for action in reversed(_choices(now, ends, starts)):
            end = starts[action] + now.task.seconds[action]
            stack.append((now.put(action), {**ends, action: end}))
    return best


def _choices(draft: Draft, ends: Ends, starts: Ends) -> list[Action]:
    """What the device that would be done first could start until then: backwards first."""
    task = draft.task
    able = [a for a in starts if all(need in ends for need in task.needs[a])]
    able = [a for a in able if a.kind is not Kind.F or _leaves_room(draft, a)]
    if not able:
        return []
    first = min(able, key=lambda a: starts[a] + task.seconds[a])
    until = starts[first] + task.seconds[first] - SLACK
    device = task.device(first)
    rivals = [a for a in able if a == first or (task.device(a) == device and starts[a] < until)]
    rivals.sort(
        key=lambda a: (a.kind is Kind.W, a.kind is Kind.F, starts[a], a.microbatch, -a.stage)
    )
    fresh = [a for a in rivals if a.kind is Kind.F and a.stage == 0]
    twins = [] if task.by_hand else fresh[1:]  # the same tables with other numbers
    return [a for a in rivals if a not in twins]


def _leaves_room(draft: Draft, forward: Action) -> bool:
    after, device = draft.put(forward), draft.task.device(forward)
    return not over_cap(draft.task, device, after.rows[device]) and can_finish(after)


class Bound:
    """What no way to go on can beat.

    Every micro-batch has its way to go; every device has its work, before it what has to be there
    first, and after it what follows on other devices.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.order = [*TopologicalSorter(task.needs).static_order()]
        self.tail = dict.fromkeys(self.order, 0.0)  # seconds that follow an action at the least
        for action in reversed(self.order):
            for need in task.needs[action]:
                after = task.seconds[action] + task.way(need, action) + self.tail[action]
                self.tail[need] = max(self.tail[need], after)

    def least(self, draft: Draft) -> float:
        """The least makespan of a table that begins like this legal draft."""
        return self(draft, {a: draft.span(a)[1] for a in draft.placed})[0]

    def __call__(self, draft: Draft, ends: Ends) -> tuple[float, Ends]:
        """The least makespan, and of every action that is left the earliest start."""
        task, seconds = self.task, self.task.seconds
        free = [max((ends[a] for a in row), default=0.0) for row in draft.rows]
        starts: Ends = {}
        least = max(free)
        for action in self.order:
            if action not in ends:
                start = free[task.device(action)]
                for need in task.needs[action]:
                    end = ends[need] if need in ends else starts[need] + seconds[need]
                    start = max(start, end + task.way(need, action))
                starts[action] = start
                least = max(least, start + seconds[action] + self.tail[action])
        for device in range(task.devices):
            work = [a for a in starts if task.device(a) == device and seconds[a]]
            if work:
                begin = min(starts[a] for a in work)
                follows = min(self.tail[a] for a in work)
                least = max(least, begin + sum(seconds[a] for a in work) + follows)
        return least, starts
