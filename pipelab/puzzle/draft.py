"""A table that is being made: what is placed so far, what may come next, and why something may not.

    device 0   0F0 0F1 .   .         device 0 could go on with 0F2; with a cap of 2 it could not
    device 1   .   1F0 .             1F1 is ready on device 1, and so is 1B0 (it is the last stage)

The rest, in an order that always works, completes every draft to a whole table. That one is
simulated, which validates it, and what is placed has its times from there.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from pipelab.action import Action, Kind, ScheduleError
from pipelab.puzzle.task import Task
from pipelab.schedule import Schedule
from pipelab.simulate import simulate
from pipelab.timeline import Timeline

Rows = tuple[tuple[Action, ...], ...]
Span = tuple[float, float]


class Refused(ScheduleError):
    """A move that the rules do not allow; the message says what forbids it."""


@dataclass(frozen=True)
class Draft:
    """Some of a task's actions, placed in rows. Moves give a new draft.

    >>> draft = Draft.of(Task(devices=2, microbatches=2))
    >>> draft = draft.place("0F0").place("1F0")
    >>> print(*draft.ready())
    0F1 1B0
    >>> draft.place("0B0")
    Traceback (most recent call last):
    pipelab.puzzle.draft.Refused: 0B0 needs 1B0 first, which is not placed yet
    """

    task: Task
    rows: Rows

    @classmethod
    def of(cls, task: Task, rows: Iterable[Iterable[Action]] = ()) -> "Draft":
        """A draft with these rows, or an empty one. They are not checked; see `settled`."""
        return cls(task, tuple(map(tuple, rows)) or ((),) * task.devices)

    # ---- what is there

    @cached_property
    def placed(self) -> frozenset[Action]:
        return frozenset(a for row in self.rows for a in row)

    @property
    def count(self) -> int:
        return sum(map(len, self.rows))

    @property
    def size(self) -> int:
        """How many actions a whole table has."""
        return sum(map(len, self.task.actions))

    @property
    def whole(self) -> bool:
        return self.count == self.size

    def left(self, device: int) -> list[Action]:
        """The device's actions that are not placed yet."""
        return [a for a in self.task.actions[device] if a not in self.placed]

    @cached_property
    def completed(self) -> Schedule:
        """The whole table: what is placed, then the rest in an order that can run."""
        rows = [[*row, *self.left(d)] for d, row in enumerate(self.rows)]
        return self.task.schedule_of("your table", rows)

    @cached_property
    def timeline(self) -> Timeline:
        """`completed` simulated; ScheduleError if what is placed cannot be part of a table."""
        return simulate(self.completed, self.task.stage_costs)

    @cached_property
    def problem(self) -> str:
        """Why what is placed cannot be part of a table, in one line; "" if it can."""
        for device, row in enumerate(self.rows):
            if over := over_cap(self.task, device, row):
                return over
        try:
            _ = self.timeline  # simulating validates
        except ScheduleError as error:
            return str(error).partition("\n")[0].removeprefix("your table: ")
        return ""

    @property
    def schedule(self) -> Schedule:
        """The table, if it is whole and right. ScheduleError if not."""
        if self.problem:
            raise ScheduleError(self.problem)
        if not self.whole:
            raise ScheduleError(f"{self.size - self.count} of {self.size} actions are missing")
        return self.completed

    def span(self, action: Action) -> Span:
        """From when to when an action of `completed` runs."""
        i = self.completed.position[action.kind, action.stage, action.microbatch]
        return float(self.timeline.start[i]), float(self.timeline.end[i])

    # ---- moves

    def place(
        self, action: Action | str, index: int | None = None, until: float | None = None
    ) -> "Draft":
        """The draft with one action more; Refused where a rule forbids it, with the reason.

        index  its place in its device's row; default: at the end
        until  the end of the gap that it is placed in: it has to start before
        """
        action = Action.parse(action) if isinstance(action, str) else action
        draft = self.put(action, index)
        if reason := self.refusal(draft, action, until):
            raise Refused(reason)
        return draft

    def put(self, action: Action, index: int | None = None) -> "Draft":
        """As `place`, but no rule is asked: only that the action exists and is not placed yet."""
        self.task.check(action)
        device = self.task.device(action)
        row = self.rows[device]
        if action in self.placed:
            raise Refused(f"{action} is placed already, on device {device}")
        at = len(row) if index is None else index
        return self.with_row(device, (*row[:at], action, *row[at:]))

    def with_row(self, device: int, row: Sequence[Action]) -> "Draft":
        rows = (*self.rows[:device], tuple(row), *self.rows[device + 1 :])
        return replace(self, rows=rows)

    def refusal(self, after: "Draft", action: Action, until: float | None = None) -> str:
        """What forbids the move that leads to the draft `after`; "" if nothing does."""
        missing = [a for a in self.task.needs[action] if a not in self.placed]
        if missing:
            return f"{action} needs {missing[0]} first, which is not placed yet"
        if after.problem:
            return after.problem
        ends = {need: after.span(need)[1] for need in self.task.needs[action]}
        if ends and until is not None and after.span(action)[0] >= until:
            last = max(ends, key=lambda need: ends[need])
            return (
                f"{action} cannot start before {until:g}: {last} ends at {ends[last]:g} on device "
                f"{self.task.device(last)}"
            )
        if action.kind is Kind.F and not can_finish(after):
            return (
                f"{action} would leave no room: no micro-batch could go on to its last stage and "
                "back any more within the cap"
            )
        return ""

    def remove(self, action: Action) -> "Draft":
        """The draft without an action and without all that is not possible without it."""
        rows = [tuple(a for a in row if a != action) for row in self.rows]
        return replace(self, rows=tuple(rows)).settled()

    def settled(self) -> "Draft":
        """The draft without what cannot run with nothing else placed, within the cap."""
        return Draft(self.task, runnable(self.task, self.rows, skip=True))

    @cached_property
    def running(self) -> "Draft":
        """Of every row what runs before something in it cannot; of a legal draft, all of it."""
        kept = runnable(self.task, self.rows, skip=False)
        return self if kept == self.rows else Draft(self.task, kept)

    def ready(self) -> list[Action]:
        """Every action that may be placed at the end of its row."""
        found = []
        for device, row in enumerate(self.rows):
            for action in self.left(device):
                there = self.placed.issuperset(self.task.needs[action])
                room = action.kind is not Kind.F or not over_cap(self.task, device, [*row, action])
                if there and room and can_finish(self.put(action)):
                    found.append(action)
        return found


def in_flight(task: Task, row: Iterable[Action]) -> list[int]:
    """After each action of a row, how many micro-batches the device holds for a backward."""
    steps = {Kind.F: 1, task.releases: -1}
    return [*accumulate(steps.get(a.kind, 0) for a in row)]


def over_cap(task: Task, device: int, row: Sequence[Action]) -> str:
    """What would have to come first where a row holds more than its cap; "" if it never does."""
    cap = task.cap[device] if task.cap else len(row)  # type: ignore[index]
    held = in_flight(task, row)
    if max(held, default=0) <= cap:
        return ""
    before = row[: next(i for i, count in enumerate(held) if count > cap)]
    returns = [a._replace(kind=task.releases) for a in before if a.kind is Kind.F]
    first = next(a for a in returns if a not in before)
    what = "micro-batches" if task.virtual == 1 else "activations of chunks"
    return (
        f"device {device} would hold {cap + 1} {what}, its cap is {cap}: {first} has to come first"
    )


def runnable(task: Task, rows: Rows, skip: bool) -> Rows:
    """What of these rows can run, in their order: the others wait for something that never comes.

    skip  an action that cannot run is left out, so that those behind it have a chance; else its row
          ends there
    """
    queues = [[*row] for row in rows]
    kept: list[list[Action]] = [[] for _ in rows]
    done: set[Action] = set()
    while any(queues):
        moved = False
        for device, (queue, row) in enumerate(zip(queues, kept, strict=True)):
            while queue and done.issuperset(task.needs[queue[0]]):
                moved = True
                if not over_cap(task, device, [*row, queue[0]]):
                    row.append(queue[0])
                    done.add(queue.pop(0))
                elif skip:
                    queue.pop(0)
                else:
                    queue.clear()
        if not moved and not skip:
            break
        if not moved:
            _hopeless(task, queues, done).pop(0)
    return tuple(map(tuple, kept))


def _hopeless(task: Task, queues: list[list[Action]], done: set[Action]) -> list[Action]:
    """Of rows that all wait one whose first action needs what none of them has.

    If there is none, they wait for each other in a circle: then the first row.
    """
    waiting = [queue for queue in queues if queue]
    there = done.union(*waiting)
    never = (queue for queue in waiting if not there.issuperset(task.needs[queue[0]]))
    return next(never, waiting[0])


def can_finish(draft: Draft) -> bool:
    """Whether a draft can become whole within the cap.

    Backwards and updates only give room back, so all that can run do. Then it is the banker's
    question: is there room for one micro-batch to go on to its last stage? It gives back all that
    it held, and the next one is asked.
    """
    task = draft.task
    if task.cap is None or (task.virtual == 1 and not task.by_hand):
        return True
    done = set(draft.placed)
    held = [(in_flight(task, row) or [0])[-1] for row in draft.rows]
    left = [a for d in range(task.devices) for a in draft.left(d)]
    forwards = [a for a in left if a.kind is Kind.F]
    others = [a for a in left if a.kind is not Kind.F]
    while True:
        for action in (able := [a for a in others if done.issuperset(task.needs[a])]):
            held[task.device(action)] -= action.kind is task.releases
        done.update(able)
        others = [a for a in others if a not in done]
        if able:
            continue
        if not forwards:
            return not others
        for k in sorted({a.microbatch for a in forwards}):
            wanted = [a for a in forwards if a.microbatch == k]
            then = _room(task, wanted, done, held)
            if then:
                break
        else:
            return False
        held = then
        done.update(wanted)
        forwards = [a for a in forwards if a.microbatch != k]


def _room(task: Task, wanted: list[Action], done: set[Action], held: list[int]) -> list[int]:
    """What devices hold after all these forwards of a micro-batch; [] if they cannot all run."""
    then, now = [*held], set(done)
    for action in sorted(wanted):
        device = task.device(action)
        then[device] += 1
        too_many = then[device] > task.cap[device]  # type: ignore[index]
        if too_many or not now.issuperset(task.needs[action]):
            return []
        now.add(action)
    return then
