"""The one interpreter of schedules: for each action of a row, receive, do it, send.

A `Job` is a row of a schedule with its stages; it lasts as long as the training. An `Order` is what
its worker does next: a part of the row, whose actions are numbered through the whole training.
"""

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pipelab.runtime.orders import NO_BYTES, Bytes, Order, Outcome, Record, Update
from pipelab.runtime.stage import NO_CONTEXT, Device, Stage
from pipelab.runtime.transport import Aborted, Key, Message, Transport
from pipelab.table.action import HOST, Action, Kind
from pipelab.table.schedule import Schedule


class RunError(RuntimeError):
    """A run that failed.

    The message names device and action; the cause has the failing stage's own traceback.

    device  the row of the table that failed, if it is known
    """

    def __init__(
        self, message: str, device: int | None = None, action: Action | None = None
    ) -> None:
        super().__init__(message, device, action)
        self.device, self.action = device, action

    def __str__(self) -> str:
        return self.args[0]


def told(error: BaseException) -> str:
    """An error's type and message; making the message may fail, too."""
    name = type(error).__name__
    try:
        return f"{name}: {error}"
    except Exception as failed:
        return f"{name} (its message cannot be shown: {type(failed).__name__})"


# What an action takes of another stage, so many further on; W and U take none.
TAKES = {Kind.F: (-1, "output"), Kind.B: (1, "gradient"), Kind.I: (1, "gradient")}
NOTHING = 0, ""
NO_ACTION = 0, None
KINDS = len(Kind)


@dataclass(kw_only=True)
class Job(ABC):
    """Row `row` of a schedule in one of the replicas, with all that it needs to know of others.

    schedule  its row says which actions will come; the orders say when
    device    the name of its device (jax: the device)
    partners  by stage, the stages whose news its updates wait for, if any
    """

    schedule: Schedule
    row: int
    device: Any
    partners: Mapping[int, Sequence[int]] = field(default_factory=dict)
    replica: int = 0
    replicas: int = 1
    paced: bool = False

    @property
    def rank(self) -> int:
        """Replicas of a row are neighbours, as in DeepSpeed's topology."""
        return self.row * self.replicas + self.replica

    @property
    def where(self) -> str:
        """A name for errors."""
        return f"device {self.row}" + (f" of replica {self.replica}" if self.replicas > 1 else "")

    def doing(self, mark: int) -> str:
        """The action that a progress mark stands for."""
        rest, stage = divmod(mark, self.schedule.stages)
        number, kind = divmod(rest, KINDS)
        return str(Action(stage, Kind(kind), number))

    def mark(self, action: Action) -> int:
        """An action as a number, for `doing`."""
        return (action.microbatch * KINDS + action.kind) * self.schedule.stages + action.stage

    @abstractmethod
    def make_device(self) -> Device:
        """The runtime of the job's device."""

    @abstractmethod
    def stages(self, device: Any) -> Mapping[int, Stage]:
        """Runtimes of the row's stages on that device, on copies of the given modules."""

    def prepare(self, stages: Any) -> None:  # noqa: B027
        """Preparation before the run's time zero, in the worker's thread: jax compiles."""

    def after(self, order: Order, stages: Any, transport: Transport) -> Exception | None:
        """Work after an order is done; returns why it was not possible."""
        return None


@dataclass(slots=True)
class _Task:
    """An action under way: what it has received, what it makes, and marks of its start and end.

    A context, too, whose errors are the action's.

    arrived  when its input was there, where that came from another device
    """

    worker: "Worker"
    action: Action
    received: Any = None
    arrived: float = math.nan
    output: Any = None
    start: Any = None
    end: Any = None

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        # A SystemExit would end this thread without a word, and the others would wait.
        if isinstance(error, (Exception, SystemExit)) and not isinstance(
            error, (Aborted, RunError)
        ):
            raise self.worker.failure(self, error) from error


@dataclass
class Worker:
    """Executes a job's orders; `began` is the run's time zero on `time.perf_counter`.

    stages    the row's stages by number
    progress  gets the job's mark of every action before it starts

    A paced action starts when its device and its input are ready by the paced clocks, computes for
    real, and ends no earlier than predicted; if computing takes longer, it is late.
    """

    job: Job
    stages: Mapping[int, Stage]
    device: Device
    transport: Transport
    began: float
    progress: Callable[[int], None] | None = None
    clock: float = 0.0  # of a paced run: when this device is done with what it has started
    _ended: dict[int, int] = field(default_factory=dict)  # stage -> the latest update told of
    # Of the order, from `begin` on.
    order: Order = field(init=False, repr=False)
    record: Record = field(init=False, repr=False)
    _next: Iterator[tuple[int, Action]] = field(
        init=False, repr=False
    )  # its actions that are not done
    _under_way: deque[list[Any]] = field(
        init=False, repr=False
    )  # ends of the actions of the latest steps
    _kept: dict[int, Bytes] = field(init=False, repr=False)  # by stage; `_bytes` is their sum
    _bytes: Bytes = field(init=False, repr=False)

    def work(self, order: Order) -> Outcome:
        """Execute an order."""
        with self._failing_late():
            self.begin(order)
            while self.step():
                pass
            outcome = self.outcome()
            outcome.unsaved = outcome.unsaved or self.job.after(order, self.stages, self.transport)
        for stage in self.stages.values():
            stage.end()
        return outcome

    def begin(self, order: Order) -> None:
        """Take an order, whose actions `step` then does one by one."""
        self.order, self.record = order, Record()
        for s, stage in self.stages.items():
            with self.device.working(s):
                stage.begin(s, order)
        self._next, self._under_way = enumerate(order.actions), deque()
        self._kept = {s: stage.held() for s, stage in self.stages.items()} if order.report else {}
        self.record.at_start = self._bytes = _sum(self._kept.values())

    def outcome(self) -> Outcome:
        """The outcome of an order whose actions are all done.

        RunError if one fails only now, on an asynchronous device.
        """
        order, stages, record = self.order, self.stages, self.record
        self.device.finish()
        if failed := self.device.failed(record.end):
            i, error = failed
            raise self.failure(_Task(self, order.actions[i]), error) from error
        # Marks of a GPU have their seconds when all its work is done: these are asked for last.
        record.start, record.end = map(self.device.seconds, (record.start, record.end))
        outcome = Outcome(
            self.job.row,
            self.job.replica,
            losses={
                k: (float(mean), float(count))
                for stage in stages.values()
                for k, (mean, count) in stage.losses.items()
            },
        )
        for s, stage in stages.items():
            # Of a device that computes later they are numbers only now.
            outcome.updates[s] = {
                number: Update(float(square), [*map(float, rates)])
                for number, (square, rates) in stage.updates.items()
            }
            outcome.seen |= stage.seen
        if order.report:
            outcome.record = record
            outcome.steps = {s: stage.steps for s, stage in stages.items()}
            outcome.kernels = dict.fromkeys(stages, self.device.kernels)
            if order.training:
                outcome.weights = {s: stage.trained() for s, stage in stages.items()}
            outcome.unsplit = {s: stage.unsplit for s, stage in stages.items() if stage.unsplit}
        # The check compares more, and lets a run end that has gone wrong.
        several = self.job.replicas > 1 or self.job.schedule.copies > 1
        if several and order.training and not order.keep and (order.report or order.save):
            outcome.digests = {s: stage.digests() for s, stage in stages.items()}
        if several and order.save:
            outcome.attributes = {s: stage.attributes() for s, stage in stages.items()}
        if order.state:
            try:
                outcome.states = {s: stage.resume_state() for s, stage in stages.items()}
            except Exception as error:  # the training goes on without a check
                outcome.unsaved = error
        return outcome

    def step(self) -> bool:
        """Do the next action of the order, and the one that overlaps with it, if any.

        Returns False if all are done. RunError, with its cause, if an action fails.
        """
        i, action = next(self._next, NO_ACTION)
        if action is None:
            return False
        if self.progress:
            self.progress(self.job.mark(action))
        # [1] receive what they need
        tasks = [self._receive(i, action)]
        if self.order.overlapped and self._overlaps(i + 1):
            tasks.append(self._receive(*next(self._next)))
        # [2] do them
        # At most two steps are ahead of the device: memory of those before is free for this one. In
        # a paced run not before it is due; nothing starts after the run has ended.
        if len(self._under_way) == 2:
            for end in self._under_way.popleft():
                self.device.reach(end)
        before = self._under_way[-1] if self._under_way else []
        paces = self.order.paces
        self.transport.sleep(self.began + self.clock - time.perf_counter() if paces else 0)
        ledger = self.device.ledger
        ledger.most = ledger.held
        if len(tasks) == 1 and action.kind not in HOST:
            self._compute(tasks[0], before)
        else:
            self._together(tasks, before)
        self._under_way.append([task.end for task in tasks])
        if paces:
            self.record.late += self._take_time(paces[i : i + len(tasks)])
        for task in tasks:
            # After the mark of its end: what the check keeps is not the action's time.
            end = self.device.now() if paces else task.end
            stage, action = self.stages[task.action.stage], task.action
            with task, self.device.working(action.stage):
                stage.snapshot()
                # [3] send what it makes
                self._send(action, task.output)
                if action.kind in (Kind.B, Kind.W):
                    update = action.microbatch // self.job.schedule.per_update
                    if stage.complete(update):
                        self._end_backwards(action.stage, update)
            # [4] note what happened
            if self.order.report:
                self._note(task, end)
        return True

    def _overlaps(self, i: int) -> bool:
        """Whether action i overlaps with the one before it."""
        return i < len(self.order.actions) and self.order.actions[i] in self.order.overlapped

    def _together(self, tasks: Sequence[_Task], before: list[Any]) -> None:
        """Do an action and the one that overlaps with it, or a copy to or from the host."""
        work = [partial(self._compute, task, before) for task in tasks]
        aside: Callable[[], None] | None = None
        if tasks[-1].action.kind in HOST:  # it uses no module
            aside = work.pop()
        elif tasks[0].action.stage != tasks[1].action.stage:
            aside = work.pop(0)
        # Else both are done here: two threads must not use one stage's module.
        wait = self.device.beside(aside) if aside else None  # a GPU is asked for a copy first
        try:
            for compute in work:
                compute()
        finally:  # nothing goes on behind an error
            if wait:
                wait()

    def _compute(self, task: _Task, before: list[Any]) -> None:
        """Do an action; its start comes after the marks `before`."""
        action = task.action
        copying = self.device.copying() if action.kind in HOST else NO_CONTEXT
        with self.device.working(action.stage), copying:
            self.device.follow(before)
            task.start = self.device.now()
            with task:
                task.output = _carried_out(action, self.stages[action.stage], task.received)
            task.end = self.device.now()

    def _note(self, task: _Task, end: Any) -> None:
        record, ledger, action = self.record, self.device.ledger, task.action
        stage = self.stages[action.stage]
        # A forward changes activations alone, which the ledger counts.
        if action.kind is not Kind.F and self._kept[action.stage] != (held := stage.held()):
            self._kept[action.stage] = held
            self._bytes = _sum(self._kept.values())
        record.start.append(task.start)
        record.end.append(end)
        record.arrived.append(task.arrived)
        known = not math.isnan(task.arrived)
        record.received.append(self.device.size(task.received) if known else 0)
        record.held.append(ledger.held)
        record.most.append(max(ledger.held, ledger.most))
        record.kept.append(self._bytes)
        record.versions.append(stage.versions_held)

    @contextmanager
    def _failing_late(self) -> Iterator[None]:
        """A context for what is no action, but may be told of one's error: RunError, then."""
        try:
            yield
        except (Aborted, RunError):
            raise
        except Exception as error:
            if doubt := self.device.doubt(error):
                message = f"{self.job.where}: {told(error)}; {doubt}"
                raise RunError(message, self.job.row) from error
            raise

    def failure(self, task: _Task, error: BaseException) -> RunError:
        """The error of an action that failed."""
        action, received = task.action, task.received
        message = f"{self.job.where}, action {action}: {told(error)}"
        if doubt := self.device.doubt(error):
            return RunError(f"{message}; {doubt}", self.job.row, action)
        # What an update received are its partners' news, and a message that was lost is to blame
        # itself: neither is described.
        described = received is not None and action.kind is not Kind.U
        if described and not isinstance(error, ConnectionError):
            message += f" (it was given {self.device.describe(received)})"
        return RunError(message, self.job.row, action)

    def _receive(self, i: int, action: Action) -> _Task:
        """Action i with its input."""
        task = _Task(self, action)
        with task, self.device.working(action.stage):
            task.received, task.arrived = self._received(i, action)
        return task

    def _received(self, i: int, action: Action) -> tuple[Any, float]:
        """The input of action i and, where it comes from another device, when it was there."""
        # An update waits for news, all others for the output of one action at most.
        s, kind, number = action
        if kind is Kind.U and s in self.job.partners:
            # A copy of the model that took no micro-batch has no backward to tell it after: all
            # here are told of before one waits.
            for other, stage in self.stages.items():
                if self._ended.get(other, -1) < number and stage.complete(number):
                    self._end_backwards(other, number)
            return self._collect_news(s, number), math.nan
        step, name = TAKES.get(kind, NOTHING)
        source = s + step
        if not step or self._row_of(source, s) is None:  # its own data, or what I has left
            return None, math.nan
        payload, at = self.transport.receive((source, name, number, s), self.job.row)
        if self._row_of(source, s) == self.job.row:
            return self.device.take(payload) if self.device.apart else payload, math.nan
        if self.order.paces:  # the message says when it was sent; this device has it a delay later
            at += self.order.paces[i][1]
            self.clock = max(self.clock, at)
        return self.device.take(payload), at

    def _send(self, action: Action, output: Any) -> None:
        # This never waits for the receiver: two rows that first send to each other would wait for
        # ever.
        s, kind, number = action
        step, name = TAKES.get(kind, NOTHING)
        to = s - step
        row = self._row_of(to, s)
        if step and row is not None:
            stays = row == self.job.row and not self.device.apart
            payload = output if stays else self.device.give(output)
            # The paced clock travels along: the receiver adds the delay to it.
            at = self.clock if self.order.paces else time.perf_counter() - self.began
            self.transport.send((s, name, number, to), row, Message(payload, at))

    def _row_of(self, other: int, s: int) -> int | None:
        """The row of another stage, if it is one of the copy of the model that stage s is in."""
        table = self.job.schedule
        alike = s // table.model_stages == other // table.model_stages
        return table.placement[other] if alike else None

    def _end_backwards(self, s: int, update: int) -> None:
        """After a stage's last backward of an update: tell replicas, copies and partners.

        What their updates wait for is told here and not in the update itself: two updates that wait
        for each other would never end. Replicas may wait for each other, since they do the
        same things in the same order.
        """
        stage, row = self.stages[s], self.job.row
        self._ended[s] = update
        # [1] the sums over all replicas, the same in each
        if self.job.replicas > 1:
            with self.device.working(s):
                sums = stage.sums(update)
                sums = self.transport.sum_over_replicas((s, update), row, sums, self.device)
                stage.replace_sums(update, sums)
        # [2] the buffers of the first copy, for the others
        if stage.has_buffers and s < self.job.schedule.model_stages:
            with self.device.working(s):
                self._hand_on_buffers(s, update)
        # [3] what partners' same updates wait for
        if partners := self.job.partners.get(s):
            # After [1]: a norm is that of the sums over all replicas.
            with self.device.working(s):
                news = Message(self.device.give(stage.news()), 0.0)
            for other in partners:
                row = self.job.schedule.placement[other]
                self.transport.send((s, "news", update, other), row, news)

    def _hand_on_buffers(self, s: int, update: int) -> None:
        """Give the buffers of the first replica's first copy to the others, as DDP does.

        Between a stage's last backward of an update and its first forward after it, so that all of
        them begin every update with the same ones.
        """
        stage, row, key = self.stages[s], self.job.row, (s, "buffers", update)
        buffers = stage.buffers()
        if self.job.replicas > 1:
            buffers = self.transport.from_first_replica(key, row, buffers, self.device)
            if self.job.replica:
                stage.take_buffers(buffers)
        for copy in self.job.schedule.copies_of(s)[1:]:
            message = Message(self.device.give(buffers), 0.0)
            self.transport.send((*key, copy), self.job.schedule.placement[copy], message)

    def _collect_news(self, s: int, update: int) -> dict[int, Any]:
        """What a stage's update waits for, by the stage that it comes from."""
        stage, row, copies = self.stages[s], self.job.row, self.job.schedule.copies_of(s)

        def taken(key: Key) -> Any:
            return self.device.take(self.transport.receive(key, row).payload)

        if s in copies[1:] and stage.has_buffers:
            stage.take_buffers(taken((copies[0], "buffers", update, s)))
        return {other: taken((other, "news", update, s)) for other in self.job.partners[s]}

    # ---- pacing

    def _take_time(self, paces: Sequence[tuple[float, float]]) -> bool:
        """Wait until actions that overlap are due to end; whether they were late."""
        duration = max(seconds for seconds, _ in paces)
        self.device.finish()
        # A GPU's work is only queued when a call returns, so it was waited for.
        done, due = time.perf_counter() - self.began, self.clock + duration
        self.transport.sleep(self.began + due - time.perf_counter())
        # What takes longer than its cost moves the paced clock, and with it all that follows.
        late = done > due and duration > 0
        self.clock = max(due, done)
        return late


def _carried_out(action: Action, stage: Stage, received: Any) -> Any:
    """The output of an action."""
    number = action.microbatch
    match action.kind:
        case Kind.F:
            return stage.forward(number, received)
        case Kind.B:
            return stage.backward(number, received)
        case Kind.I:
            return stage.input_grad(number, received)
        case Kind.W:
            return stage.weight_grad(number, received)
        case Kind.U:
            return stage.update(number, received)
        case Kind.OFFLOAD:
            return stage.offload(number)
        case Kind.RELOAD:
            return stage.reload(number)


def _sum(all_bytes: Iterable[Bytes]) -> Bytes:
    return Bytes(*map(sum, zip(NO_BYTES, *all_bytes, strict=True)))
