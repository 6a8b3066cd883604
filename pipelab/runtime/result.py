"""The results of runs and evaluations, whichever library did the work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pipelab.predict.memory import (
    ARRIVES,
    BEFORE_ALL,
    ENDS,
    HOLDS,
    STARTS,
    Memory,
    MemoryStep,
    order_of,
)
from pipelab.predict.timeline import Timeline
from pipelab.runtime.batches import mean_losses
from pipelab.runtime.options import Options
from pipelab.runtime.orders import Bytes, Outcome, Record, Seen, Update, by_stage
from pipelab.runtime.verdict.check import Check
from pipelab.runtime.work import Work
from pipelab.table.schedule import Schedule


@dataclass
class Run:
    """The result of a run; displayed, it shows its verdict.

    timeline           measured spans, seconds since the run began (of the first replica)
    losses             one per batch: the mean over the whole batch
    microbatch_losses  one per micro-batch, in the order of the data; one that counts nothing may be
                       anything, such as nan: `losses` leave it out
    memory             measured bytes over time, by cause (of the first replica)
    weights            the trained weights, a state dict per stage; empty for an evaluation; on
                       several machines, a rank has its own stages'
    weight_versions    per device, the most versions of a stage's weights kept at one time, by their
                       storages
    check              whether the run equals one device's training, or None without a check
    replicas           measured spans of every replica
    records            what each device of the first replica recorded
    counts             one per micro-batch: how many samples or tokens its loss is the mean of
    seen               of a Trainer's evaluation, per micro-batch
    norms              per update, of the whole gradient, before clipping
    rates              per update, the learning rate of each parameter group of the first stage with
                       trained weights; empty with jax, whose optimizers do not tell
    unsplit            {stage: {weight: why}}: weights whose gradients I computed instead of W
    """

    timeline: Timeline
    losses: list[float]
    microbatch_losses: list[float]
    weights: list[Any]
    weight_versions: list[int]
    check: Check | None
    replicas: list[Timeline] = field(repr=False)
    records: list[Record] = field(repr=False)
    unsplit: dict[int, Mapping[str, str]] = field(default_factory=dict)
    counts: list[float] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list, repr=False)
    norms: list[float] = field(default_factory=list)
    rates: list[Sequence[float]] = field(default_factory=list)

    @cached_property
    def memory(self) -> Memory:
        """Measured bytes over time, computed on first use."""
        return memory_of(self.replicas[0], self.records)

    def __repr__(self) -> str:
        s, late = self.timeline.schedule, self.timeline.late
        verdict = self.check or "Not checked against one device (check=False)."
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


def result_of(work: Work, outcomes: Sequence[Outcome], options: Options) -> Run:
    """Everything but the verdict."""
    table, replicas, paced = work.table, options.replicas, options.pace is not None
    # Data are numbered batch by batch, and in a batch replica by replica.
    by_place = {(o.row, o.replica): o for o in outcomes}
    records = [[by_place[d, r].record for d in range(table.devices)] for r in range(replicas)]
    timelines = [timeline_of(table, of_replica, paced) for of_replica in records]
    m, n, weights = table.microbatches, table.model_stages, by_stage(outcomes, "weights")
    last = [table.placement[(copy + 1) * n - 1] for copy in table.copy_of]
    places = [
        (by_place[last[b * m + k], r], work.offset.microbatches + b * m + k)
        for b in range(table.batches)
        for r in range(replicas)
        for k in range(m)
    ]
    values = [outcome.losses[k] for outcome, k in places]
    if table.slices:  # of whole sequences, from those of their slices
        of_slices = [
            values[i : i + table.per_sequence] for i in range(0, len(values), table.per_sequence)
        ]
        means = mean_losses(values, len(of_slices))
        counts = [sum(count for _, count in slices) for slices in of_slices]
        values = [*zip(means, counts, strict=True)]
    updates = by_stage(outcomes, "updates")
    by_all = sorted(set.intersection(*map(set, updates.values())))
    told = [norm_and_rates({s: updates[s][number] for s in updates}) for number in by_all]
    # The first replica stands for all: their weights are equal to the last bit, which the check
    # sees to.
    return Run(
        timeline=timelines[0],
        losses=mean_losses(values, table.batches),
        microbatch_losses=[mean for mean, _ in values],
        weights=[weights.get(s, {}) for s in range(n)],
        weight_versions=[max(record.versions, default=0) for record in records[0]],
        check=None,
        replicas=timelines,
        records=records[0],
        unsplit=by_stage(outcomes, "unsplit"),
        counts=[count for _, count in values],
        seen=[outcome.seen[k] for outcome, k in places if k in outcome.seen],
        norms=[norm for norm, _ in told],
        rates=[rates for _, rates in told],
    )


def norm_and_rates(update: Mapping[int, Update]) -> tuple[float, Sequence[float]]:
    """The norm and the learning rates of an update that all stages have made: see `Run`."""
    stages = [update[s] for s in sorted(update)]
    norm = sum(of_stage.square for of_stage in stages) ** 0.5
    return norm, next((of_stage.rates for of_stage in stages if of_stage.rates), ())


def timeline_of(table: Schedule, records: Sequence[Record], paced: bool) -> Timeline:
    """The workers' records, one per row, as a measured timeline."""
    start, end, arrived = (
        [seconds for record in records for seconds in getattr(record, name)]
        for name in ("start", "end", "arrived")
    )
    moved = {}
    # A message may be there, by another clock, before its sender has noted the end of its action.
    for i in table.crossing:
        sent = end[table.inputs[i]]  # type: ignore[index]
        moved[i] = sent, max(arrived[i], sent)
    late = sum(record.late for record in records) if paced else None
    return Timeline(table, table.spans(start, end, moved), "measured", late)


def memory_of(timeline: Timeline, records: Sequence[Record]) -> Memory:
    """Steps of memory: an action takes memory at its start, and frees it at its end.

    In between, activations count as the most that was held; an input is a buffer from its arrival
    to its action's start.
    """
    first, bounds, joined = min(timeline.start), timeline.schedule.bounds, timeline.schedule.joined
    steps: list[MemoryStep] = []
    causes = (*Bytes._fields, "activations")
    for d, record in enumerate(records):
        levels = [*record.at_start, 0]
        for cause, level in zip(causes, levels, strict=True):
            steps.append(MemoryStep(d, first, BEFORE_ALL, cause, level))
        for n, span in enumerate(timeline.spans[bounds[d] : bounds[d + 1]]):
            # [1] an input that came before it was used waits in a buffer
            if span.arrived is not None and span.arrived < span.start:
                size = record.received[n]
                arrives, starts = order_of(n, ARRIVES), order_of(n, STARTS)
                steps.append(MemoryStep(d, span.arrived, arrives, "buffers", size))
                steps.append(MemoryStep(d, span.start, starts, "buffers", -size))
            # [2] all else: the most of the action from its start, what is left from its end; of two
            # that overlap, at the second, which notes it of both
            i = bounds[d] + n
            if i + 1 in joined:
                continue
            start, end = span.start, span.end
            if i in joined:
                start, end = min(start, timeline.start[i - 1]), max(end, timeline.end[i - 1])
            after = [*record.kept[n], record.held[n]]
            most = [*map(max, levels, after)]
            most[-1] = record.most[n]
            holds, ends = order_of(n, HOLDS), order_of(n, ENDS)
            for cause, before, top, left in zip(causes, levels, most, after, strict=True):
                steps.append(MemoryStep(d, start, holds, cause, top - before))
                steps.append(MemoryStep(d, end, ends, cause, left - top))
            levels = after
    return Memory(timeline.schedule.devices, steps, "measured")
