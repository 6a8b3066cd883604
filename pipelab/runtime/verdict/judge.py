"""Trains by the rule of a run's table, update by update, and compares: see `certificate`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain, islice, product
from typing import Any

from pipelab.runtime.bar import Bar
from pipelab.runtime.batches import cut_batch
from pipelab.runtime.orders import Step
from pipelab.runtime.prepare import Segment, seed_for
from pipelab.runtime.result import Run
from pipelab.runtime.verdict.certificate import Check
from pipelab.runtime.verdict.reference import Piece, Reference
from pipelab.runtime.verdict.trial import Reading, Trial
from pipelab.table.action import Reads
from pipelab.table.schedule import Schedule

DELAY = 3.0  # seconds before a check shows a bar
EVALUATION = "evaluation: the stages one after another"
FLUSH = "flush: w(t+1) = w(t) - step(grad f(w(t)))"
STASHING = "weight stashing: w(t+1) = w(t) - step(grad f(w_1(t-n+1), ..., w_n(t)))"
VERTICAL = "vertical sync: w(t+1) = w(t) - step(grad f(w_1(t-n+1), ..., w_n(t-n+1)))"
TABLE = "as its rows say: a forward reads the updates before it in its row"
DOUBLE = "2BW: W(t+1) = W(t) - step(grad f(W(t-1)))"


def judge(
    segment: Segment,
    batches: Sequence[Any],
    result: Run,
    replica_steps: Sequence[Sequence[Sequence[Step]]],
    saved: Sequence[Any],
    reference: Callable[[bool], Reference],
    *,
    divided: bool,
    roomy: bool,
    by_microbatches: bool,
    seed: int | None,
    draws: bool,
    tolerance: float | None,
    quick: bool,
) -> Check:
    """Train update by update (or only run forwards) by the table's rule, and compare.

    result         the run's result: its losses and weights are judged
    replica_steps  [replica][stage][update]
    saved          by stage, its state in the checkpoint, if one was written
    reference      makes one: in float64 (True), or as the run computes (False)
    divided        whether the truth must cut the batch: forwards depend on it, or it does not fit
    roomy          whether a batch fits undivided; by_microbatches: whether the user wants it cut
    seed           of the random numbers that forwards draw
    draws          whether they are known to draw; if not, the first piece shows it
    quick          use the run's precision for the truth, too
    """
    table, replicas = segment.table, len(replica_steps) // segment.table.copies
    # [1] the rule, and the data with the versions that it makes them read
    rule, reading = _reading_of_part(segment, replicas)
    own = reference(False)
    pieces_from = partial(_pieces, segment, batches, reading, replicas, own)
    first, stream = next(pieces_from(seed)), pieces_from(seed)
    drawing = seed is not None and (draws or own.draws(first))
    # [2] two references: as precise as can be, and as the run computes
    truth, narrowed = _most_precise(reference, quick, first)
    may_be_whole = _may_be_whole(table, rule, len(reading[0]))
    with own.arithmetic.comparing():
        truth.traces = own.leaves_traces(first)
        trial = Trial(result, own, truth, narrowed, segment.done.updates, first, tolerance)
        cut = divided or drawing or own.traces or by_microbatches
        # A layer may insist on a micro-batch's size.
        whole = may_be_whole and not cut and own.takes([_undivided(batches, reading, 0)])
        trial.joins = may_be_whole and roomy and not (whole or by_microbatches)
        # [3] update by update
        updates = table.updates if table.training else table.batches
        if table.training and not _as_many(trial, replica_steps, updates):
            return trial.found.verdict(rule, truth.arithmetic.computes_in)
        with Bar("check", 2 * sum(map(len, reading[:updates])), DELAY) as bar:
            own.tick = bar.step
            steps = replica_steps[0]
            for pieces in _follow(trial, segment, batches, reading, steps, stream, whole):
                bar.step(len(pieces))
        # [4] what the run returns
        trial.compare_results(replica_steps, saved)
    _check_draws(own, drawing)
    if may_be_whole and (own.traces or not whole):
        rule = rule.replace(":", ", the batch in micro-batches only:", 1)
    return trial.found.verdict(rule, truth.arithmetic.computes_in)


def _as_many(trial: Trial, replica_steps: Sequence[Sequence[Sequence[Step]]], updates: int) -> bool:
    """Whether every stage has made all updates; if not, nothing else can be compared."""
    counts = {
        (r, s): len(of_stage)
        for r, of_replica in enumerate(replica_steps)
        for s, of_stage in enumerate(of_replica)
    }
    for (r, s), count in counts.items():
        if count != updates:
            of = f" of replica {r}" if len(replica_steps) > 1 else ""
            trial.found.add(f"the number of updates ({count}) of stage {s}{of}", count, updates)
    return set(counts.values()) == {updates}


def _follow(
    trial: Trial,
    segment: Segment,
    batches: Sequence[Any],
    reading: Reading,
    steps: Sequence[Sequence[Step]],
    stream: Iterator[Piece],
    whole: bool,
) -> Iterator[list[Piece]]:
    """Compare update by update, each from the run's own weights before it; yields its pieces.

    steps   [stage][update]
    stream  all pieces
    whole   whether the truth takes each batch undivided
    """
    table, own = segment.table, trial.own
    for i in range(table.updates if table.training else table.batches):
        pieces = list(islice(stream, len(reading[i])))
        undivided = _undivided(batches, reading, i) if whole else None
        if table.training:
            t, made = segment.done.updates + i, [of_stage[i] for of_stage in steps]
            trial.compare_update(t, made, pieces, undivided)
            trial.compare_step(t, made)
            if i == table.updates - 1:
                trial.compare_buffers(pieces)
            trial.go_on(t + 1, made, reading[i + 1 :])
        else:
            exact = trial.truth.losses([undivided] if undivided else pieces)
            trial.compare_losses(pieces, own.losses(pieces), exact)
        yield pieces


def _check_draws(own: Reference, drawing: bool) -> None:
    """ValueError if a later forward drew random numbers, but the first, which decides, did not."""
    if own.arithmetic.ever_drew and not drawing:
        raise ValueError(
            "a later forward draws random numbers, but the first one did not, so recomputation "
            "draws different ones: give the run a seed="
        )


def _undivided(batches: Sequence[Any], reading: Reading, i: int) -> Piece:
    return Piece(batches[i][0], batches[i][1], reading[i][0])


def _may_be_whole(table: Schedule, rule: str, pieces: int) -> bool:
    """Whether the truth may take the batch undivided, as a paper's formula does."""
    by_batch = rule != TABLE and table.per_update == table.microbatches
    return pieces > 1 and (by_batch or not table.training)


def _reading_of_part(segment: Segment, replicas: int) -> tuple[str, Reading]:
    """The rule, and the versions that are read from the segment's first update on.

    They are counted from the start of training, unlike `reading_of`'s.
    """
    rule, of_table = reading_of(segment.whole, replicas)
    done, before = segment.done.updates, segment.before_table.updates
    # A short batch has fewer pieces, and all read alike.
    size = segment.pieces // segment.whole.per_sequence * replicas or None
    return rule, [[[v + before for v in r] for r in of[:size]] for of in of_table[done - before :]]


def _most_precise(
    reference: Callable[[bool], Reference], quick: bool, first: Piece
) -> tuple[Reference, float]:
    """The truth: in float64, unless some layer computes in one precision only; see `narrowed`."""
    if not quick:
        wide = reference(True)
        with suppress(Exception):
            return wide, wide.narrowed([first])
    single = reference(False)  # the verdict says in what precision it was reached
    return single, single.narrowed([first])


def _pieces(
    segment: Segment,
    batches: Sequence[Any],
    reading: Reading,
    replicas: int,
    own: Reference,
    seed: int | None,
) -> Iterator[Piece]:
    """The data in order, in micro-batches, with the versions that they read."""
    table, trees, reads = segment.table, own.arithmetic.trees, chain.from_iterable(reading)
    for b in range(table.batches):
        microbatches = table.microbatches // table.per_sequence  # the reference does not slice
        parts = cut_batch(batches[b], microbatches * replicas, b, trees)
        for k, part in enumerate(parts):
            replica, i = divmod(k, microbatches)
            # A short batch takes up as many numbers as any.
            number = (segment.batches[b] * replicas + replica) * segment.whole.microbatches + i
            stages = range(table.model_stages)
            drawn = None if seed is None else [int(seed_for(seed, s, number)) for s in stages]
            copy = replica * table.copies + table.copy_of[b * table.microbatches + i]
            yield Piece(*part, next(reads), drawn, copy)


# ---- the papers' rules: which weights each update's gradient is taken at
#
# Only `rule_of` looks at the schedule's versions, to choose a rule.


def reading_of(table: Schedule, replicas: int) -> tuple[str, Reading]:
    """The rule that describes the table, and the versions that each piece of data reads by it."""
    if not table.training:
        first = [0] * table.model_stages
        return EVALUATION, [[first] * (table.microbatches // table.per_sequence)] * table.batches
    rule = rule_of(table)
    if rule == TABLE:
        return rule, by_rows(table)
    n, pieces = table.model_stages, table.per_update // table.per_sequence * replicas
    updates = range(table.updates)
    return rule, [[[version_read(rule, t, s, n) for s in range(n)]] * pieces for t in updates]


def version_read(rule: str, t: int, stage: int, stages: int) -> int:
    """The weight version that `stage` (from 0) reads for update t, by the rule's formula."""
    n, s = stages, stage + 1  # the papers number stages from 1
    return max(0, {FLUSH: t, STASHING: t - n + s, VERTICAL: t - n + 1, DOUBLE: t - 1}[rule])


def by_rows(table: Schedule) -> Reading:
    """What any table's micro-batches read: the updates before each forward in its row."""
    # Walk each row: it has all updates of its stages.
    before = {}
    updates_made = [0] * table.stages
    for row in table.rows:
        for stage, kind, number in row:
            updates_made[stage] += kind.name == "U"
            if kind.name == "F":
                before[stage, number] = updates_made[stage]
    # All updates have the same number of micro-batches. Slices of a sequence read the same.
    size, step = (1 + max(number for _, number in before)) // table.updates, table.per_sequence
    return [
        [[before[s, k] for s in range(table.stages)] for k in range(t * size, (t + 1) * size, step)]
        for t in range(table.updates)
    ]


def rule_of(schedule: Schedule) -> str:
    """The paper's rule that gives the table's versions; else TABLE, which reads them off the rows.

    ValueError for a table that neither describes.
    """
    n, size = schedule.stages, schedule.per_update
    if not schedule.asynchronous:
        # Updates within a batch have no formula in the papers, even where each has a flush.
        return FLUSH if size == schedule.microbatches else TABLE
    if size in (1, schedule.microbatches):
        meant = {Reads.LATEST: STASHING, Reads.FIRST: VERTICAL, Reads.PREVIOUS: DOUBLE}
        for rule in (meant[schedule.reads], STASHING, VERTICAL, DOUBLE):  # short tables fit several
            if all(
                schedule.versions[s, k] == version_read(rule, k // size, s, n)
                for s, k in product(range(n), range(schedule.total))
            ):
                return rule
    if schedule.reads is not Reads.LATEST:
        raise ValueError(
            f"no reference for reads={schedule.reads.name} on this table: run it with check=False"
        )
    return TABLE
