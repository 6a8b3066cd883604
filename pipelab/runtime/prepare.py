"""What a run needs to know of its table and data, for any library."""

from collections.abc import Sequence
from itertools import pairwise
from operator import add
from typing import Any

import numpy as np

from pipelab.predict.costs import Costs
from pipelab.predict.simulate import delays, durations, waits
from pipelab.runtime.batches import Data, length_of, slices_of
from pipelab.runtime.options import Options
from pipelab.runtime.orders import MicroBatch
from pipelab.runtime.work import Work
from pipelab.table.action import Kind
from pipelab.table.schedule import Schedule


def check_table(schedule: Schedule, stages: int, batches: int, training: bool) -> None:
    """ValueError if the table cannot run with this many stages and batches."""
    name = schedule.name
    for refused, text in (
        (
            schedule.has_transfers,
            f"{name} has its transfers written out, but executors post their own; run the table "
            "without them",
        ),
        (
            stages != schedule.model_stages,
            f"{stages} modules for the {schedule.model_stages} stages of {name}: give one per "
            "stage",
        ),
        (
            batches != schedule.batches,
            f"{batches} batches for a table of {schedule.batches}: build the schedule with "
            f"batches={batches}",
        ),
        (training and not schedule.training, f"{name} has only forwards: use pipelab.evaluate"),
    ):
        if refused:
            raise ValueError(text)


def find_partners(
    schedule: Schedule, ties: Sequence[set[int]], clip: float | None
) -> dict[int, list[int]]:
    """By stage, the stages whose news its updates wait for, if any.

    All for a common norm, else those with the same tied weights, and copies of a stage. ValueError
    if such a wait would never end.
    """
    # [1] whose news each stage waits for
    # With a common norm a stage waits for all, itself too: the sum is then the same in each.
    every = range(schedule.stages)
    common = clip is not None and not schedule.asynchronous
    copies = [schedule.copies_of(s) if schedule.training else [] for s in every]
    waiting = {
        s: [o for o in every if common or ties[s] & ties[o] or o in copies[s]] for s in every
    }
    partners = {s: others for s, others in waiting.items() if others}
    # [2] from the end of a row back to its beginning: an update may not wait for a stage of its own
    #     device whose backward is still to come
    for d, row in enumerate(schedule.rows):
        to_come = set()  # (stage, update) of backwards later in the row
        for action in reversed(row):
            if action.kind in (Kind.B, Kind.W):
                to_come.add((action.stage, action.microbatch // schedule.per_update))
            waits_for = partners.get(action.stage, ()) if action.kind is Kind.U else ()
            for other in waits_for:
                if (other, action.microbatch) in to_come:
                    tied = ties[action.stage] & ties[other]
                    why = "clip" if common else "tied weights" if tied else "copies of a stage"
                    raise ValueError(
                        f"{why}: {action} on device {d} would wait for stage {other}, whose "
                        "backward comes later in its row: put updates after the last backward of "
                        "the row"
                    )
    return partners


def seed_for(seed: int, stage: int, piece: int) -> np.uint32:
    """The seed of a stage's forward of a piece of the data, by its number in the training.

    It does not depend on where a training stopped and resumed.
    """
    # By stage and piece: neither order nor device changes what is drawn. Neighbours draw nothing
    # alike, since the numbers are hashed.
    return np.random.SeedSequence([seed, stage, piece]).generate_state(1)[0]


def unit_of(data: Data, pieces: int) -> int:
    """The unit of counts for batches like the first of these, cut into this many pieces."""
    *_, samples = data.pieces(pieces, slice(-1, None))[0]  # the last is the smallest
    return 1 << samples.bit_length()


def microbatches_of(
    table: Schedule,
    work: Work,
    data: Data,
    row: int,
    *,
    replica: int,
    options: Options,
) -> dict[int, dict[int, MicroBatch]]:
    """The micro-batches of a row's stages, by number; only the model's ends read the data."""
    m, count, replicas = table.microbatches, work.microbatches, options.replicas
    numbers = [b * m + place for b in data.numbers for place in range(count)]
    stages = [s for s, d in enumerate(table.placement) if d == row]
    recompute = options.recompute.mask(m, m)
    pieces: Sequence[tuple[Any, Any, int]] = [(None, None, 0)] * len(numbers)
    needs_data = any(any(table.ends(s)) for s in stages)
    if needs_data:
        sequences = count // table.per_sequence
        share = slice(replica * sequences, (replica + 1) * sequences)
        pieces = data.pieces(sequences * replicas, share)
        if table.slices:
            pieces = [
                (*part, samples)
                for *pair, samples in pieces
                for part in slices_of(pair, table.slices, data.trees)
            ]

    def microbatch(s: int, k: int, x: Any, y: Any, samples: int) -> MicroBatch:
        batch, place = divmod(k, m)
        # Data are numbered batch by batch, and in a batch replica by replica.
        piece = (batch * replicas + replica) * m + place
        first, last = table.ends(s)
        if last and table.slices:
            samples *= length_of((x, y), data.trees)
        return MicroBatch(
            version=work.version(s, k),
            update=k // table.per_update,
            batch=batch,
            recompute=recompute[place],
            x=x if first else None,
            target=y if last else None,
            samples=samples if last else 0,
            seed=None if options.seed is None else (options.seed, s % table.model_stages, piece),
        )

    numbered = [*zip(numbers, pieces, strict=True)]
    return {
        s: {
            k: microbatch(s, k, *piece)
            for k, piece in numbered
            if work.copy(k) == s // table.model_stages
        }
        for s in stages
    }


def paces_of(table: Schedule, options: Options) -> list[list[tuple[float, float]]]:
    """By row, the predicted seconds that a paced run slows down to; empty for others."""
    if options.pace is None:
        return []
    costs = (options.costs or Costs(recompute=options.recompute)).of_copies(table)
    # What an action loses before it starts is a part of the time that it takes.
    taken = map(add, waits(table, costs), durations(table, costs))
    of_all = [
        (seconds * options.pace, delay * options.pace)
        for seconds, delay in zip(taken, delays(table, costs), strict=True)
    ]
    return [of_all[a:b] for a, b in pairwise(table.bounds)]
