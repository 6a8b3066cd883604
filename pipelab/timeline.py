"""What ran when: spans in columns, simulated or measured, and the measures taken from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import numpy as np

from pipelab.action import Kind
from pipelab.schedule import Schedule

TRANSFER, HELD, FORWARD, GRADIENT, NOTHING, OVERHEAD = CAUSES = (
    "transfer",
    "held back by the order",
    "waiting for a forward",
    "waiting for a gradient",
    "nothing left",
    "overhead",
)


class Bubble(NamedTuple):
    """Idle time as a fraction, by each definition in use.

    of_total    idle / (p x makespan): the share of all device time that is lost (GPipe)
    over_ideal  (makespan - ideal) / ideal: how much longer than without a bubble (Megatron-LM)
    of_span     (cost - ideal) / cost, cost = the longest span of one device (zero bubble, section 5.3)
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

    `device`, `stage`, `kind`, `microbatch` and `version` are columns of the same length.
    """

    schedule: Schedule
    start: np.ndarray
    end: np.ndarray
    sent: np.ndarray
    arrived: np.ndarray
    source: Literal["simulated", "measured"]
    late: int | None = None

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

    @cached_property
    def version(self) -> np.ndarray:
        """The weight version that an action reads; for an update the one that it makes; -1 for a transfer."""
        read = self.schedule.versions[self.stage, self.microbatch]
        return np.where(
            self.kind == Kind.U, self.microbatch + 1, np.where(self.kind > Kind.U, -1, read)
        )

    @property
    def transfers(self) -> dict[str, np.ndarray]:
        """The transfers as columns: `action` (that takes it), `from`, `to` (devices), `sent`, `arrived` (seconds)."""
        moved = self.schedule.crossing
        source = self.schedule.inputs[moved]
        return {
            "action": moved,
            "from": self.device[source],
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
            if b > a
        )

    @property
    def bubble(self) -> Bubble:
        if not self.ideal:
            return Bubble(0.0, 0.0, 0.0)
        of_total = 1 - self.busy.sum() / (self.schedule.devices * self.makespan)
        return Bubble(
            float(of_total),
            (self.makespan - self.ideal) / self.ideal,
            (self.span - self.ideal) / self.span,
        )

    @property
    def peak_in_flight(self) -> list[int]:
        return self.schedule.peak_in_flight

    @property
    def weight_versions(self) -> list[int]:
        return self.schedule.weight_versions

    def measures(self) -> dict[str, Any]:
        """The numbers of the command line's JSON."""
        return {
            "makespan": self.makespan,
            "span": self.span,
            "ideal": self.ideal,
            "bubble": self.bubble._asdict(),
            "peak_in_flight": self.peak_in_flight,
            "weight_versions": self.weight_versions,
        }

    def summary(self) -> str:
        """One line of text that says what a picture of the timeline shows."""
        s = self.schedule
        chunks = f", {s.stages} stages" if s.stages != s.devices else ""
        batches = f", {s.batches} batches" if s.batches > 1 else ""
        return (
            f"{s.name}, {self.source}: {s.devices} device{'s'[: s.devices > 1]}{chunks}, {s.microbatches} "
            f"micro-batch{'es' * (s.microbatches > 1)}{batches}. "
            f"Makespan {self.makespan:.4g}; {self.bubble.of_total:.1%} of all device time is idle "
            f"({self.bubble.over_ideal:.1%} over ideal). Peak in flight {' '.join(map(str, self.peak_in_flight))}."
            + (f" Paced, {self.late} actions late." if self.late is not None else "")
        )

    def __repr__(self) -> str:
        return f"<Timeline {self.summary()}>"

    # ---- where idle time goes

    def attribution(self) -> dict[str, np.ndarray]:
        """Idle seconds of each device by cause; the causes add up to makespan - busy exactly.

        Before an action whose input was sent at e: `transfer` from e until it arrived; before e `held back by the order` if
        the input of a later forward of the row is there already and the action is no forward, else `waiting for a forward`
        or `for a gradient`. After the last action: `nothing left`. `overhead` is what a measured run shows between an
        action's input being there and its start; 0 in a simulation. Raises ValueError for a table with transfers.
        """
        self._without_transfers("attribution")
        out = {cause: np.zeros(self.schedule.devices) for cause in CAUSES}
        begin, finish = float(self.start.min()), float(self.end.max())
        there = self._input_there()
        for d, (a, b) in enumerate(pairwise(self.schedule.bounds)):
            free = np.concatenate(
                [[begin], np.maximum.accumulate(self.end[a:b])]
            )  # when the row before i is done
            is_forward = self.kind[a:b] == Kind.F
            ready = np.where(is_forward, there[a:b], np.inf)
            later = np.append(np.minimum.accumulate(ready[::-1])[::-1], np.inf)[
                1:
            ]  # first later forward that is ready
            g0, g1 = free[:-1], np.maximum(self.start[a:b], free[:-1])
            e = np.where(np.isnan(self.sent[a:b]), g0, np.clip(self.sent[a:b], g0, g1))
            arrive = np.where(np.isnan(self.arrived[a:b]), e, np.clip(self.arrived[a:b], e, g1))
            held = np.where(is_forward, 0, e - np.clip(later, g0, e))
            waiting = e - g0 - held
            out[TRANSFER][d] = (arrive - e).sum()
            out[OVERHEAD][d] = (g1 - arrive).sum()
            out[HELD][d] = held.sum()
            out[FORWARD][d] = waiting[is_forward].sum()
            out[GRADIENT][d] = waiting[~is_forward].sum()
            out[NOTHING][d] = finish - free[-1]
        return out

    def imbalance(self) -> float:
        """Compute seconds that the other devices do less than the busiest: sum of ideal - busy."""
        return float((self.ideal - self.busy).sum())

    def critical_path(self) -> list[int]:
        """Flat indices of a chain of actions, each waiting for the one before, that ends with the last action.

        Raises ValueError for a table with transfers.
        """
        self._without_transfers("critical_path")
        there, begins = self._input_there(), set(self.schedule.bounds)
        path = [int(np.argmax(self.end))]
        while True:
            i = path[-1]
            before = i - 1 if i not in begins else -1
            source = int(self.schedule.inputs[i])
            if before >= 0 and (source < 0 or self.end[before] >= there[i]):
                path.append(before)
            elif source >= 0:
                path.append(source)
            else:
                return path[::-1]

    def _without_transfers(self, what: str) -> None:
        if self.schedule.has_transfers:
            raise ValueError(
                f"{what}: {self.schedule.name} has its transfers written out; ask the table without them"
            )

    def _input_there(self) -> np.ndarray:
        """When each action's input is on its device (-inf: it takes none)."""
        source = self.schedule.inputs
        local = np.where(source >= 0, self.end[source], -np.inf)
        return np.where(np.isnan(self.arrived), local, self.arrived)

    # ---- other forms

    def to_frame(self):
        """The spans as a pandas DataFrame, one row per action (needs pandas)."""
        import pandas as pd

        columns = {
            c: getattr(self, c)
            for c in ("device", "stage", "kind", "microbatch", "version", "start", "end")
        }
        columns["kind"] = [Kind(k).name for k in self.kind]
        return pd.DataFrame(columns)

    def to_trace(self) -> dict[str, Any]:
        """A Chrome trace (chrome://tracing, Perfetto): a process per device, transfers on a track of their own, with arrows."""
        events: list[dict[str, Any]] = []
        for d in range(self.schedule.devices):
            events.append(
                {"ph": "M", "pid": d, "name": "process_name", "args": {"name": f"device {d}"}}
            )
            for tid, name in enumerate(("compute", "transfers")):
                events.append(
                    {"ph": "M", "pid": d, "tid": tid, "name": "thread_name", "args": {"name": name}}
                )
        zero = self.start.min()
        start, end, sent, arrived = (
            (x - zero) * 1e6 for x in (self.start, self.end, self.sent, self.arrived)
        )  # microseconds
        for i in range(len(start)):
            action = self.schedule.action(i)
            events.append(
                {
                    "ph": "X",
                    "pid": int(self.device[i]),
                    "tid": 0,
                    "name": f"PP:{action}",
                    "cat": action.kind.name,
                    "ts": start[i],
                    "dur": end[i] - start[i],
                    "args": {"version": int(self.version[i])},
                }
            )
        for i in self.schedule.crossing.tolist():
            j = int(self.schedule.inputs[i])
            source, target = int(self.device[j]), int(self.device[i])
            name = f"{self.schedule.action(j)} to device {target}"
            events.append(
                {
                    "ph": "X",
                    "pid": source,
                    "tid": 1,
                    "name": name,
                    "cat": "transfer",
                    "ts": sent[i],
                    "dur": arrived[i] - sent[i],
                }
            )
            arrow = {"name": name, "cat": "transfer", "id": i}
            events.append({**arrow, "ph": "s", "pid": source, "tid": 0, "ts": end[j]})
            events.append({**arrow, "ph": "f", "bp": "e", "pid": target, "tid": 0, "ts": start[i]})
        return {
            "traceEvents": events,
            "displayTimeUnit": "ms",
            "otherData": {"schedule": self.schedule.name, "source": self.source},
        }
