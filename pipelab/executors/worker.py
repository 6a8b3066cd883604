"""The one interpreter of schedules: for each action of a row, receive, do it, send."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from pipelab.action import Action, Kind
from pipelab.executors.device import Device
from pipelab.executors.transport import Aborted, Message, Transport
from pipelab.schedule import Schedule

METHODS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input_grad",
    Kind.W: "weight_grad",
    Kind.U: "update",
}


class RunError(RuntimeError):
    """A run that failed.

    The message names device and action, and the cause has the failing stage's own traceback.
    """

    def __init__(
        self, message: str, device: int | None = None, action: Action | None = None
    ) -> None:
        super().__init__(message, device, action)
        self.device, self.action = device, action

    def __str__(self) -> str:
        return self.args[0]


class Bytes(NamedTuple):
    """What is kept besides activations: the latest weights, more versions of them, and so on."""

    weights: int
    versions: int
    gradients: int
    optimizer: int


NO_BYTES = Bytes(0, 0, 0, 0)


@dataclass(frozen=True)
class Pace:
    """Slows a run down to its predicted times.

    So that a machine with fewer cores than devices can show them.

    duration, delay  seconds of every action and of its input's way, flat over the table
    """

    duration: np.ndarray
    delay: np.ndarray


@dataclass
class Record:
    """What one worker saw, per action of its row: seconds since the run began, bytes, versions.

    start, end  of the action
    arrived     of its input, if that came from another device (else nan); `received` are its bytes
    most, held  activation bytes, the most during the action and after it
    kept        other bytes after it
    versions    kept of the action's stage
    on_core     seconds of the action in which this thread had a core (nan: not known)
    late        paced: how many actions took longer than they should
    """

    start: list[Any] = field(default_factory=list)
    end: list[Any] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    most: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    kept: list[Bytes] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    on_core: list[float] = field(default_factory=list)
    at_start: Bytes = NO_BYTES
    late: int = 0


@dataclass
class Worker:
    """Carries out row `rank` of a schedule; `began` is the run's time zero on `time.perf_counter`.

    stages    the row's stages by number: `executors.stage.Stage`s, or what has their methods
    partners  per stage, the stages whose news its updates wait for
    where     the worker's name for errors
    replicas  how many pipelines train together; their gradients are added up when an update group
              is complete
    progress  is told the flat index of every action before it

    A paced action starts when its device and its input are there by the paced clocks, computes for
    real, and ends no earlier than its predicted end; one whose computing takes longer is late.
    """

    schedule: Schedule
    rank: int
    stages: Mapping[int, Any]
    device: Device
    transport: Transport
    began: float
    partners: Sequence[Sequence[int]]
    where: str
    replicas: int
    pace: Pace | None
    progress: Callable[[int], None] | None
    clock: float = 0.0  # of a paced run: when this device is done with what it has started

    def work(self) -> Record:
        """Every action of the row in order. RunError where one fails, with its cause."""
        record, ledger = Record(), self.device.ledger
        kept = {s: stage.held() for s, stage in self.stages.items()}
        record.at_start = _sum(kept.values())
        for i, action in enumerate(self.schedule.rows[self.rank], self.schedule.bounds[self.rank]):
            stage, received = self.stages[action.stage], None
            if self.progress:
                self.progress(i)
            try:
                # [1] receive what the action needs
                received, arrived = self._receive(i, action)
                # [2] do it
                # In a paced run not before it is due; nothing starts after the run has ended.
                due = self.began + self.clock - time.perf_counter() if self.pace else 0
                self.transport.sleep(due)
                ledger.most = ledger.held
                start, on_core = self.device.now(), self.device.on_core()
                output = getattr(stage, METHODS[action.kind])(action.microbatch, received)
                on_core = self.device.on_core() - on_core
                record.late += self._take_time(i)
                end = self.device.now()
                stage.snapshot()
                # [3] send what it makes
                self._send(i, output)
                if action.kind in (Kind.B, Kind.W):
                    self._end_group(action, stage)
            except Aborted:
                raise
            except (Exception, SystemExit) as error:
                raise self._failure(action, received, error) from error
            # [4] note what happened
            if action.kind is not Kind.F:
                kept[action.stage] = stage.held()
            record.start.append(start)
            record.end.append(end)
            record.arrived.append(arrived)
            record.received.append(0 if np.isnan(arrived) else self.device.size(received))
            record.held.append(ledger.held)
            record.most.append(max(ledger.held, ledger.most))
            record.kept.append(_sum(kept.values()))
            record.versions.append(stage.versions_held)
            record.on_core.append(np.nan if self.pace else on_core)
        self.device.finish()
        record.start, record.end = map(self.device.seconds, (record.start, record.end))
        return record

    def _failure(self, action: Action, received: Any, error: BaseException) -> RunError:
        message = f"{self.where}, action {action}: {type(error).__name__}: {error}"
        described = received is not None and action.kind is not Kind.U
        if described and not isinstance(error, ConnectionError):
            message += f" (it was given {self.device.describe(received)})"
        return RunError(message, self.rank, action)

    def _receive(self, i: int, action: Action) -> tuple[Any, float]:
        """The input of action i and, where it comes from another device, when it was there."""
        source = int(self.schedule.inputs[i])
        if action.kind is Kind.U and self.partners[action.stage]:
            return self._collect_news(action), np.nan
        if source < 0:
            return None, np.nan
        payload, at = self.transport.receive(source, self.rank)
        if self.schedule.columns.device[source] == self.rank:
            return payload, np.nan
        if self.pace:
            at += float(self.pace.delay[i])
            self.clock = max(self.clock, at)
        return self.device.take(payload), at

    def _send(self, i: int, output: Any) -> None:
        taker = int(self.schedule.takers[i])
        if taker >= 0:
            target = int(self.schedule.columns.device[taker])
            payload = output if target == self.rank else self.device.give(output)
            at = self.clock if self.pace else time.perf_counter() - self.began
            self.transport.send(i, target, Message(payload, at))

    def _end_group(self, action: Action, stage: Any) -> None:
        """After the last backward of an update group: add up over replicas, and tell partners.

        What their updates wait for is told here and not in the update itself: two updates that wait
        for each other would never end. Replicas may wait for each other, since they do the
        same things in the same order.
        """
        group = action.microbatch // self.schedule.per_update
        if not stage.complete(group):
            return
        if self.replicas > 1:
            sums = self.transport.sum_over_replicas(
                (action.stage, group), self.rank, stage.sums(group), self.device
            )
            stage.replace_sums(group, sums)
        if self.partners[action.stage]:
            news = self.device.give(stage.news())
            for other in self.partners[action.stage]:
                self.transport.send(
                    (action.stage, other, group), self.schedule.placement[other], Message(news, 0.0)
                )

    def _collect_news(self, update: Action) -> dict[int, Any]:
        keys = {s: (s, update.stage, update.microbatch) for s in self.partners[update.stage]}
        return {
            s: self.device.take(self.transport.receive(key, self.rank).payload)
            for s, key in keys.items()
        }

    # ---- pacing

    def _take_time(self, i: int) -> bool:
        """Wait until action i is due to end; whether it ended too late."""
        if not self.pace:
            return False
        self.device.finish()
        done, due = time.perf_counter() - self.began, self.clock + float(self.pace.duration[i])
        self.transport.sleep(self.began + due - time.perf_counter())
        late = done > due and bool(self.pace.duration[i])
        self.clock = max(due, done)
        return late


def _sum(all_bytes: Iterable[Bytes]) -> Bytes:
    return Bytes(*(sum(values) for values in zip(NO_BYTES, *all_bytes, strict=True)))
