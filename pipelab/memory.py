"""Bytes over time on every device, by cause."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from pipelab.action import Kind
from pipelab.costs import Costs
from pipelab.timeline import Timeline

CAUSES = ("weights", "versions", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True, eq=False)
class Memory:
    """Steps of memory: at `time`, `device` takes `change` bytes more (or fewer) for `cause` (an index into CAUSES).

    Sorted by time; within one device the order of equal times is the order in which things happened.
    """

    devices: int
    device: np.ndarray
    time: np.ndarray
    cause: np.ndarray
    change: np.ndarray
    source: Literal["simulated", "measured"]

    def over_time(self, device: int) -> tuple[np.ndarray, np.ndarray]:
        """Times, and bytes from each time on with one row per cause: shapes (steps,) and (causes, steps)."""
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
        return [
            float(self.over_time(d)[1][rows].sum(axis=0).max(initial=0))
            for d in range(self.devices)
        ]

    def at_peak(self, device: int) -> dict[str, float]:
        """What fills a device at the moment of its peak."""
        _, level = self.over_time(device)
        top = level[:, np.argmax(level.sum(axis=0))] if level.size else np.zeros(len(CAUSES))
        return dict(zip(CAUSES, top.tolist(), strict=True))


def memory(timeline: Timeline, costs: Costs) -> Memory:
    """The memory of a timeline under the byte costs.

    Model: weights and optimizer state are there throughout. Further weight versions from the update that makes them to
    their last reader. Gradients from the first backward of an update group to its update. Activations from the start of a
    forward to the end of its backward (of W where the backward is split); with recomputation only the stage's input until
    the backward starts. Buffers: an input that has arrived and waits. Nothing for temporary values or fragmentation.

    >>> from pipelab import Costs, simulate
    >>> from pipelab.schedules import pipedream_flush
    >>> memory(simulate(pipedream_flush(4, 8)), Costs(activations=10)).peak("activations")
    [40.0, 30.0, 20.0, 10.0]
    """
    s = timeline.schedule
    n, at = s.stages, s.position
    weights, optimizer, activations, boundary = (
        costs.of(name, n) for name in ("weights", "optimizer", "activations", "boundary")
    )
    begin = float(timeline.start.min())
    start, end = timeline.start, timeline.end
    steps: list[tuple] = []  # (device, time, order, cause, change); `order` settles equal times

    def step(device, time, order, cause, change):
        if change:
            steps.append((device, time, order, CAUSES.index(cause), change))

    for stage, d in enumerate(s.placement):
        step(d, begin, -1, "weights", weights[stage])
        step(d, begin, -1, "optimizer", optimizer[stage])
        for t in range(s.updates if s.training else 0):
            first = at[[Kind.B, Kind.I], stage, t * s.per_update : (t + 1) * s.per_update]
            i, u = int(first[first >= 0].min()), int(at[Kind.U, stage, t])
            step(d, start[i], 2 * i, "gradients", weights[stage])
            step(d, end[u], 2 * u + 1, "gradients", -weights[stage])
    for old, new in pairwise(s.lives):
        if new.stage == old.stage and old.last > new.born:  # else the update works in place
            d, size = s.placement[old.stage], weights[old.stage]
            step(d, end[new.born] if new.born >= 0 else begin, 2 * new.born + 1, "versions", size)
            step(d, end[old.last], 2 * old.last + 1, "versions", -size)
    again = costs.recompute.mask(s.total, s.microbatches)
    for i in np.flatnonzero(timeline.kind == Kind.F).tolist():
        stage, k, d = int(timeline.stage[i]), int(timeline.microbatch[i]), int(timeline.device[i])
        backward = max(
            i, int(at[Kind.B, stage, k]), int(at[Kind.I, stage, k])
        )  # i itself if there are only forwards
        last = max(i, int(at[Kind.B, stage, k]), int(at[Kind.W, stage, k]))
        kept = min(boundary[stage], activations[stage]) if again[k] else activations[stage]
        step(d, start[i], 2 * i, "activations", kept)
        step(d, start[backward], 2 * backward, "activations", activations[stage] - kept)
        step(d, end[last], 2 * last + 1, "activations", -activations[stage])
    for i in s.crossing.tolist():
        if start[i] - timeline.arrived[i] > 1e-9 * timeline.makespan:  # else it is rounding
            stage = int(timeline.stage[i])
            size = boundary[stage] if timeline.kind[i] == Kind.F else boundary[stage + 1]
            step(int(timeline.device[i]), timeline.arrived[i], 2 * i - 1, "buffers", size)
            step(int(timeline.device[i]), start[i], 2 * i, "buffers", -size)
    steps.sort(key=lambda x: x[1:3])
    device, time, _, cause, change = (
        (np.array(c) for c in zip(*steps, strict=True)) if steps else (np.array([]),) * 5
    )
    return Memory(s.devices, device, time, cause, change, "simulated")
