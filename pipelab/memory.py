"""Bytes over time on every device, by cause; and activations alone, counted in micro-batches.

Schedules are limited in the latter: a micro-batch that all stages of a device keep counts 1 there,
whatever its bytes, and a stage has its share of that.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from pipelab.action import Kind
from pipelab.costs import Costs
from pipelab.schedule import Schedule
from pipelab.timeline import Timeline

Moments = tuple[np.ndarray, np.ndarray]  # times, and an order among equal ones
CAUSES = ("weights", "versions", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True, eq=False)
class Memory:
    """Steps of memory: at `time`, `device` takes `change` bytes more (or fewer) for `cause`.

    `cause` is an index into CAUSES. Sorted by time; within one device the order of equal times is
    the order in which things happened.
    """

    devices: int
    device: np.ndarray
    time: np.ndarray
    cause: np.ndarray
    change: np.ndarray
    source: Literal["simulated", "measured"]

    @classmethod
    def of(
        cls, devices: int, steps: Iterable[tuple], source: Literal["simulated", "measured"]
    ) -> "Memory":
        """Of steps in any order: (device, time, place, cause, change), numbers or arrays.

        place  in the order at one time; what leaves (a change below 0) goes before what comes
        """
        table = np.concatenate([np.column_stack(np.broadcast_arrays(*step)) for step in steps])
        device, time, place, cause, change = table[table[:, 4] != 0].T
        by = np.lexsort((change, place, time))
        where = device[by].astype(int), time[by], cause[by].astype(int)
        return cls(devices, *where, change[by], source)

    def over_time(self, device: int) -> tuple[np.ndarray, np.ndarray]:
        """Times, and bytes from each time on by cause: shapes (steps,) and (causes, steps)."""
        mine = self.device == device
        change = np.where(np.arange(len(CAUSES))[:, None] == self.cause[mine], self.change[mine], 0)
        return self.time[mine], np.cumsum(change, axis=1)

    def settled(self, device: int) -> tuple[np.ndarray, np.ndarray]:
        """As `over_time`, once for each moment: what holds after all its steps."""
        time, level = self.over_time(device)
        last = np.flatnonzero(np.append(np.diff(time) > 0, True)[: len(time)])
        return time[last], level[:, last]

    def peak(self, cause: str | None = None) -> list[float]:
        """Per device, the most bytes held at once: of one cause, or of all together."""
        rows = [CAUSES.index(cause)] if cause else slice(None)
        held = (self.over_time(d)[1][rows].sum(axis=0) for d in range(self.devices))
        return [float(level.max(initial=0)) for level in held]

    def at_peak(self, device: int) -> dict[str, float]:
        """What fills a device at the moment of its peak."""
        _, level = self.over_time(device)
        top = level[:, np.argmax(level.sum(axis=0))] if level.size else np.zeros(len(CAUSES))
        return dict(zip(CAUSES, top.tolist(), strict=True))


def memory(timeline: Timeline, costs: Costs) -> Memory:
    """The memory of a timeline under the byte costs.

    Model: weights and optimizer state are there throughout. Further weight versions from the start
    of the update that makes them to their last reader. Gradients from the first backward of an
    update group to its update. Activations from the start of a forward to the end of its backward;
    where that is split, to the end of I, and from there to the end of W what W needs. With
    recomputation only the stage's input until the backward starts. Buffers: an input that has
    arrived and waits. Nothing for temporary values (such as the gradient that a backward works on)
    or fragmentation.

    One rule, as in a measured run: when an action starts, its input leaves the buffer (or what
    recomputation has kept of it) and is part of what the action holds, so that nothing counts
    twice; what it gives back goes at its end, before the next action starts. An action of no length
    holds what it needs, too. Times that differ by rounding alone are one moment.

    >>> from pipelab import Costs, simulate
    >>> from pipelab.schedules import pipedream_flush
    >>> memory(simulate(pipedream_flush(4, 8)), Costs(activations=10)).peak("activations")
    [40.0, 30.0, 20.0, 10.0]
    """
    s = timeline.schedule
    start, end, arrived = _moments(timeline)
    at, every = s.position, np.arange(s.stages)
    updates = np.arange(s.updates if s.training else 0)
    weights, optimizer, activations, for_weights, boundary = (
        costs.of(name, s.stages)
        for name in ("weights", "optimizer", "activations", "weight_activations", "boundary")
    )
    steps: list[tuple] = []  # of `Memory.of`

    # In the order among equal times action i starts at 2 i, and ends at 2 i + 1.
    def starts(i: np.ndarray) -> Moments:
        return start[i], 2 * i

    def ends(i: np.ndarray) -> Moments:
        return np.where(i < 0, start.min(), end[i]), 2 * i + 1

    def hold(
        cause: str, stages: np.ndarray, sizes: np.ndarray, since: Moments, until: Moments | None
    ) -> None:
        home = np.array(s.placement)[stages]
        steps.append((home, *since, CAUSES.index(cause), sizes))
        if until:
            steps.append((home, *until, CAUSES.index(cause), -sizes))

    always = ends(np.full_like(every, -1))
    hold("weights", every, weights, always, None)
    hold("optimizer", every, optimizer, always, None)
    # The gradients of an update, from the first backward of its group.
    backwards = at[[Kind.B, Kind.I]].max(0)
    for t in updates:
        group = backwards[:, t * s.per_update : (t + 1) * s.per_update]
        first = np.where(group < 0, len(start), group).min(1)
        hold("gradients", every, weights, starts(first), ends(at[Kind.U, :, t]))
    # Versions that outlive the next one; else the update works in place.
    pairs = [
        (old.stage, new.born, old.last)
        for old, new in pairwise(s.lives)
        if new.stage == old.stage and old.last > new.born
    ]
    stage, born, last = np.array(pairs, int).reshape(-1, 3).T
    hold("versions", stage, weights[stage], starts(born), ends(last))
    # Activations; where there are only forwards, nothing is kept after them.
    forward = np.flatnonzero(timeline.kind == Kind.F)
    stage, k = timeline.stage[forward], timeline.microbatch[forward]
    backward = np.maximum(forward, backwards[stage, k])
    last = np.maximum(forward, at[[Kind.B, Kind.W]].max(0)[stage, k])
    again = costs.recompute.mask(s.total, s.microbatches)[k] & (backward > forward)
    kept = np.minimum(boundary, activations)[stage] * again
    hold("activations", stage, kept, starts(forward), starts(backward))
    since = np.where(again, starts(backward), starts(forward))
    hold("activations", stage, activations[stage], (since[0], since[1]), ends(last))
    split = at[Kind.I][stage, k] >= 0
    changed = (for_weights - activations)[stage] * split
    hold("activations", stage, changed, ends(backward), ends(last))
    # Inputs that wait.
    late = s.crossing[arrived[s.crossing] < start[s.crossing]]
    stage = timeline.stage[late]
    size = boundary[np.where(timeline.kind[late] == Kind.F, stage, stage + 1)]
    hold("buffers", stage, size, (arrived[late], 2 * late - 1), starts(late))
    return Memory.of(s.devices, steps, "simulated")


def _moments(timeline: Timeline) -> np.ndarray:
    """Start, end and arrival of every action (3, actions); those that rounding parts are one."""
    times = np.stack([timeline.start, timeline.end, timeline.arrived])
    every = np.unique(times[~np.isnan(times)])
    new = np.diff(every, prepend=-np.inf) > 1e-9 * timeline.makespan
    moments = every[new][np.cumsum(new) - 1]
    # The times of inputs that came from no other device are nan, and stay so.
    return np.append(moments, np.nan)[np.searchsorted(every, times)]


# ---- counted in micro-batches


def shares(costs: Costs, placement: Sequence[int] | np.ndarray, name: str) -> np.ndarray:
    """Of every stage: its `activations`, or its `weight_activations`, in those that its device
    keeps for a micro-batch. A device's stages are alike where it keeps no bytes."""
    home = np.array(placement)
    whole = np.bincount(home, costs.of("activations", len(home)))[home]
    even = 1 / np.bincount(home)[home]
    return np.divide(costs.of(name, len(home)), whole, out=even, where=whole > 0)


def changes(costs: Costs, placement: Sequence[int] | np.ndarray) -> np.ndarray:
    """[kind, stage]: what an action takes (F, as it starts) or gives back (below 0, at its end).

    I gives back what W does not need; where W needs more than I did, I takes that.
    """
    whole, late = (shares(costs, placement, name) for name in ("activations", "weight_activations"))
    change = np.zeros((len(Kind), len(whole)))
    change[Kind.F], change[Kind.B] = whole, -whole
    change[Kind.I], change[Kind.W] = late - whole, -late
    return change


def reserved(change: np.ndarray) -> np.ndarray:
    """The same for split backwards, if a forward takes at once what its I may take more: then W can
    always follow."""
    more = np.maximum(change[Kind.I], 0)
    change = change.copy()
    change[Kind.F] += more
    change[Kind.I] -= more
    return change


def memory_used(schedule: Schedule, costs: Costs) -> list[float]:
    """Per device, the most that it keeps at once: in activations of a micro-batch, as
    `memory=` of schedules and `pipelab.search.bound` count it.

    >>> from pipelab.schedules import gpipe, interleaved
    >>> memory_used(gpipe(2, 4), Costs()), memory_used(interleaved(2, 4), Costs())
    ([4.0, 4.0], [2.5, 1.5])
    """
    _, stage, kind, _ = schedule.columns
    steps = changes(costs, schedule.placement)[kind, stage]
    rows = (steps[a:b] for a, b in pairwise(schedule.bounds))
    return [float(np.cumsum(row).max(initial=0).round(9)) for row in rows]
