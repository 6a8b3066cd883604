"""A timeline: spans, simulated or measured, and the measures taken from them."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, NamedTuple

from pipelab.predict.attribution import Cause, attribution
from pipelab.show.units import plural
from pipelab.table.action import Kind
from pipelab.table.schedule import Schedule
from pipelab.table.timing import Span


class Parts(NamedTuple):
    """The columns of a timeline, in seconds per action, flat over the table.

    duration  of its compute
    delay     from the end of the action whose output it takes until that output is on its device; 0
              if it takes none
    wait      from when it could start, its row free and its input there, to its start
    fed       whether its input came after its row was free
    """

    duration: list[float]
    delay: list[float]
    wait: list[float]
    fed: list[bool]


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
    """Spans of a schedule's actions, flat over its table (rows one after another).

    source  "simulated" or "measured"
    late    paced runs: how many actions took longer than their cost; None otherwise
    """

    schedule: Schedule
    spans: tuple[Span, ...]
    source: Literal["simulated", "measured"]
    late: int | None = None

    # ---- the spans' times

    @cached_property
    def start(self) -> list[float]:
        return [span.start for span in self.spans]

    @cached_property
    def end(self) -> list[float]:
        return [span.end for span in self.spans]

    @cached_property
    def batch(self) -> list[int]:
        """The batch of each action's micro-batch; of an update, that of its first one."""
        s = self.schedule
        size = {Kind.U: s.per_update}  # micro-batches of a number
        return [a.microbatch * size.get(a.kind, 1) // s.microbatches for a in s.actions]

    @cached_property
    def before(self) -> list[int | None]:
        """`Schedule.before`; of two that overlap, the one that ended later."""
        joined, end = self.schedule.joined, self.end
        return [i - 1 if i in joined and end[i - 1] > end[i] else i for i in self.schedule.before]

    # ---- measures

    @cached_property
    def makespan(self) -> float:
        """Last end minus first start."""
        return max(self.end) - min(self.start)

    @cached_property
    def busy(self) -> list[float]:
        """Compute seconds of each device (F, B, I, W and U)."""
        seconds, joined = [0.0] * self.schedule.devices, self.schedule.joined
        for i, span in enumerate(self.spans):
            if span.action.kind <= Kind.U:
                # What overlaps counts once.
                start = max(span.start, self.end[i - 1]) if i in joined else span.start
                seconds[span.device] += max(span.end - start, 0.0)
        return seconds

    @property
    def ideal(self) -> float:
        """Compute seconds of the busiest device: no order can be faster."""
        return max(self.busy)

    @cached_property
    def span(self) -> float:
        """The longest time from first start to last end on one device."""
        return max(
            max(self.end[a:b]) - min(self.start[a:b])
            for a, b in pairwise(self.schedule.bounds)
            if a < b
        )

    @property
    def bubble(self) -> Bubble:
        ideal = self.ideal
        if not ideal:
            return Bubble(0.0, 0.0, 0.0)
        of_total = 1 - sum(self.busy) / (self.schedule.devices * self.makespan)
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
        sizes.append(plural(s.microbatches // s.per_sequence, "micro-batch"))
        if s.slices:
            sizes[-1] += f" in {s.per_sequence} slices each"
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
        """The spans of batches `first` to `last` - 1; a run's first batch warms up.

        Raises ScheduleError as `Schedule.part` does.

        >>> from pipelab import make, simulate
        >>> simulate(make("gpipe", 2, 4, batches=3)).part(2, 3).schedule.batches
        1
        """
        kept = [span for span, b in zip(self.spans, self.batch, strict=True) if first <= b < last]
        moved = {
            i: (span.sent, span.arrived) for i, span in enumerate(kept) if span.sent is not None
        }
        cut = self.schedule.part(first, last)
        start, end = [span.start for span in kept], [span.end for span in kept]
        return replace(self, schedule=cut, spans=cut.spans(start, end, moved))

    def warmed_up(self) -> "Timeline":
        """Without the first batch, which warms up; the whole timeline if it cannot be cut there."""
        return self if all(self.warm) else self.part(1, self.schedule.batches)

    @property
    def warm(self) -> list[bool]:
        """The actions after the first batch; all of them if it cannot be cut off."""
        s = self.schedule
        first = 1 if s.batches > 1 and s.microbatches % s.per_update == 0 else 0
        return [batch >= first for batch in self.batch]

    @property
    def batch_ends(self) -> list[float]:
        """When the last action of each batch ended."""
        ends = [-math.inf] * self.schedule.batches
        for batch, end in zip(self.batch, self.end, strict=True):
            ends[batch] = max(ends[batch], end)
        return ends

    def batch_seconds(self) -> list[float]:
        """The seconds of each batch but the first, from the end of the one before it to its own."""
        return [later - earlier for earlier, later in pairwise(self.batch_ends)]

    def parts(self) -> Parts:
        """The parts of all actions; a negative one (a start before its input) counts as 0.

        A row is free from the first start of the whole timeline on.
        """
        s, begin = self.schedule, min(self.start)
        parts = Parts([], [], [], [])
        arrivals = self.input_arrival()
        fed = [*arrivals]
        for i in s.joined:  # two that overlap wait for both inputs
            fed[i - 1] = fed[i] = max(arrivals[i - 1 : i + 1])
        for span, source, before, arrived, arrival in zip(
            self.spans, s.inputs, self.before, arrivals, fed, strict=True
        ):
            free = begin if before is None else self.end[before]
            delay = 0.0 if source is None else arrived - self.end[source]
            parts.duration.append(max(span.end - span.start, 0.0))
            parts.delay.append(max(delay, 0.0))
            parts.wait.append(max(span.start - max(free, arrival), 0.0))
            parts.fed.append(arrival > free)
        return parts

    # ---- where idle time goes

    def attribution(self) -> dict[Cause, list[float]]:
        """Idle seconds of each device by cause; see `pipelab.predict.attribution.attribution`.

        Raises ValueError for a table with transfers.
        """
        self.refuse_transfers("attribution")
        return attribution(self.schedule, self.spans)

    def critical_path(self) -> list[int]:
        """Flat indices of actions, each waiting for the one before, that end with the last action.

        Raises ValueError for a table with transfers.
        """
        self.refuse_transfers("critical_path")
        arrival, joined = self.input_arrival(), self.schedule.joined
        path = [self.end.index(max(self.end))]
        while True:
            i = path[-1]
            # Two that overlap wait for both inputs.
            together = [i - 1, i] if i in joined else [i, i + 1] if i + 1 in joined else [i]
            late = max(together, key=arrival.__getitem__)
            source, before = self.schedule.inputs[late], self.before[i]
            if before is not None and (source is None or self.end[before] >= arrival[late]):
                path.append(before)
            elif source is not None:
                path.append(source)
            else:
                return path[::-1]

    def refuse_transfers(self, what: str) -> None:
        """ValueError for a table with transfers written out, which `what` cannot read."""
        if self.schedule.has_transfers:
            raise ValueError(
                f"{what}: {self.schedule.name} has its transfers written out; use the table "
                "without them"
            )

    def input_arrival(self) -> list[float]:
        """`Schedule.arrivals` of these spans."""
        return self.schedule.arrivals(self.spans)
