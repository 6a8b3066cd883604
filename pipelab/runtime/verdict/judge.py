"""Trains by the rule that describes a run's table, update by update, and compares: see `check`."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice, repeat
from typing import Any

import numpy as np

from pipelab.runtime.batches import cut_batch
from pipelab.runtime.prepare import Segment
from pipelab.runtime.result import Run
from pipelab.runtime.stage import Step
from pipelab.runtime.verdict import rules
from pipelab.runtime.verdict.certificate import Check
from pipelab.runtime.verdict.reference import Piece, Reference
from pipelab.runtime.verdict.rules import Reading
from pipelab.runtime.verdict.trial import Trial


def judge(
    segment: Segment,
    batches: Sequence[Any],
    result: Run,
    replica_steps: Sequence[Sequence[Sequence[Step]]],
    saved: Sequence[Any],
    reference: Callable[[bool], Reference],
    *,
    divided: bool,
    seeds: np.ndarray | None,
    tolerance: float | None,
    quick: bool,
) -> Check:
    """Train update by update (or go forward alone) by the rule of the table, and compare.

    result         what the run gives back: its losses and weights are judged
    replica_steps  [replica][stage][update]
    saved          by stage, what a checkpoint holds of it, if one was written
    reference      makes one: in float64 (True), or as the run computes (False)
    divided        whether a forward depends on how the batch is cut: so is the truth's then
    seeds          [stage, piece of data]
    quick          make do with the run's precision for the truth too
    """
    table, replicas = segment.table, len(replica_steps)

    def undivided(i: int) -> Piece:
        return Piece(batches[i][0], batches[i][1], reading[i][0])

    # [1] the rule, and the data with what they read by it
    rule, of_training = rules.reading_of(segment.whole, replicas)
    reading = of_training[segment.first_update :]
    own = reference(False)
    stream = _pieces(segment, batches, reading, replicas, own, seeds)
    first = next(stream)
    stream = chain([first], stream)  # it is looked at beforehand, and still the first one compared
    # [2] two references: as precise as can be, and as the run computes
    truth = _most_precise(own, reference, quick, first)
    trial = Trial(result, own, truth, first, tolerance)
    trial.earlier = segment.updates_before - segment.first_update
    # Where the rule allows it, the truth takes the batch undivided: what a paper's formula says.
    by_batch = rule != rules.TABLE and table.per_update == table.microbatches
    whole = len(reading[0]) > 1 and (by_batch or not table.training)
    whole = whole and not divided and not own.remembers([first])
    if whole and not truth.takes([undivided(0)]):  # a layer insists on a micro-batch's size
        rule, whole = rule.replace(":", ", the batch in micro-batches only:", 1), False
    # [3] update by update, each from the run's own weights before it
    for i in range(table.updates if table.training else table.batches):
        pieces = list(islice(stream, len(reading[i])))
        exact = [undivided(i)] if whole else pieces
        if not table.training:
            trial.compare_losses(pieces, own.losses(pieces), truth.losses(exact))
            continue
        t, steps = segment.first_update + i, [of_stage[i] for of_stage in replica_steps[0]]
        trial.compare_update(t, steps, pieces, exact)
        trial.compare_step(t, steps)
        if i == table.updates - 1:
            trial.compare_buffers(pieces)
        trial.go_on(t + 1, steps, reading[i + 1 :])
    # [4] what the run gives back
    trial.compare_results(replica_steps, saved)
    return trial.found.verdict(rule, truth.arithmetic.computes_in)


def _most_precise(
    own: Reference, reference: Callable[[bool], Reference], quick: bool, first: Piece
) -> Reference:
    """The truth: in float64, unless some layer computes in one precision only."""
    if not quick:
        wide = reference(True)
        if wide.takes([first]):
            return wide
    return reference(False)  # the verdict says in what precision it was reached


def _pieces(
    segment: Segment,
    batches: Sequence[Any],
    reading: Reading,
    replicas: int,
    own: Reference,
    seeds: np.ndarray | None,
) -> Iterator[Piece]:
    """The data in its order, in micro-batches, with what they read."""
    reads, m = chain.from_iterable(reading), segment.table.microbatches
    drawn = repeat(None) if seeds is None else iter(seeds.T.tolist())
    for b in range(segment.table.batches):
        for k, part in enumerate(cut_batch(batches[b], m * replicas, b, own.arithmetic.trees)):
            yield Piece(*part, next(reads), next(drawn), k // m)
