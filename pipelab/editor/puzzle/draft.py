"""A table that is being made: what is placed so far, what may come next, and why not.

    device 0   0F0 0F1 .   .         device 0 could go on with 0F2; with a cap of 2 it could not
    device 1   .   1F0 .             1F1 is ready on device 1, and so is 1B0 (it is the last stage)

The rest, in an order that always works, completes every draft to a whole table. That one is
validated and simulated, and what is placed has its times from there.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from pipelab.editor.puzzle.task import Rows, Task
from pipelab.predict.simulate import lay
from pipelab.predict.timeline import Timeline
from pipelab.table.action import Action, Kind, ScheduleError
from pipelab.table.schedule import Schedule
from pipelab.table.validate import check_static

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
    pipelab.editor.puzzle.draft.Refused: 0B0 needs 1B0 first, which is not placed yet
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
        return len(self.placed)

    @property
    def size(self) -> int:
        """How many actions a whole table has."""
        return self.task.size

    @property
    def whole(self) -> bool:
        return self.count == self.size

    def left(self, device: int) -> list[Action]:
        """The device's actions that are not placed yet."""
        return [a for a in self.task.actions[device] if a not in self.placed]

    def __str__(self) -> str:
        """The rows on one line: cells with `_` between, rows with `~`; such as 0F0_0F1~1F0."""
        return "~".join("_".join(map(str, row)) for row in self.rows)

    def to_csv(self) -> str:
        """The table as a file; a whole one is read by `Schedule.from_csv`, too."""
        if self.whole:
            return self.completed.to_csv()
        return str(self).replace("_", ",").replace("~", "\n") + "\n"

    @cached_property
    def completed(self) -> Schedule:
        """The whole table: what is placed, then the rest as it can run; what cannot comes last."""
        needs, done = self.task.needs, set[Action]()
        rows: list[list[Action]] = [[] for _ in self.rows]
        rest = [self.left(d) for d in range(self.task.devices)]
        moved = True
        while moved:
            moved = False
            for row, placed, left in zip(rows, self.rows, rest, strict=True):
                for action in placed[len(row) :] or [*left]:
                    if done.issuperset(needs[action]):
                        row.append(action)
                        done.add(action)
                        moved = True
                        if action in left:
                            left.remove(action)
                    elif action in placed:
                        break
        for row, placed, left in zip(rows, self.rows, rest, strict=True):
            row += [*placed[len(row) :], *left]
        return self.task.schedule_of("your table", rows)

    @cached_property
    def timeline(self) -> Timeline:
        """`completed` simulated; ScheduleError if what is placed cannot be part of a table."""
        check_static(self.completed)
        duration, delay, wait = zip(
            *(self.task.times[a] for a in self.completed.actions), strict=True
        )
        return lay(self.completed, duration, delay, wait)

    @cached_property
    def problem(self) -> str:
        """Why what is placed cannot be part of a table, in one line; "" if it can."""
        try:
            _ = self.timeline  # simulating validates
        except ScheduleError as error:
            return str(error).partition("\n")[0].removeprefix("your table: ")
        return self.over_cap

    @property
    def schedule(self) -> Schedule:
        """The table, if it is whole and right. ScheduleError if not."""
        if self.problem:
            raise ScheduleError(self.problem)
        if not self.whole:
            raise ScheduleError(f"{self.size - self.count} of {self.size} actions are missing")
        return self.completed

    @cached_property
    def spans(self) -> dict[Action, Span]:
        """From when to when every action of `completed` runs."""
        return {span.action: (span.start, span.end) for span in self.timeline.spans}

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
        needs = self.task.needs[action]
        if missing := [a for a in needs if a not in self.placed]:
            raise Refused(f"{action} needs {missing[0]} first, which is not placed yet")
        if draft.problem:
            raise Refused(draft.problem)
        start = draft.spans[action][0]
        if until is not None and start >= until:
            here = {need: draft.spans[need][1] + self.task.way(need, action) for need in needs}
            late = [n for n in needs if here[n] + self.task.costs.overhead >= start]
            reason = f"there it starts at {start:g}"
            if late:
                ends, device = draft.spans[late[0]][1], self.task.device(late[0])
                reason = f"{late[0]} ends at {ends:g} on device {device}"
            raise Refused(f"{action} cannot start before {until:g}: {reason}")
        if not draft.can_finish:
            raise Refused(
                f"{action} cannot be used here: within the cap, no micro-batch could then reach "
                "its last stage and come back"
            )
        return draft

    def put(self, action: Action, index: int | None = None) -> "Draft":
        """Place an action without asking any rule: it only has to exist and not be placed yet."""
        task, device = self.task, self.task.device(action)
        if action not in task.needs:
            raise ScheduleError(
                f"{action} is not in this table, which has {min(task.needs)} to {max(task.needs)}; "
                "a single update places itself"
            )
        if action in self.placed:
            raise Refused(f"{action} is placed already, on device {device}")
        row = [*self.rows[device]]
        row.insert(len(row) if index is None else index, action)
        return self.with_row(device, row)

    def with_row(self, device: int, row: Iterable[Action]) -> "Draft":
        rows = [*self.rows]
        rows[device] = tuple(row)
        return Draft(self.task, tuple(rows))

    def without(self, action: Action) -> "Draft":
        """The draft without an action; what needs that one stays, see `settled`."""
        device = self.task.device(action)
        return self.with_row(device, [a for a in self.rows[device] if a != action])

    def able(self, actions: Iterable[Action]) -> list[Action]:
        """Those whose needs are all placed."""
        return [a for a in actions if self.placed.issuperset(self.task.needs[a])]

    def ready(self) -> list[Action]:
        """Every action that may be placed at the end of its row."""
        able = self.able(a for row in self.task.actions for a in row if a not in self.placed)
        return [a for a in able if a.kind is not Kind.F or self.put(a).can_finish]

    # ---- what can run of it

    @cached_property
    def running(self) -> "Draft":
        """The part of every row that runs, up to what cannot; of a legal draft, all of it."""
        now = Draft.of(self.task)
        while True:
            following = self._beyond(now)
            able = [a for a in now.able(following) if not now.put(a).over_cap]
            if not able:
                return now if following else self
            for action in able:
                now = now.put(action)

    def settled(self) -> "Draft":
        """The draft without what cannot run with nothing else placed, within the cap.

        Of rows that all wait, one goes on without an action that needs what none of them has; if
        there is no such action, they wait for each other, and the first row does.
        """
        stuck = self._beyond(self.running)
        if not stuck:
            return self
        able = self.able(stuck)
        first = next((a for a in stuck if a not in able), stuck[0])
        return self.without(first).settled()

    def _beyond(self, part: "Draft") -> list[Action]:
        """The first action of each row behind the same row of a part of the draft."""
        rows = zip(self.rows, part.rows, strict=True)
        return [row[len(kept)] for row, kept in rows if len(row) > len(kept)]

    @cached_property
    def over_cap(self) -> str:
        """Words on what has to come first where a device holds more than its cap, or ""."""
        task = self.task
        what = "slices" if task.slices > 1 else "micro-batches"
        for device, cap in enumerate(task.caps):
            row = self.rows[device]
            over = [i for i, count in enumerate(task.in_flight(row)) if count > cap]
            if over:
                returns = [a._replace(kind=task.releases) for a in row if a.kind is Kind.F]
                first = next(a for a in returns if a not in row[: over[0]])
                return (
                    f"device {device} would hold {cap + 1} {what}, its cap is {cap}: "
                    f"{first} has to come first"
                )
        return ""

    @cached_property
    def can_finish(self) -> bool:
        """Whether it can become whole within the cap.

        Backwards and updates only give room back, so all that can run do. Then it is the banker's
        question: is there room for one micro-batch to go on to its last stage? It gives back all
        that it held, and the next one is asked.
        """
        task = self.task
        if self.over_cap or not task.caps or task.simple:
            return not self.over_cap
        done = set(self.placed)
        room = [
            cap - sum(task.in_flight(row)[-1:])
            for row, cap in zip(self.rows, task.caps, strict=True)
        ]
        while True:
            # [1] All but forwards, in their order: what comes later may need what comes before.
            waiting = [a for a in task.needs if a not in done]
            for action in waiting:
                if action.kind is not Kind.F and done.issuperset(task.needs[action]):
                    done.add(action)
                    room[task.device(action)] += action.kind is task.releases
            # [2] The forwards of a micro-batch for which there is room.
            coming = [a for a in waiting if a.kind is Kind.F]
            of = {
                a: a.microbatch // task.slices for a in coming
            }  # the slices of a sequence go together
            for k in sorted(set(of.values())):  # an early one gives back first
                forwards = [a for a in coming if of[a] == k]
                taken = Counter(map(task.device, forwards))
                others = {need for a in forwards for need in task.needs[a]}
                if all(room[d] >= n for d, n in taken.items()) and others <= done.union(forwards):
                    room = [had - taken[d] for d, had in enumerate(room)]
                    done.update(forwards)
                    break
            else:
                return not coming
