"""Which weight versions a table reads, and how long each is kept. `U t` makes version t + 1."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from pipelab.table.action import Kind, Reads, U
from pipelab.table.table import Table
from pipelab.table.timing import Span

Versions = dict[tuple[int, int], int]  # (stage, micro-batch) -> weight version


class VersionLife(NamedTuple):
    """A weight version of a stage: made by the action at flat index `born` (-1: at the start),
    needed up to the action at `last`."""

    stage: int
    version: int
    born: int
    last: int


class VersionedTable(Table):
    """A table, and the weight versions and activations that it keeps."""

    @cached_property
    def latest(self) -> Versions:
        """For each forward, how many updates of its stage its row has made before it."""
        made, latest = [0] * self.stages, {}
        forward, update = Kind.F, Kind.U
        for stage, kind, number in self.actions:
            if kind is update:
                made[stage] += 1
            elif kind is forward:
                latest[stage, number] = made[stage]
        return latest

    @cached_property
    def versions(self) -> Versions:
        """The weight version that each forward reads, and its backward."""
        if self.versions_read is not None:
            return self.versions_read
        if self.reads is Reads.LATEST:
            return self.latest
        if self.reads is Reads.FIRST:
            return {(stage, k): self.latest.get((0, k), 0) for stage, k in self.latest}
        return {(stage, k): max(k // self.microbatches - 1, 0) for stage, k in self.latest}

    def read_at(self, stage: int, microbatch: int) -> int:
        """The version that a micro-batch reads of a stage, or of its copy of that stage."""
        n = self.model_stages
        return self.versions[self.copy_of[microbatch] * n + stage % n, microbatch]

    def spans(
        self,
        start: Sequence[float],
        end: Sequence[float],
        moved: Mapping[int, tuple[float | None, float | None]],
    ) -> tuple[Span, ...]:
        """The spans of the actions, in the table's flat order.

        moved  flat index -> when the action's input was sent and arrived, if from another device
        """
        versions, nowhere = self.versions, (None, None)
        spans = []
        for i, action in enumerate(self.actions):
            stage, kind, number = action
            version = versions[stage, number] if kind < Kind.U else -1
            if kind is Kind.U:
                version = number + 1
            sent, arrived = moved.get(i, nowhere)
            spans.append(Span(self.device_of[i], action, version, start[i], end[i], sent, arrived))
        return tuple(spans)

    @cached_property
    def asynchronous(self) -> bool:
        """Whether a forward reads weights that miss an update of an earlier batch: no flush.

        Or would in a further batch: even one batch of 2BW has no flush.
        """
        if self.reads is Reads.PREVIOUS or self.per_update < self.microbatches:
            return True
        return any(version != k // self.per_update for (_, k), version in self.versions.items())

    @cached_property
    def lives(self) -> list[VersionLife]:
        """The lifetime of each weight version: up to its last reader or its replacement, whichever
        is later."""
        at, versions = self.position, self.versions
        oldest = min([0, *versions.values()])
        newest = self.updates if self.training else 0
        last_reader = {}  # (stage, version) -> flat index; a stage's actions are all in one row
        for i, (stage, kind, k) in enumerate(self.actions):
            if kind < Kind.U:
                last_reader[stage, min(versions[stage, k], newest)] = i
        lives = []
        for stage, device in enumerate(self.placement):
            for version in range(oldest, newest + 1):
                born = at[U(stage, version - 1)] if version > 0 else -1
                if version == newest:
                    replaced = self.bounds[device + 1] - 1  # never: kept to the end of its row
                else:
                    replaced = at[U(stage, version)] if version >= 0 else -1
                last = max(replaced, last_reader.get((stage, version), -1))
                lives.append(VersionLife(stage, version, born, last))
        return lives

    @cached_property
    def weight_versions(self) -> list[int]:
        """Per device, the most weight versions of one stage that are kept at one time."""
        changes: list[list[tuple[int, int]]] = [[] for _ in self.placement]
        for life in self.lives:
            # At equal indices -1 sorts before 1: a version made by U takes the place of one that
            # ends there (an update in place).
            changes[life.stage] += [(life.born, 1), (max(life.last, life.born), -1)]
        most = [0] * self.devices
        for d, of_stage in zip(self.placement, changes, strict=True):
            most[d] = max(most[d], *accumulate(change for _, change in sorted(of_stage)))
        return most

    @cached_property
    def peak_in_flight(self) -> list[int]:
        """Per device, the most micro-batches (chunk activations) held for backwards at once,
        without those offloaded."""
        change = {Kind.F: 1, Kind.B: -1, Kind.W: -1, Kind.OFFLOAD: -1, Kind.RELOAD: 1}
        return [
            max(accumulate((change.get(a.kind, 0) for a in row), initial=0)) for row in self.as_held
        ]
