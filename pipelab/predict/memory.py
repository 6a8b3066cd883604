"""Bytes over time on every device, by cause; and activations alone, counted in micro-batches.

Memory limits are given in micro-batches: one held by all stages of a device counts 1 there,
whatever its bytes; each stage has a share.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from operator import add, attrgetter, sub
from typing import Literal, NamedTuple

from pipelab.predict.costs import Costs
from pipelab.predict.timeline import Timeline
from pipelab.table.action import Kind, U
from pipelab.table.schedule import Schedule
from pipelab.table.validate import check_type

MEMORY_CAUSES = ("weights", "versions", "gradients", "optimizer", "activations", "buffers")


# The phases of an action: its input arrives; it starts, and the input leaves its buffer; it holds
# what it needs and makes; it ends.
ARRIVES, STARTS, HOLDS, ENDS = range(4)
BEFORE_ALL = -1


def order_of(action: int, phase: int) -> int:
    """The place, among what happens at one time, of an action's phase; actions count in a table or
    a row. A number: with tuples a memory would take twice the time."""
    return 4 * action + phase


class MemoryStep(NamedTuple):
    """At `time` a device takes `change` bytes more (or fewer) for `cause`, one of MEMORY_CAUSES.

    order  among simultaneous steps; memory is freed (a change below 0) before it is taken
    """

    device: int
    time: float
    order: int
    cause: str
    change: float


@dataclass(frozen=True, eq=False)
class Memory:
    """Steps of memory, given in any order and kept in the order of time."""

    devices: int
    steps: Sequence[MemoryStep]
    source: Literal["simulated", "measured"]

    def __post_init__(self) -> None:
        changes = [step for step in self.steps if step.change]
        changes.sort(key=attrgetter("time", "order", "change"))
        object.__setattr__(self, "steps", changes)

    @cached_property
    def of_device(self) -> list[list[MemoryStep]]:
        rows: list[list[MemoryStep]] = [[] for _ in range(self.devices)]
        for step in self.steps:
            rows[step.device].append(step)
        return rows

    def over_time(self, device: int) -> tuple[list[float], dict[str, list[float]]]:
        """Times, and by cause the bytes from each time on: after all steps of that time."""
        held, at = dict.fromkeys(MEMORY_CAUSES, 0.0), {}
        for step in self.of_device[device]:
            held[step.cause] += step.change
            at[step.time] = [*held.values()]  # the last of a time stays
        return [*at], {cause: [x[k] for x in at.values()] for k, cause in enumerate(held)}

    def peak(self, cause: str | None = None) -> list[float]:
        """Per device, the most bytes held at once: of one cause, or of all together."""
        return [
            max(
                accumulate(
                    (step.change for step in steps if cause in (None, step.cause)), initial=0.0
                )
            )
            for steps in self.of_device
        ]

    def at_peak(self, device: int) -> dict[str, float]:
        """The parts that fill a device at the moment of its peak."""
        held = [*accumulate((step.change for step in self.of_device[device]), initial=0.0)]
        filled = dict.fromkeys(MEMORY_CAUSES, 0.0)
        for step in self.of_device[device][: held.index(max(held))]:
            filled[step.cause] += step.change
        return filled


def memory(timeline: Timeline, costs: Costs) -> Memory:
    """The memory of a timeline under the byte costs.

    Model: weights and optimizer state are held throughout, further weight versions from the start
    of the update that makes them to their last reader, gradients from the first backward of an
    update group to its update. Activations are held from the start of a forward to the end of its
    backward; if that is split, to the end of I, then what W needs to the end of W. With
    recomputation, only the stage's input is held until the backward starts. Offloaded activations
    are away from the end of the offload to the start of the reload. Buffers hold inputs that have
    arrived and wait. Temporary values (such as the gradient that a backward works on) and
    fragmentation are left out.

    One rule, as in a measured run: when an action starts, its input moves from the buffer (or what
    recomputation kept) into what the action holds, so nothing counts twice. Memory is freed at an
    action's end, before the next one starts. An action of zero length holds what it needs, too.
    Times that differ only by rounding are one moment.

    >>> from pipelab import Costs, simulate
    >>> from pipelab.schedules import pipedream_flush
    >>> memory(simulate(pipedream_flush(4, 8)), Costs(activations=10)).peak("activations")
    [40.0, 30.0, 20.0, 10.0]
    """
    check_type(Timeline, timeline=timeline)
    check_type(Costs, costs=costs)
    costs = costs.of_copies(timeline.schedule)
    home, steps = timeline.schedule.placement, []
    moments = _moments(timeline)
    for causes in (_constant, _gradients, _versions, _activations, _buffers):
        for cause, stage, size, since, until in causes(timeline.schedule, costs, moments):
            steps.append(MemoryStep(home[stage], *since, cause, size))
            if until:
                steps.append(MemoryStep(home[stage], *until, cause, -size))
    return Memory(timeline.schedule.devices, steps, "simulated")


_Moment = tuple[float, int]  # a time, and the order there


class _Moments(NamedTuple):
    """When each action starts, ends, and gets its input (None: from its own device)."""

    begin: _Moment
    starts: list[_Moment]
    ends: list[_Moment]
    arrives: list[_Moment | None]


def _moments(timeline: Timeline) -> _Moments:
    """Times that differ by rounding alone are one moment."""
    rounded: dict[float, float] = {}
    before = -float("inf")
    times = {time for span in timeline.spans for time in span[3:] if time is not None}
    for time in sorted(times):
        alike = time - before <= 1e-9 * timeline.makespan
        rounded[time] = rounded[before] if alike else time
        before = time
    spans = [*enumerate(timeline.spans)]
    return _Moments(
        (rounded[min(timeline.start)], BEFORE_ALL),
        [(rounded[span.start], order_of(i, STARTS)) for i, span in spans],
        [(rounded[span.end], order_of(i, ENDS)) for i, span in spans],
        [
            None if span.arrived is None else (rounded[span.arrived], order_of(i, ARRIVES))
            for i, span in spans
        ],
    )


# Each cause yields its name, a stage, bytes, and since when and until when it holds them.
Held = Iterator[tuple[str, int, float, _Moment, _Moment | None]]


def _constant(s: Schedule, costs: Costs, moments: _Moments) -> Held:
    for cause in ("weights", "optimizer"):
        for stage, size in enumerate(costs.of(cause, s.stages)):
            yield cause, stage, size, moments.begin, None


def _gradients(s: Schedule, costs: Costs, moments: _Moments) -> Held:
    """From the first backward of an update's group."""
    weights = costs.of("weights", s.stages)
    first: dict[tuple[int, int], int] = {}  # (stage, update) -> flat index
    for i, (stage, kind, k) in enumerate(s.actions):
        if kind in (Kind.B, Kind.I):
            first.setdefault((stage, k // s.per_update), i)
    for (stage, number), i in first.items():
        until = moments.ends[s.position[U(stage, number)]]
        yield "gradients", stage, weights[stage], moments.starts[i], until


def _versions(s: Schedule, costs: Costs, moments: _Moments) -> Held:
    """Versions that outlive the next one; else the update works in place.

    Of weights that are trained: a run keeps frozen ones once.
    """
    weights = costs.of("weights", s.stages)
    for old, new in pairwise(s.lives):
        if old.stage == new.stage and old.last > new.born:
            since = moments.starts[new.born] if new.born >= 0 else moments.begin
            yield "versions", new.stage, weights[new.stage], since, moments.ends[old.last]


def _activations(s: Schedule, costs: Costs, moments: _Moments) -> Held:
    """From a forward to its backward; where there are only forwards, nothing is kept after them."""
    names = ("activations", "weight_activations", "boundary")
    activations, for_weights, boundary = (costs.of(name, s.stages) for name in names)
    recomputed, at = costs.recomputed(s.total, s.microbatches), s.position
    starts, ends = moments.starts, moments.ends
    for i, (stage, kind, k) in enumerate(s.actions):
        if kind is not Kind.F:
            continue
        whole, split = at.get((stage, Kind.B, k), i), at.get((stage, Kind.I, k))
        backward = whole if split is None else split
        last = whole if split is None else at[stage, Kind.W, k]
        share = s.share(k)
        size, since = share * activations[stage], starts[i]
        again = recomputed[k] and backward > i
        kept = min(share * boundary[stage], size) if again else size
        if (gone := at.get((stage, Kind.OFFLOAD, k))) is not None:
            yield "activations", stage, kept, since, ends[gone]
            since = starts[at[stage, Kind.RELOAD, k]]
        if again:
            yield "activations", stage, kept, since, starts[backward]
            since = starts[backward]
        yield "activations", stage, size, since, ends[last]
        if split is not None:
            yield "activations", stage, share * for_weights[stage] - size, ends[split], ends[last]


def _buffers(s: Schedule, costs: Costs, moments: _Moments) -> Held:
    """Inputs that wait."""
    boundary = costs.of("boundary", s.stages)
    for i in s.crossing:
        arrived, start = moments.arrives[i], moments.starts[i]
        if arrived and arrived[0] < start[0]:
            stage, kind, k = s.actions[i]
            size = boundary[stage if kind is Kind.F else stage + 1]
            yield "buffers", stage, s.share(k) * size, arrived, start


# ---- counted in micro-batches

Changes = dict[Kind, list[float]]  # kind -> of each stage


def shares(costs: Costs, placement: Sequence[int], name: str) -> list[float]:
    """The `activations` or `weight_activations` of every stage, in those that its device
    keeps for a micro-batch. A device's stages are alike where it keeps no bytes."""
    n, stages_on = len(placement), Counter(placement)
    whole = [0.0] * (max(placement) + 1)
    for device, size in zip(placement, costs.of("activations", n), strict=True):
        whole[device] += size
    return [
        size / whole[device] if whole[device] > 0 else 1 / stages_on[device]
        for device, size in zip(placement, costs.of(name, n), strict=True)
    ]


def changes(costs: Costs, placement: Sequence[int]) -> Changes:
    """The memory that an action takes (F, as it starts) or frees (below 0, at its end).

    I frees what W does not need; if W needs more than I did, I takes that.
    """
    whole, late = (shares(costs, placement, name) for name in ("activations", "weight_activations"))
    return {
        Kind.F: whole,
        Kind.B: [-x for x in whole],
        Kind.I: [*map(sub, late, whole)],
        Kind.W: [-w for w in late],
        Kind.OFFLOAD: [-x for x in whole],
        Kind.RELOAD: whole,
    }


def reserved(change: Changes) -> Changes:
    """The same for split backwards, if a forward takes at once what its I may take more: then W can
    always follow."""
    more = [max(x, 0.0) for x in change[Kind.I]]
    return change | {
        Kind.F: [*map(add, change[Kind.F], more)],
        Kind.I: [*map(sub, change[Kind.I], more)],
    }


def memory_used(schedule: Schedule, costs: Costs) -> list[float]:
    """Per device, the most it holds at once, in micro-batches' activations, as `memory=` of
    schedules and `pipelab.optimize.order.bound` count it.

    >>> from pipelab.schedules import gpipe, interleaved
    >>> memory_used(gpipe(2, 4), Costs()), memory_used(interleaved(2, 4), Costs())
    ([4.0, 4.0], [2.5, 1.5])
    """
    check_type(Schedule, schedule=schedule)
    check_type(Costs, costs=costs)
    costs = costs.of_copies(schedule)
    # A micro-batch takes one copy of the model.
    change = {
        kind: [schedule.copies * x for x in of_stages]
        for kind, of_stages in changes(costs, schedule.placement).items()
    }
    peaks = []
    for row in schedule.as_held:
        steps = (
            change[a.kind][a.stage] * schedule.share(a.microbatch) for a in row if a.kind in change
        )
        peaks.append(round(max(accumulate(steps, initial=0.0)), 9))
    return peaks
