"""What a run needs to know of its table, whichever library computes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pipelab.action import Kind
from pipelab.costs import Costs
from pipelab.executors.batches import Reader, samples_of
from pipelab.executors.options import Options
from pipelab.executors.stage import Feed
from pipelab.executors.worker import Pace
from pipelab.schedule import Schedule
from pipelab.simulate import delays, durations


@dataclass(frozen=True)
class Segment:
    """Which part of a training a run is: from one checkpoint, or the beginning, to the next.

    whole  the table of the training
    begun  batches of the training that are done before; `end` afterwards
    """

    whole: Schedule
    begun: int
    end: int

    @cached_property
    def table(self) -> Schedule:
        """What is run, numbered from 0."""
        entire = (self.begun, self.end) == (0, self.whole.batches)
        return self.whole if entire else self.whole.part(self.begun, self.end)

    @property
    def first_update(self) -> int:
        return self.begun * self.whole.microbatches // self.whole.per_update

    @property
    def updates(self) -> int:
        """Updates of the training that are made afterwards."""
        return self.first_update + self.table.updates

    def later_versions(self) -> list[list[int]]:
        """Per stage, the versions made here that later batches read, in the part's numbers."""
        whole = self.whole
        read = whole.versions[:, self.end * whole.microbatches :]
        made = [{int(v) - self.first_update for v in of if v <= self.updates} for of in read]
        return [sorted(versions) for versions in made]


def check_table(schedule: Schedule, stages: int, batches: int, training: bool) -> None:
    """ValueError if the table cannot be run with so many stages and batches."""
    if schedule.has_transfers:
        raise ValueError(
            f"{schedule.name} has its transfers written out; run the table without them: "
            "executors post their own"
        )
    if stages != schedule.stages:
        raise ValueError(
            f"{stages} modules for the {schedule.stages} stages of {schedule.name}: "
            "give one per stage"
        )
    if batches != schedule.batches:
        raise ValueError(
            f"{batches} batches for a table of {schedule.batches}: "
            f"build the schedule with batches={batches}"
        )
    if training and not schedule.training:
        raise ValueError(f"{schedule.name} has only forwards: use pipelab.evaluate")


def find_partners(
    schedule: Schedule, ties: Sequence[set[int]], clip: float | None
) -> list[list[int]]:
    """Per stage, the stages whose news its updates wait for.

    All for a common norm, else those with the same tied weights. ValueError where such a wait would
    never end.
    """
    every = list(range(schedule.stages))
    if clip is not None and not schedule.asynchronous:
        partners = [every for _ in every]
    else:
        partners = [[o for o in every if ties[s] & ties[o]] for s in every]
    for d, row in enumerate(schedule.rows):
        to_come = set()  # (stage, update) of backwards later in the row
        for action in reversed(row):
            if action.kind in (Kind.B, Kind.W):
                to_come.add((action.stage, action.microbatch // schedule.per_update))
            waits_for = partners[action.stage] if action.kind is Kind.U else ()
            if any((s, action.microbatch) in to_come for s in waits_for):
                raise ValueError(
                    f"{'tied weights' if clip is None else 'clip'}: {action} on device {d} "
                    "would wait for a stage whose backward comes later in its row: put updates "
                    "after the last backward of the row"
                )
    return partners


def seeds_for(seed: int, segment: Segment, replicas: int) -> np.ndarray:
    """A seed for the forward of every stage and every piece of data: [stage, piece].

    They do not depend on where a training was stopped and resumed.
    """
    per_batch = segment.table.microbatches * replicas
    pieces = range(segment.begun * per_batch, segment.end * per_batch)
    numbers = [
        [np.random.SeedSequence([seed, s, k]).generate_state(1)[0] for k in pieces]
        for s in range(segment.table.stages)
    ]
    return np.array(numbers, np.uint32)


def feeds_of(
    table: Schedule,
    row: int,
    reader: Reader,
    *,
    replica: int,
    seeds: np.ndarray | None,
    later: Sequence[Sequence[int]],
) -> dict[int, Feed]:
    """What the stages of a row need of the table and the data; only the ends of the model read."""
    n, last = table.stages, table.stages - 1
    own = [s for s, d in enumerate(table.placement) if d == row]
    groups = (np.arange(table.total) // table.per_update).tolist()
    pieces = reader.pieces(replica) if {0, last} & {*own} else []
    if seeds is not None:
        by_replica = seeds.reshape(n, table.batches, reader.replicas, table.microbatches)
        seeds = by_replica[:, :, replica].reshape(n, -1)
    return {
        s: Feed(
            table.versions[s].tolist(),
            groups,
            later=later[s] if later else (),
            inputs=[x for x, _ in pieces] if s == 0 else None,
            targets=[y for _, y in pieces] if s == last else None,
            samples=[samples_of(piece, reader.trees) for piece in pieces] if s == last else (),
            seeds=None if seeds is None else seeds[s],
        )
        for s in own
    }


def pace_of(table: Schedule, options: Options) -> Pace | None:
    """The predicted times that a paced run is slowed down to."""
    if options.pace is None:
        return None
    costs = options.costs or Costs(recompute=options.recompute)
    return Pace(durations(table, costs) * options.pace, delays(table, costs) * options.pace)
