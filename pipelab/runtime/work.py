"""Which batches of a training a run is, and the part of the table that they are."""

from collections.abc import Collection, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from pipelab.table.action import Action
from pipelab.table.schedule import Schedule
from pipelab.table.transform import Offset, fewer


@dataclass(frozen=True)
class Work:
    """Batches of a training, and what ranks do for them.

    Of a Trainer whose table of 6 batches repeats from its 5th one on, the 9th batch is Work(table,
    begun=4, end=5, before=4): what the table does in its 5th batch, 4 batches later.

    whole       the table of the training
    begun       batches of the table that are done before; `end` afterwards
    before      batches of the training before the table's: see `Endless`
    later       per stage, the versions that later batches read; None where the table has all
    pieces      micro-batches of its one batch, which may be too short for the table's; 0: as many
    given_rows  the rows of ranks whose pipeline others of the training's batches fill, too;
                default: those of these batches alone, from an empty pipeline to an empty one
    """

    whole: Schedule
    begun: int
    end: int
    before: int = 0
    later: Sequence[Set[int]] | None = None
    pieces: int = 0
    given_rows: Sequence[Sequence[Action]] | None = None

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

    @cached_property
    def table_offset(self) -> Offset:
        """What of the training is done before the whole table."""
        return Offset.of(self.whole, self.before)

    @property
    def offset(self) -> Offset:
        """What of the training is done before these batches."""
        return Offset.of(self.whole, self.batches.start)

    @property
    def microbatches(self) -> int:
        """Of each batch; a short one has fewer than the numbers that it takes."""
        return self.pieces or self.whole.microbatches

    @property
    def rows(self) -> Sequence[Sequence[Action]]:
        """What each row does, numbered through the training."""
        return self.given_rows or [self.offset.moved(row) for row in self.table.rows]

    @property
    def overlapped(self) -> Collection[Action]:
        """Actions of the rows that overlap with the one before."""
        if self.given_rows is None:
            return frozenset(self.offset.moved(self.table.overlapped))
        # The rows may have lost one of a pair.
        moved, actions = self.table_offset.moved, self.whole.actions
        pairs = {tuple(moved(actions[i - 1 : i + 1])) for i in self.whole.joined}
        return {b for row in self.given_rows for a, b in pairwise(row) if (a, b) in pairs}

    def version(self, stage: int, microbatch: int) -> int:
        """The weight version that it reads; both are numbered through the training."""
        microbatches, updates = self.table_offset
        return self.whole.read_at(stage, microbatch - microbatches) + updates

    def copy(self, microbatch: int) -> int:
        """The copy of the model that takes it."""
        return self.whole.copy_of[microbatch - self.table_offset.microbatches]

    def read_later(self) -> Sequence[Set[int]]:
        """Per stage, the versions that later batches read, as far as they are made by the end."""
        if self.later:
            return self.later
        first = self.batches.stop * self.whole.microbatches
        numbers = range(first, self.table_offset.microbatches + self.whole.total)
        latest = self.offset.updates + self.table.updates
        read = [{self.version(s, k) for k in numbers} for s in range(self.whole.stages)]
        return [{v for v in versions if v <= latest} for versions in read]
