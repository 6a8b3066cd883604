"""What runs and evaluations give back, whichever library did the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipelab.executors.measured import memory_of, timeline_of
from pipelab.executors.rules import Check
from pipelab.executors.worker import Record
from pipelab.memory import Memory
from pipelab.schedule import Schedule
from pipelab.timeline import Timeline


@dataclass
class Run:
    """What a run gives back; displayed, it shows its verdict.

    timeline           measured spans, seconds since the run began (of the first replica)
    losses             one per batch: the mean over the whole batch
    microbatch_losses  one per micro-batch, in the order of the data
    memory             measured bytes over time, by cause (of the first replica)
    weights            the trained weights, a state dict per stage (on ranks of several machines: of the rank's own stages)
    weight_versions    per device, the most versions of a stage's weights that were kept at one time, by their storages
    check              the verdict against the reference, or None if it was switched off
    replicas           measured spans of every replica
    """

    timeline: Timeline
    losses: list[float]
    microbatch_losses: list[float]
    memory: Memory
    weights: list[Any]
    weight_versions: list[int]
    check: Check | None
    replicas: list[Timeline] = field(default_factory=list, repr=False)

    def __repr__(self) -> str:
        s, late = self.timeline.schedule, self.timeline.late
        verdict = (
            str(self.check) if self.check else "Not checked against the reference (check=False)."
        )
        pace = "" if late is None else " Paced: it shows order and numerics, not speed."
        times = f" times {len(self.replicas)} replicas" if len(self.replicas) > 1 else ""
        sizes = f"{s.devices} devices{times}, {s.batches} batches of {s.microbatches} micro-batches"
        return f"<Run of {s.name} on {sizes}. {verdict}{pace}>"


@dataclass
class Evaluation:
    """What `evaluate` gives back: losses (one per batch, and per micro-batch), measured spans, and the verdict."""

    losses: list[float]
    microbatch_losses: list[float]
    timeline: Timeline
    check: Check | None


@dataclass
class Outcome:
    """What a rank gives back: its record, losses as (mean, count) by micro-batch, kept steps and trained weights by stage."""

    row: int
    replica: int
    record: Record
    losses: dict[int, tuple[float, float]]
    steps: dict[int, list[Any]]
    weights: dict[int, Any]


def result_of(schedule: Schedule, outcomes: Sequence[Outcome], replicas: int, paced: bool) -> Run:
    """Everything but the verdict."""
    by_place = {(o.row, o.replica): o for o in outcomes}
    records = [
        [by_place[row, r].record for row in range(schedule.devices)] for r in range(replicas)
    ]
    timelines = [timeline_of(schedule, of_replica, paced) for of_replica in records]
    ends = [by_place[schedule.placement[-1], r].losses for r in range(replicas)]
    m = schedule.microbatches
    values = [
        ends[r][b * m + k]
        for b in range(schedule.batches)
        for r in range(replicas)
        for k in range(m)
    ]
    means, counts = (
        np.reshape([value[i] for value in values], (schedule.batches, -1)) for i in (0, 1)
    )
    total = np.where(counts > 0, means * counts, 0).sum(1)  # the mean over nothing is no number
    losses = [float(x) for x in total / np.maximum(counts.sum(1), 1e-300)]
    weights = [by_place[d, 0].weights.get(s, {}) for s, d in enumerate(schedule.placement)]
    versions = [max(record.versions, default=0) for record in records[0]]
    memory, microbatch_losses = memory_of(timelines[0], records[0]), [value for value, _ in values]
    return Run(timelines[0], losses, microbatch_losses, memory, weights, versions, None, timelines)
