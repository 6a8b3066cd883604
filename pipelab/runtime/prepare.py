"""A run's options, and what it needs to know of its table, whichever library computes it."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from pipelab.predict.costs import Costs, Recompute
from pipelab.predict.simulate import delays, durations
from pipelab.runtime.batches import Data, samples_of
from pipelab.runtime.stage import Feed, MicroBatch
from pipelab.runtime.worker import Pace
from pipelab.table.action import Action, Kind
from pipelab.table.schedule import Schedule
from pipelab.table.transform import fewer

REFERENCES = ("batches", "microbatches")


class Options(SimpleNamespace):
    """The keyword arguments of `run`, which documents them, by name.

    ValueError, with the remedy, for a value that no run can have.

    default  what they are if they are not given
    endless  whether the training goes on after the table's last batch
    """

    def __init__(
        self, default: Mapping[str, Any], given: Mapping[str, Any], endless: bool = False
    ) -> None:
        super().__init__(**{name: given.get(name, value) for name, value in default.items()})
        self.default, self.endless = default, endless
        self.recompute = Recompute(given.get("recompute", "never"))
        for name, fits, remedy in (
            ("replicas", self.replicas >= 1, "a whole number of at least 1"),
            ("check", self.check in (True, False, "quick"), "True, False or 'quick'"),
            ("reference", self.reference in REFERENCES, f"one of {', '.join(REFERENCES)}"),
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
    """A part of a training, between two times at which the pipeline is empty.

    whole   the table of the training
    begun   batches of the table that are done before; `end` afterwards
    before  batches of the training before the table's: see `Endless`
    kept    per stage, the versions that later batches read; None where the table has all of these
    pieces  micro-batches of its one batch, which may be too short for the table's; 0: the table's
    """

    whole: Schedule
    begun: int
    end: int
    before: int = 0
    kept: Sequence[Collection[int]] | None = None
    pieces: int = 0

    @cached_property
    def table(self) -> Schedule:
        """The table that is run, numbered from 0."""
        entire = (self.begun, self.end) == (0, self.whole.batches)
        table = self.whole if entire else self.whole.part(self.begun, self.end)
        return fewer(table, self.pieces) if 0 < self.pieces < table.microbatches else table

    @property
    def batches(self) -> range:
        """By their numbers in the training."""
        return range(self.before + self.begun, self.before + self.end)

    @property
    def first_update(self) -> int:
        """Of the whole table's updates, the first that is made here."""
        # A part begins with a batch, when all updates of the batches before are made.
        return self.begun * self.whole.microbatches // self.whole.per_update

    @property
    def before_table(self) -> int:
        """Updates of the training before the whole table's."""
        return self.before * self.whole.microbatches // self.whole.per_update

    @property
    def updates_before(self) -> int:
        """Updates of the training before this segment."""
        return self.before_table + self.first_update

    def part(self) -> "Part":
        """The table, numbered through the training."""
        first, updates = self.batches.start * self.whole.microbatches, self.updates_before
        rows = [moved(row, first, updates) for row in self.table.rows]
        return Part(rows, self.version, self.kept or self.later(), self.table.microbatches)

    def version(self, stage: int, microbatch: int) -> int:
        """The weight version that it reads; both are numbered through the training."""
        k = microbatch - self.before * self.whole.microbatches
        return self.whole.versions[stage, k] + self.before_table

    def later(self) -> list[set[int]]:
        """Per stage, the versions made before the end that later batches of the table read."""
        m, made = self.whole.microbatches, self.updates_before + self.table.updates
        numbers = range(self.batches.stop * m, self.before * m + self.whole.total)
        read = [{self.version(s, k) for k in numbers} for s in range(self.whole.stages)]
        return [{v for v in of if v <= made} for of in read]


def moved(actions: Iterable[Action], microbatches: int, updates: int) -> list[Action]:
    """Actions with these numbers added."""
    ahead = (microbatches, updates)
    return [Action(s, kind, number + ahead[kind is Kind.U]) for s, kind, number in actions]


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


def seed_for(seed: int, stage: int, piece: int) -> np.uint32:
    """The seed of a stage's forward of a piece of the data, by its number in the training.

    It does not depend on where a training was stopped and resumed.
    """
    # By stage and piece: neither order nor device changes what is drawn. Neighbours draw nothing
    # alike, since the numbers are hashed.
    return np.random.SeedSequence([seed, stage, piece]).generate_state(1)[0]


def unit_of(data: Data, pieces: int) -> int:
    """The unit of counts for batches like the first of these, in so many pieces each."""
    smallest = data.pieces(pieces, slice(-1, None))[0]
    return 1 << samples_of(smallest, data.trees).bit_length()


class Part(NamedTuple):
    """What ranks do next of a training, numbered through it.

    rows     actions
    version  (stage, micro-batch) -> the weight version that it reads
    later    per stage, the versions that data after these read
    pieces   micro-batches of each batch, which may be fewer than the numbers that it has
    """

    rows: Sequence[Sequence[Action]]
    version: Callable[[int, int], int]
    later: Sequence[Collection[int]]
    pieces: int


def feeds_of(
    table: Schedule,
    part: Part,
    data: Data,
    row: int,
    *,
    replica: int,
    replicas: int,
    seed: int | None,
    unit: int,
) -> dict[int, Feed]:
    """The feeds of a row's stages for these data; only the ends of the model read them."""
    m, last, count = table.microbatches, table.stages - 1, part.pieces
    every = [b * m + k for b in data.numbers for k in range(count)]
    own = [s for s, d in enumerate(table.placement) if d == row]
    pieces: list[tuple[Any, Any]] = []
    if {0, last} & {*own}:
        pieces = data.pieces(count * replicas, slice(replica * count, (replica + 1) * count))

    def given(s: int, i: int, k: int) -> MicroBatch:
        x, y = pieces[i] if pieces else (None, None)
        # Data are numbered batch by batch, and in a batch replica by replica.
        piece = (k // m * replicas + replica) * m + k % m
        return MicroBatch(
            part.version(s, k),
            k // table.per_update,
            x if s == 0 else None,
            y if s == last else None,
            samples_of(pieces[i], data.trees) if pieces else 0,
            None if seed is None else (seed, s, piece),
        )

    return {
        s: Feed({k: given(s, i, k) for i, k in enumerate(every)}, part.later[s], unit) for s in own
    }


def paces_of(table: Schedule, options: Options) -> list[Pace | None]:
    """The predicted times that a paced run is slowed down to, by row."""
    if options.pace is None:
        return [None] * table.devices
    costs = options.costs or Costs(recompute=options.recompute)
    of_all = [[unit * options.pace for unit in flat(table, costs)] for flat in (durations, delays)]
    return [Pace(*(flat[a:b] for flat in of_all)) for a, b in pairwise(table.bounds)]
