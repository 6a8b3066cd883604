"""A run's options, and what it needs to know of its table, whichever library computes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from types import SimpleNamespace
from typing import Any

import numpy as np

from pipelab.predict.costs import Costs
from pipelab.predict.simulate import delays, durations
from pipelab.runtime.batches import Data, samples_of
from pipelab.runtime.stage import Feed
from pipelab.runtime.worker import Pace
from pipelab.table.action import Kind
from pipelab.table.schedule import Schedule

BACKENDS = (None, "threads", "processes", "jax")


class Options(SimpleNamespace):
    """The keyword arguments of `run`, which documents them, by name.

    ValueError, with the remedy, for a value that no run can have.

    default  what they are if they are not given
    """

    def __init__(self, default: Mapping[str, Any], given: Mapping[str, Any]) -> None:
        super().__init__(**{name: given.get(name, value) for name, value in default.items()})
        self.default = default
        for name, fits, remedy in (
            ("backend", self.backend in BACKENDS, "one of threads, processes, jax"),
            ("replicas", self.replicas >= 1, "a whole number of at least 1"),
            ("check", self.check in (True, False, "quick"), "True, False or 'quick'"),
            ("seed", (self.seed or 0) >= 0, "a whole number of at least 0"),
            ("pace", _above(0, self.pace), "the seconds of one cost unit, such as 0.005"),
            ("timeout", _above(0, self.timeout), "seconds, a number above 0"),
            ("clip", _above(0, self.clip), "the largest norm, a number above 0"),
            ("tolerance", _above(0.999, self.tolerance), "how many times its rounding, at least 1"),
        ):
            if not fits:
                raise ValueError(f"{name}={getattr(self, name)!r}: give {remedy}")

    def refuse(self, *names: str) -> None:
        """ValueError if one of these options is not as it is by default."""
        for name in names:
            value = getattr(self, name)
            if value != self.default[name]:
                raise ValueError(
                    f"{name}={value!r} is not supported with backend={self.backend!r}: leave it out"
                )


def _above(least: float, value: float | None) -> bool:
    return value is None or least < value < inf


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
        """The table that is run, numbered from 0."""
        entire = (self.begun, self.end) == (0, self.whole.batches)
        return self.whole if entire else self.whole.part(self.begun, self.end)

    @property
    def first_update(self) -> int:
        # A part begins with a batch, when all updates of the batches before are made.
        return self.begun * self.whole.microbatches // self.whole.per_update

    @property
    def updates(self) -> int:
        """Updates of the training that are made afterwards."""
        return self.first_update + self.table.updates

    def later_versions(self) -> list[list[int]]:
        """Per stage, the versions made here that later batches read, in the part's numbers."""
        whole = self.whole
        later = range(self.end * whole.microbatches, whole.total)
        # A micro-batch of a later batch may read a version that is made here.
        read = [{whole.versions[s, k] for k in later} for s in range(whole.stages)]
        return [sorted(v - self.first_update for v in of if v <= self.updates) for of in read]


def check_table(schedule: Schedule, stages: int, batches: int, training: bool) -> None:
    """ValueError if the table cannot be run with so many stages and batches."""
    name = schedule.name
    for refused, text in (
        (
            schedule.has_transfers,
            f"{name} has its transfers written out; run the table without them: executors post "
            "their own",
        ),
        (
            stages != schedule.stages,
            f"{stages} modules for the {schedule.stages} stages of {name}: give one per stage",
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
    """By stage, the stages whose news its updates wait for, if there are any.

    All for a common norm, else those with the same tied weights. ValueError where such a wait would
    never end.
    """
    # [1] whose news each stage waits for
    # With a common norm a stage waits for all, itself too: the sum is then the same in each.
    every = range(schedule.stages)
    common = clip is not None and not schedule.asynchronous
    waiting = {s: [o for o in every if common or ties[s] & ties[o]] for s in every}
    partners = {s: others for s, others in waiting.items() if others}
    # [2] from the end of a row back to its beginning: an update may not wait for a stage of its own
    #     device whose backward is still to come
    for d, row in enumerate(schedule.rows):
        to_come = set()  # (stage, update) of backwards later in the row
        for action in reversed(row):
            if action.kind in (Kind.B, Kind.W):
                to_come.add((action.stage, action.microbatch // schedule.per_update))
            waits_for = partners.get(action.stage, ()) if action.kind is Kind.U else ()
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
    # By stage and piece: neither order nor device changes what is drawn. Neighbours draw nothing
    # alike, since the numbers are hashed.
    numbers = [
        [np.random.SeedSequence([seed, s, k]).generate_state(1)[0] for k in pieces]
        for s in range(segment.table.stages)
    ]
    return np.array(numbers, np.uint32)


def feeds_of(
    table: Schedule,
    row: int,
    data: Data,
    *,
    replica: int,
    replicas: int,
    seeds: np.ndarray | None,
    later: Sequence[Sequence[int]],
) -> dict[int, Feed]:
    """The feeds of a row's stages, from the table and the data; only the ends of the model read."""
    m, last, every = table.microbatches, table.stages - 1, range(table.total)
    own = [s for s, d in enumerate(table.placement) if d == row]
    pieces: list[tuple[Any, Any]] = []
    samples, unit = [], 1
    if {0, last} & {*own}:
        pieces = data.pieces(m * replicas, slice(replica * m, (replica + 1) * m))
        samples = [samples_of(piece, data.trees) for piece in pieces]
        # Of the first batch: the same in all replicas, whichever pieces they have.
        of_one = samples_of(data[0], data.trees) // (m * replicas)
        unit = 1 << of_one.bit_length()
    # Data are numbered batch by batch, and in a batch replica by replica: a replica's own seeds are
    # a block of every batch.
    if seeds is not None:
        by_replica = seeds.reshape(table.stages, table.batches, replicas, m)
        seeds = by_replica[:, :, replica].reshape(table.stages, -1)
    return {
        s: Feed(
            [table.versions[s, k] for k in every],
            [k // table.per_update for k in every],
            later=later[s] if later else (),
            inputs=[x for x, _ in pieces] if s == 0 else None,
            targets=[y for _, y in pieces] if s == last else None,
            samples=samples,
            unit=unit,
            seeds=None if seeds is None else seeds[s],
        )
        for s in own
    }


def pace_of(table: Schedule, options: Options) -> Pace | None:
    """The predicted times that a paced run is slowed down to."""
    if options.pace is None:
        return None
    costs = options.costs or Costs(recompute=options.recompute)
    seconds = (flat(table, costs) for flat in (durations, delays))
    return Pace(*([unit * options.pace for unit in of_all] for of_all in seconds))
