"""Bytes over time on every device, by cause."""

from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from typing import Literal

import numpy as np

from pipelab.action import Kind
from pipelab.costs import Costs
from pipelab.timeline import Timeline

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
    update group to its update. Activations from the start of a forward to the end of its backward
    (of W where the backward is split); with recomputation only the stage's input until the backward
    starts. Buffers: an input that has arrived and waits. Nothing for temporary values (such as the
    gradient that a backward works on) or fragmentation.

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
    at, updates = s.position, s.updates if s.training else 0
    weights, optimizer, activations, boundary = (
        costs.of(name, s.stages) for name in ("weights", "optimizer", "activations", "boundary")
    )
    # Among equal times there is an order: action i starts at 2 i, ends at 2 i + 1.
    begin = (start.min(), -1)
    steps: list[tuple[float, ...]] = []  # (time, order, device, cause, change)

    def starts(i: int) -> tuple[float, int]:
        return start[i], 2 * i

    def ends(i: int) -> tuple[float, int]:
        return (end[i], 2 * i + 1) if i >= 0 else begin

    def hold(cause: str, stage: int, size: float, since: tuple, until: tuple | None = None) -> None:
        if size:
            home = s.placement[stage], CAUSES.index(cause)
            steps.append((*since, *home, size))
            if until:
                steps.append((*until, *home, -size))

    for stage in range(s.stages):
        hold("weights", stage, weights[stage], begin)
        hold("optimizer", stage, optimizer[stage], begin)
        for t in range(updates):
            group = at[[Kind.B, Kind.I], stage, t * s.per_update : (t + 1) * s.per_update]
            since, until = starts(group[group >= 0].min()), ends(at[Kind.U, stage, t])
            hold("gradients", stage, weights[stage], since, until)
    for old, new in pairwise(s.lives):
        if new.stage == old.stage and old.last > new.born:  # else the update works in place
            hold("versions", old.stage, weights[old.stage], starts(new.born), ends(old.last))
    recomputed = costs.recompute.mask(s.total, s.microbatches)
    forwards = np.flatnonzero(timeline.kind == Kind.F)
    stages, microbatches = timeline.stage[forwards], timeline.microbatch[forwards]
    # Where there are only forwards, nothing is kept after them.
    backwards = np.maximum(forwards, at[[Kind.B, Kind.I]].max(0)[stages, microbatches])
    lasts = np.maximum(forwards, at[[Kind.B, Kind.W]].max(0)[stages, microbatches])
    columns = (forwards, stages, microbatches, backwards, lasts)
    for i, stage, k, backward, last in np.transpose(columns).tolist():
        since = starts(i)
        if recomputed[k] and backward > i:
            size = min(boundary[stage], activations[stage])
            hold("activations", stage, size, since, starts(backward))
            since = starts(backward)
        hold("activations", stage, activations[stage], since, ends(last))
    for i in s.crossing[arrived[s.crossing] < start[s.crossing]].tolist():
        stage, kind, _ = s.action(i)
        size = boundary[stage if kind == Kind.F else stage + 1]
        hold("buffers", stage, size, (arrived[i], 2 * i - 1), starts(i))
    # When an action starts, what leaves (below 0) goes before what comes.
    in_order = np.array(sorted(steps, key=itemgetter(0, 1, 4))).reshape(-1, 5)
    time, _, device, cause, change = in_order.T
    return Memory(s.devices, device.astype(int), time, cause.astype(int), change, "simulated")


def _moments(timeline: Timeline) -> np.ndarray:
    """Start, end and arrival of every action (3, actions); those that rounding parts are one."""
    times = np.stack([timeline.start, timeline.end, timeline.arrived])
    every = np.unique(times[~np.isnan(times)])
    new = np.diff(every, prepend=-np.inf) > 1e-9 * timeline.makespan
    moments = every[new][np.cumsum(new) - 1]
    # The times of inputs that came from no other device are nan, and stay so.
    return np.append(moments, np.nan)[np.searchsorted(every, times)]
