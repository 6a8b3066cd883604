"""What runs and evaluations give back, whichever library did the work."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipelab.executors.batches import mean_losses
from pipelab.executors.check import Check
from pipelab.executors.stage import Step
from pipelab.executors.worker import Bytes, Record
from pipelab.memory import CAUSES, Memory
from pipelab.schedule import Schedule
from pipelab.timeline import Timeline


@dataclass
class Run:
    """What a run gives back; displayed, it shows its verdict.

    timeline           measured spans, seconds since the run began (of the first replica)
    losses             one per batch: the mean over the whole batch
    microbatch_losses  one per micro-batch, in the order of the data; of one that counts nothing
                       whatever the loss gave, such as nan: `losses` leave it out
    memory             measured bytes over time, by cause (of the first replica)
    weights            the trained weights, a state dict per stage (on ranks of several machines: of
                       the rank's own stages)
    weight_versions    per device, the most versions of a stage's weights that were kept at one
                       time, by their storages
    check              the verdict against the reference, or None if it was switched off
    replicas           measured spans of every replica
    unsplit            {stage: {weight: why}}: gradients of weights that I computed, not W
    """

    timeline: Timeline
    losses: list[float]
    microbatch_losses: list[float]
    memory: Memory
    weights: list[Any]
    weight_versions: list[int]
    check: Check | None
    replicas: list[Timeline] = field(repr=False)
    unsplit: dict[int, dict[str, str]] = field(default_factory=dict)

    def __repr__(self) -> str:
        s, late = self.timeline.schedule, self.timeline.late
        verdict = self.check or "Not checked against the reference (check=False)."
        pace = "" if late is None else " Paced: it shows order and numerics, not speed."
        times = f" times {len(self.replicas)} replicas" if len(self.replicas) > 1 else ""
        sizes = f"{s.devices} devices{times}, {s.batches} batches of {s.microbatches} micro-batches"
        whole = "".join(
            f" I computed gradients of stage {stage}'s weights: {name} ({why})"
            + (f" and {len(weights) - 1} more." if len(weights) > 1 else ".")
            for stage, weights in sorted(self.unsplit.items())
            for name, why in [*weights.items()][:1]
        )
        return f"<Run of {s.name} on {sizes}. {verdict}{pace}{whole}>"


@dataclass
class Evaluation:
    """What `evaluate` gives back: losses (one per batch, and per micro-batch), measured spans, and
    the verdict."""

    losses: list[float]
    microbatch_losses: list[float]
    timeline: Timeline
    check: Check | None


@dataclass
class Outcome:
    """What a rank gives back.

    record   what its worker saw
    losses   (mean, count) by micro-batch, from the rank with the last stage
    steps    by stage, what each update did
    weights  by stage, trained
    unsplit  by stage, if there are any: see `Run`
    """

    row: int
    replica: int
    record: Record
    losses: dict[int, tuple[float, float]]
    steps: dict[int, list[Step]]
    weights: dict[int, Any]
    unsplit: dict[int, dict[str, str]] = field(default_factory=dict)


def result_of(table: Schedule, outcomes: Sequence[Outcome], replicas: int, paced: bool) -> Run:
    """Everything but the verdict."""
    by_place = {(o.row, o.replica): o for o in outcomes}
    records = [[by_place[d, r].record for d in range(table.devices)] for r in range(replicas)]
    timelines = [timeline_of(table, of_replica, paced) for of_replica in records]
    last = table.placement[-1]
    m = table.microbatches
    values = [
        by_place[last, r].losses[b * m + k]
        for b in range(table.batches)
        for r in range(replicas)
        for k in range(m)
    ]
    return Run(
        timelines[0],
        mean_losses(values, table.batches),
        [mean for mean, _ in values],
        memory_of(timelines[0], records[0]),
        [by_place[d, 0].weights.get(s, {}) for s, d in enumerate(table.placement)],
        [max(record.versions, default=0) for record in records[0]],
        None,
        timelines,
        {s: names for d in range(table.devices) for s, names in by_place[d, 0].unsplit.items()},
    )


def timeline_of(table: Schedule, records: Sequence[Record], paced: bool) -> Timeline:
    """The workers' records, one per row, as a measured timeline."""
    start, end, arrived, on_core = (
        np.concatenate([getattr(record, name) for record in records]).astype(float)
        for name in ("start", "end", "arrived", "on_core")
    )
    sent = np.full(len(start), np.nan)
    sent[table.crossing] = end[table.inputs[table.crossing]]
    late = sum(record.late for record in records) if paced else None
    known = None if np.isnan(on_core).any() else on_core
    return Timeline(table, start, end, sent, np.maximum(arrived, sent), "measured", late, known)


def memory_of(timeline: Timeline, records: Sequence[Record]) -> Memory:
    """Steps of memory: what an action takes counts from its start, what it gives back from its end.

    Activations between the two as the most that was held; an input from its arrival to its action's
    start as a buffer.
    """
    s, found = timeline.schedule, []  # of `Memory.of`
    first = float(timeline.start.min())
    for d, (record, a) in enumerate(zip(records, s.bounds, strict=False)):
        row = slice(a, s.bounds[d + 1])
        start, end, arrived = timeline.start[row], timeline.end[row], timeline.arrived[row]
        n = len(start)
        kept = np.array([record.at_start, *record.kept], float)
        held, most = np.array([0, *record.held], float), np.array(record.most, float)
        received = np.array(record.received, float)
        # At one moment: an arrival, then its use, then what the action takes, then what it gives.
        order = 4 * np.arange(n)
        steps = [
            (start, order + 1, "activations", most - held[:-1]),
            (end, order + 2, "activations", held[1:] - most),
        ]
        for cause, level in zip(Bytes._fields, kept.T, strict=True):
            change = np.diff(level)
            steps.append((np.array([first]), np.array([-1]), cause, level[:1]))
            steps.append((start, order + 1, cause, np.maximum(change, 0)))
            steps.append((end, order + 2, cause, np.minimum(change, 0)))
        waited = np.flatnonzero(arrived < start)
        steps.append((arrived[waited], order[waited] - 1, "buffers", received[waited]))
        steps.append((start[waited], order[waited], "buffers", -received[waited]))
        for time, place, cause, change in steps:
            found.append((d, time, place, CAUSES.index(cause), change))
    return Memory.of(s.devices, found, "measured")
