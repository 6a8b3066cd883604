"""What ran when: spans in columns, simulated or measured, and the measures taken from them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from os import PathLike
from typing import Any, Literal, NamedTuple

import numpy as np

from pipelab.action import Kind
from pipelab.schedule import Schedule

SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


class Parts(NamedTuple):
    """What a timeline is made of, in seconds per action, flat over the table.

    duration  of its compute
    delay     from the end of the action whose output it takes until that is on its device; 0 for
              one that takes no output
    wait      from when it could start, its row free and its input there, to its start
    fed       whether its input came after its row was free
    """

    duration: np.ndarray
    delay: np.ndarray
    wait: np.ndarray
    fed: np.ndarray


class Bubble(NamedTuple):
    """Idle time as a fraction, by each definition in use.

    of_total    idle / (p x makespan): the share of all device time that is lost (GPipe)
    over_ideal  (makespan - ideal) / ideal: how much longer than without a bubble (Megatron-LM)
    of_span     (cost - ideal) / cost, cost = the longest span of a device (zero bubble, sect. 5.3)
    """

    of_total: float
    over_ideal: float
    of_span: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """Spans of a schedule's actions, in seconds, flat over its table (rows one after another).

    start, end     of each action's compute
    sent, arrived  of its input, where that came from another device (else nan)
    source         "simulated" or "measured"
    late           paced runs: how many actions took longer than their cost; None otherwise
    on_core        of each action, the seconds in which its thread had a core; None if not measured

    `device`, `stage`, `kind`, `microbatch` and `version` are columns of the same length.
    """

    schedule: Schedule
    start: np.ndarray
    end: np.ndarray
    sent: np.ndarray
    arrived: np.ndarray
    source: Literal["simulated", "measured"]
    late: int | None = None
    on_core: np.ndarray | None = None

    # ---- columns

    @property
    def device(self) -> np.ndarray:
        return self.schedule.columns.device

    @property
    def stage(self) -> np.ndarray:
        return self.schedule.columns.stage

    @property
    def kind(self) -> np.ndarray:
        return self.schedule.columns.kind

    @property
    def microbatch(self) -> np.ndarray:
        return self.schedule.columns.microbatch

    @property
    def batch(self) -> np.ndarray:
        """The batch of an action's micro-batch; of an update, that of its first one."""
        s = self.schedule
        return self.microbatch * np.where(self.kind == Kind.U, s.per_update, 1) // s.microbatches

    @cached_property
    def version(self) -> np.ndarray:
        """The weight version that an action reads, or that an update makes; -1 for a transfer."""
        read = self.schedule.versions[self.stage, self.microbatch]
        made_or_read = np.where(self.kind == Kind.U, self.microbatch + 1, read)
        return np.where(self.kind > Kind.U, -1, made_or_read)

    @property
    def transfers(self) -> dict[str, np.ndarray]:
        """The transfers as columns.

        `action` (that takes what was sent), `from`, `to` (devices), `sent`, `arrived` (seconds).
        """
        moved = self.schedule.crossing
        return {
            "action": moved,
            "from": self.device[self.schedule.inputs[moved]],
            "to": self.device[moved],
            "sent": self.sent[moved],
            "arrived": self.arrived[moved],
        }

    # ---- measures

    @cached_property
    def makespan(self) -> float:
        """Last end minus first start."""
        return float(self.end.max() - self.start.min())

    @cached_property
    def busy(self) -> np.ndarray:
        """Compute seconds of each device (F, B, I, W and U)."""
        seconds = np.where(self.kind <= Kind.U, self.end - self.start, 0)
        return np.bincount(self.device, seconds, self.schedule.devices)

    @property
    def ideal(self) -> float:
        """Compute seconds of the busiest device: no order can be faster."""
        return float(self.busy.max())

    @cached_property
    def span(self) -> float:
        """The longest time from first start to last end on one device."""
        return max(
            float(self.end[a:b].max() - self.start[a:b].min())
            for a, b in pairwise(self.schedule.bounds)
            if a < b
        )

    @property
    def bubble(self) -> Bubble:
        ideal = self.ideal
        if not ideal:
            return Bubble(0.0, 0.0, 0.0)
        of_total = 1 - float(self.busy.sum()) / (self.schedule.devices * self.makespan)
        return Bubble(of_total, (self.makespan - ideal) / ideal, (self.span - ideal) / self.span)

    @property
    def peak_in_flight(self) -> list[int]:
        return self.schedule.peak_in_flight

    @property
    def weight_versions(self) -> list[int]:
        return self.schedule.weight_versions

    def summary(self) -> str:
        """One line of text that says what a picture of the timeline shows."""
        s = self.schedule
        sizes = [plural(s.devices, "device")]
        if s.stages != s.devices:
            sizes.append(plural(s.stages, "stage"))
        sizes.append(plural(s.microbatches, "micro-batch"))
        if s.batches > 1:
            sizes.append(plural(s.batches, "batch"))
        peaks = " ".join(map(str, self.peak_in_flight))
        paced = "" if self.late is None else f" Paced, {self.late} actions late."
        return (
            f"{s.name}, {self.source}: {', '.join(sizes)}. Makespan {self.makespan:.4g}; "
            f"{self.bubble.of_total:.1%} of all device time is idle ({self.bubble.over_ideal:.1%} "
            f"over ideal). Peak in flight {peaks}.{paced}"
        )

    def __repr__(self) -> str:
        return f"<Timeline {self.summary()}>"

    def part(self, first: int, last: int) -> "Timeline":
        """The spans of batches `first` to `last` - 1 alone; a run's first batch warms up.

        Raises ScheduleError as `Schedule.part` does.

        >>> from pipelab import make, simulate
        >>> simulate(make("gpipe", 2, 4, batches=3)).part(2, 3).schedule.batches
        1
        """
        s, batch = self.schedule, self.batch
        kept = (batch >= first) & (batch < last)
        times = {name: getattr(self, name)[kept] for name in ("start", "end", "sent", "arrived")}
        if self.on_core is not None:
            times["on_core"] = self.on_core[kept]
        return replace(self, schedule=s.part(first, last), **times)

    def warmed_up(self) -> "Timeline":
        """Without the first batch, which warms up; all of it where it cannot be cut there."""
        return self if self.warm.all() else self.part(1, self.schedule.batches)

    @property
    def warm(self) -> np.ndarray:
        """Which actions are not of the first batch; all where it cannot be cut off."""
        s = self.schedule
        cut = s.batches > 1 and s.microbatches % s.per_update == 0
        return self.batch >= cut

    def batch_seconds(self) -> np.ndarray:
        """Of each batch but the first: from the end of the one before it to its own."""
        batch = self.batch
        ends = [self.end[batch == b].max() for b in range(self.schedule.batches)]
        return np.diff(ends)

    def parts(self) -> Parts:
        """The parts of all actions; what is negative (a start before its input) counts as 0.

        A row is free from the first start of the whole timeline on.
        """
        source, before = self.schedule.inputs, self.schedule.before
        arrival = self.input_arrival()
        free = np.where(before >= 0, self.end[before], self.start.min())
        duration = self.end - self.start
        delay = np.where(source >= 0, arrival - self.end[source], 0)
        wait = self.start - np.maximum(free, arrival)
        duration, delay, wait = np.maximum((duration, delay, wait), 0)
        return Parts(duration, delay, wait, arrival > free)

    # ---- where idle time goes

    def attribution(self) -> dict[str, np.ndarray]:
        """Idle seconds of each device by cause; see `pipelab.idle.attribution`."""
        from pipelab.idle import attribution

        return attribution(self)

    def critical_path(self) -> list[int]:
        """Flat indices of actions, each waiting for the one before, that end with the last action.

        Raises ValueError for a table with transfers.
        """
        self.refuse_transfers("critical_path")
        arrival = self.input_arrival()
        path = [int(np.argmax(self.end))]
        while True:
            i = path[-1]
            source, before = int(self.schedule.inputs[i]), int(self.schedule.before[i])
            if before >= 0 and (source < 0 or self.end[before] >= arrival[i]):
                path.append(before)
            elif source >= 0:
                path.append(source)
            else:
                return path[::-1]

    def refuse_transfers(self, what: str) -> None:
        """Raise ValueError if the table has its transfers written out, which `what` cannot read."""
        if self.schedule.has_transfers:
            raise ValueError(
                f"{what}: {self.schedule.name} has its transfers written out; ask the table "
                "without them"
            )

    def input_arrival(self) -> np.ndarray:
        """When each action's input is on its device (-inf: it takes none)."""
        source = self.schedule.inputs
        local = np.where(source >= 0, self.end[source], -np.inf)
        return np.where(np.isnan(self.arrived), local, self.arrived)

    # ---- other forms

    def to_frame(self):
        """The spans as a pandas DataFrame, one row per action (needs pandas)."""
        import pandas as pd

        names = ("device", "stage", "kind", "microbatch", "version", "start", "end")
        frame = pd.DataFrame({name: getattr(self, name) for name in names})
        return frame.assign(kind=[Kind(k).name for k in self.kind])

    def to_trace(self) -> dict[str, Any]:
        """A Chrome trace; see `pipelab.trace.to_trace`."""
        from pipelab.trace import to_trace

        return to_trace(self)

    @classmethod
    def from_trace(
        cls,
        paths: str | PathLike | Sequence[str | PathLike],
        schedule: Schedule | str | None = None,
    ) -> "Timeline":
        """A run of torch.distributed.pipelining, or of ours, or a CSV of spans, from its files.

        See `pipelab.trace.from_trace`.
        """
        from pipelab.trace import from_trace

        return from_trace(paths, schedule)


def scale_of(largest: float, units: tuple[tuple[float, str], ...]) -> tuple[float, str]:
    """The largest unit that `largest` reaches, as (factor, name)."""
    return next(((f, name) for f, name in units if largest >= f), units[-1])


def plural(count: int, noun: str) -> str:
    """A count and its noun: 1 batch, 2 batches, 2 stages."""
    ending = "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}{ending if count > 1 else ''}"
