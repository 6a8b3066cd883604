"""The one interpreter of schedules: for each action of a row, receive what it needs, do it, send what it makes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pipelab.action import Action, Kind
from pipelab.executors.transport import Aborted, Message, Transport
from pipelab.schedule import Schedule

METHODS = {Kind.F: "forward", Kind.B: "backward", Kind.I: "input_grad", Kind.W: "weight_grad", Kind.U: "update"}


class RunError(RuntimeError):
    """A run that failed; the message names device and action, and the cause has the failing stage's own traceback."""

    def __init__(self, message: str, device: int | None = None, action: Action | None = None) -> None:
        super().__init__(message)
        self.device, self.action = device, action


class StageRuntime(Protocol):
    """One stage of the model as the worker sees it; each method does one kind of action.

    `held` is the bytes of activations kept now, `most` the most during the last action.
    """

    held: int
    most: int

    def forward(self, microbatch: int, given: Any) -> Any: ...
    def backward(self, microbatch: int, given: Any) -> Any: ...
    def input_grad(self, microbatch: int, given: Any) -> Any: ...
    def weight_grad(self, microbatch: int, given: Any) -> Any: ...
    def update(self, number: int, given: Any) -> Any: ...


class DeviceRuntime(Protocol):
    """One device: its clock, and what a payload needs to leave it or to enter it."""

    def active(self) -> AbstractContextManager: ...
    def now(self) -> Any: ...
    def finish(self) -> None: ...
    def seconds(self, marks: list[Any]) -> list[float]: ...
    def give(self, payload: Any) -> Any: ...
    def take(self, payload: Any) -> Any: ...


@dataclass(frozen=True)
class Pace:
    """Slows a run down to its predicted times, so that a machine with fewer cores than devices can show them.

    duration, delay  seconds of every action and of its input's way, flat over the table
    """

    duration: np.ndarray
    delay: np.ndarray


@dataclass
class Record:
    """What one worker saw, per action of its row: times in seconds since the run began, bytes of activations."""

    start: list[Any] = field(default_factory=list)
    end: list[Any] = field(default_factory=list)
    arrived: list[float] = field(default_factory=list)
    most: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)
    late: int = 0


def work(
    schedule: Schedule, rank: int, stages: Mapping[int, StageRuntime], device: DeviceRuntime, transport: Transport,
    began: float, pace: Pace | None = None,
) -> Record:  # fmt: skip
    """Carry out row `rank` of the schedule; `began` is the run's time zero on `time.perf_counter`.

    A paced action starts when its device and its input are there by the paced clocks, computes for real, and ends no
    earlier than its predicted end; one whose computing takes longer is counted as late. Raises RunError.
    """
    record, clock = Record(), 0.0
    inputs, takers, home = schedule.inputs, schedule.takers, schedule.columns.device
    for i, action in enumerate(schedule.rows[rank], schedule.bounds[rank]):
        try:
            given, arrived = None, float("nan")
            if inputs[i] >= 0:
                message = transport.receive(int(inputs[i]), rank)
                given, arrived = message.payload, message.at
                if home[inputs[i]] != rank:
                    given = device.take(given)
                else:
                    arrived = float("nan")
            if pace:
                if arrived == arrived:
                    arrived += pace.delay[i]
                    clock = max(clock, arrived)
                _sleep_until(began + clock)
            stage = stages[action.stage]
            start = device.now()
            made = getattr(stage, METHODS[action.kind])(action.microbatch, given)
            if pace:
                device.finish()
                done, due = time.perf_counter() - began, clock + pace.duration[i]
                record.late += int(pace.duration[i] > 0 and done > due)
                _sleep_until(began + due)
                clock = max(due, done)
            end = device.now()
            if (taker := takers[i]) >= 0:
                at = clock if pace else time.perf_counter() - began
                away = home[taker] != rank
                transport.send(i, int(home[taker]), Message(device.give(made) if away else made, at))
        except Aborted:
            raise
        except Exception as error:
            raise RunError(f"device {rank}, action {action}: {type(error).__name__}: {error}", rank, action) from error
        record.start.append(start)
        record.end.append(end)
        record.arrived.append(arrived)
        record.most.append(max(stage.most, stage.held) + sum(s.held for s in stages.values() if s is not stage))
        record.held.append(sum(s.held for s in stages.values()))
    device.finish()
    record.start, record.end = device.seconds(record.start), device.seconds(record.end)
    return record


def _sleep_until(moment: float) -> None:
    if (rest := moment - time.perf_counter()) > 0:
        time.sleep(rest)
