"""A table of actions as data: its rows, its sizes, and what each action needs.

    device 0   0F0 0F1 .   .   0B0 0B1 0U0        0F1: stage 0, forward, micro-batch 1
    device 1   .   1F0 1F1 1B0 1B1 1U0 .

Everything else is a function of it: `versions`, `text`, `transform`; `schedule.Schedule` has them
as methods. Flat indices count the actions row after row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

from pipelab.table.action import HOST, Action, Kind, Reads, ScheduleError, check_counts
from pipelab.table.placement import check_placement
from pipelab.table.timing import Span, Walk, earliest

TRAINING = frozenset({Kind.B, Kind.I, Kind.W, Kind.U}) | HOST
GRADIENTS = ((0, Kind.RECV_B), (1, Kind.B), (1, Kind.I))
# Whose output an action takes, the first that the table has: (stages further on, kind).
SOURCES: dict[Kind, tuple[tuple[int, Kind], ...]] = dict.fromkeys(Kind, ()) | {
    Kind.F: ((0, Kind.RECV_F), (-1, Kind.F)),
    Kind.B: GRADIENTS,
    Kind.I: GRADIENTS,
    Kind.RECV_F: ((-1, Kind.SEND_F),),
    Kind.RECV_B: ((1, Kind.SEND_B),),
}


@dataclass(frozen=True)
class Table:
    """Rows of actions and how to read them.

    name           for titles and files
    rows           one tuple of actions per device
    placement      stage -> device
    microbatches   per batch; actions number them through all batches
    batches        how many batches the table trains on
    per_update     micro-batches per optimizer update (default: a whole batch)
    reads          the rule that says which weight version a forward reads
    copies         of a model with n stages: stage s + n is a copy of stage s, and both get the sum
                   of their gradients; a micro-batch uses the stages of one copy
    slices         the lengths of a sequence's slices, as shares of it; empty if sequences stay
                   whole. With slices, `microbatches` and the actions' numbers count slices
    overlapped     actions that overlap with the one before in their row: a backward with a forward
                   (0F3+2B1), or a copy to or from the host with what computes (0F3+0OFFLOAD2)
    versions_read  only for a `part` whose forwards read older versions: as `Schedule.versions`

    The constructor checks types, ranges and placement; `pipelab.validate` checks that the table is
    complete and can run, so a broken one can still be built and shown.
    """

    name: str
    rows: Sequence[Sequence[Action]]
    placement: tuple[int, ...]
    microbatches: int
    batches: int = 1
    per_update: int = 0
    reads: Reads = Reads.LATEST
    copies: int = 1
    slices: tuple[float, ...] = ()
    overlapped: frozenset[Action] = frozenset()
    versions_read: dict[tuple[int, int], int] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        name = self.name
        if not name.isprintable() or "=" in name or name != name.strip() or not name:
            raise ScheduleError(f"name={name!r}: give a name of one line, without '='")
        rows = tuple(map(tuple, self.rows))
        if not rows:
            raise ScheduleError("a schedule needs at least one device (row)")
        microbatches, batches, per_update, copies = check_counts(
            microbatches=self.microbatches,
            batches=self.batches,
            per_update=self.per_update or self.microbatches,
            copies=self.copies,
        )
        found: dict[str, Any] = {
            "rows": rows,
            "placement": check_placement(self.placement, len(rows)),
            "microbatches": microbatches,
            "batches": batches,
            "per_update": per_update,
            "reads": Reads(self.reads),
            "copies": copies,
            "slices": _shares(self.slices),
            "overlapped": frozenset(self.overlapped),
        }
        for key, value in found.items():
            object.__setattr__(self, key, value)  # the dataclass is frozen
        if self.stages % copies:
            raise ScheduleError(
                f"copies={copies} does not divide {self.stages} stages: give every copy the same "
                "number of stages"
            )
        for name, count in (("microbatches", microbatches), ("per_update", per_update)):
            if count % self.per_sequence:
                raise ScheduleError(
                    f"{name}={count} counts slices, {self.per_sequence} per sequence: give a "
                    "multiple"
                )
        if self.total % per_update:
            raise ScheduleError(
                f"per_update={per_update} does not divide the {self.total} micro-batches of the "
                "table"
            )
        for d, row in enumerate(rows):
            self._check_row(d, row)
        if self.overlapped:
            self._check_overlapped()
        if self.total > max(self.bounds[-1], 1):
            raise ScheduleError(
                f"{self.total} micro-batches for a table of {self.bounds[-1]} actions: each needs "
                "at least one"
            )

    def _check_row(self, d: int, row: Sequence[Action]) -> None:
        total = self.total
        for i, action in enumerate(row):
            if not (isinstance(action, Action) and isinstance(action.kind, Kind)):
                raise ScheduleError(
                    f"row {d}, cell {i}: {action!r} is not an Action(stage, Kind, microbatch)"
                )
            stage, kind, microbatch = action
            limit = self.updates if kind == Kind.U else total
            if not 0 <= stage < self.stages:
                why = f"stage {stage} is not among stages 0 to {self.stages - 1}"
            elif 0 <= microbatch < limit and self.placement[stage] == d:
                continue
            elif self.placement[stage] != d:
                why = f"stage {stage} is placed on device {self.placement[stage]}"
            else:
                why = f"number {microbatch} is not in 0 to {limit - 1}"
            raise ScheduleError(f"row {d}, cell {i}, {action}: {why}")

    def _check_overlapped(self) -> None:
        pairs = (pair for row in self.rows for pair in pairwise(row))
        before = {other: one for one, other in pairs if other in self.overlapped}
        for action in sorted(self.overlapped):
            one = before.get(action)
            computes = one is not None and one.kind < Kind.U and one not in self.overlapped
            pair = one and (one.kind, action.kind) == (Kind.F, Kind.B)
            if one == action._replace(kind=Kind.F):
                raise ScheduleError(f"{action} overlaps with {one}, which it waits for")
            if not (pair or (computes and action.kind in HOST)):
                raise ScheduleError(
                    f"{action} overlaps with {one or 'nothing'} before it: overlap a backward B "
                    "with a forward, or an offload or reload with one compute action"
                )

    # ---- sizes

    @property
    def devices(self) -> int:
        return len(self.rows)

    @cached_property
    def stages(self) -> int:
        return len(self.placement)

    @cached_property
    def model_stages(self) -> int:
        """Stages of one copy of the model."""
        return self.stages // self.copies

    def ends(self, stage: int) -> tuple[bool, bool]:
        """Whether a stage is the first, and the last, of its copy of the model."""
        place = stage % self.model_stages
        return place == 0, place == self.model_stages - 1

    @property
    def per_sequence(self) -> int:
        """Numbers of a sequence: its slices, or itself."""
        return max(len(self.slices), 1)

    def share(self, number: int) -> float:
        """The part of its sequence that a slice is; 1 where sequences stay whole."""
        return self.slices[number % self.per_sequence] if self.slices else 1.0

    def copies_of(self, stage: int) -> list[int]:
        """All copies of a stage, itself among them; nothing if the model has one copy."""
        n = self.model_stages
        return [*range(stage % n, self.stages, n)] if self.copies > 1 else []

    @cached_property
    def copy_of(self) -> list[int]:
        """The copy of the model that each micro-batch uses: that of its first forward."""
        found = {a.microbatch: a.stage for a in reversed(self.actions) if a.kind is Kind.F}
        return [found.get(k, 0) // self.model_stages for k in range(self.total)]

    @property
    def total(self) -> int:
        """Micro-batches of all batches."""
        return self.microbatches * self.batches

    @property
    def updates(self) -> int:
        return self.total // self.per_update

    @cached_property
    def kinds(self) -> set[Kind]:
        return {action.kind for action in self.actions}

    @property
    def training(self) -> bool:
        """Whether the table has anything but forwards (and their transfers)."""
        return not self.kinds.isdisjoint(TRAINING)

    @property
    def has_transfers(self) -> bool:
        return max(self.kinds, default=Kind.F) >= Kind.SEND_F

    # ---- flat over the table: what the simulator, the validator and the runtime share

    @cached_property
    def actions(self) -> tuple[Action, ...]:
        """The rows, one after another."""
        return tuple(action for row in self.rows for action in row)

    @cached_property
    def bounds(self) -> list[int]:
        """Row d is actions[bounds[d]:bounds[d + 1]]."""
        return [0, *accumulate(map(len, self.rows))]

    @cached_property
    def device_of(self) -> list[int]:
        return [d for d, row in enumerate(self.rows) for _ in row]

    @cached_property
    def position(self) -> dict[tuple[int, Kind, int], int]:
        """Each action's flat index; a plain (stage, kind, micro-batch) works as a key, too."""
        return {action: i for i, action in enumerate(self.actions)}

    @cached_property
    def inputs(self) -> list[int | None]:
        """For each action, the index of the action whose output it takes, or None.

        F takes the output of the stage before; B and I take the gradient of the stage after. With
        transfers written out, they take it from the RECV on their own device, and a RECV takes it
        from the matching SEND.
        """
        sources = {
            kind: [(step, other) for step, other in SOURCES[kind] if other in self.kinds]
            for kind in self.kinds
        }
        find = self.position.get
        found = []
        for stage, kind, microbatch in self.actions:
            source = None
            for step, other in sources[kind]:
                source = find((stage + step, other, microbatch))
                if source is not None:
                    break
            found.append(source)
        return found

    @cached_property
    def takers(self) -> list[int | None]:
        """For each action, the index of the action that takes its output, or None."""
        takers: list[int | None] = [None] * len(self.inputs)
        for i, source in enumerate(self.inputs):
            if source is not None:
                takers[source] = i
        return takers

    @cached_property
    def joined(self) -> set[int]:
        """Indices of the actions that overlap with the one before in their row."""
        return {self.position[action] for action in self.overlapped}

    @cached_property
    def before(self) -> list[int | None]:
        """For each action, the index of the last one that ends before it in its row, or None."""
        firsts, joined = set(self.bounds), self.joined
        lasts = (i - 2 if i in joined else i - 1 for i in range(self.bounds[-1]))
        return [None if i - (i in joined) in firsts else last for i, last in enumerate(lasts)]

    @cached_property
    def as_held(self) -> list[list[Action]]:
        """Rows with each reload before the action it overlaps with. A reload takes memory as both
        start; the other frees memory at its end."""
        rows = [[*row] for row in self.rows]
        for i in self.joined:
            if self.actions[i].kind is Kind.RELOAD:
                row, k = rows[self.device_of[i]], i - self.bounds[self.device_of[i]]
                row[k - 1 : k + 1] = row[k], row[k - 1]
        return rows

    @cached_property
    def needs(self) -> list[int | None]:
        """`inputs`, but a SEND and its RECV need each other: they meet (rendezvous)."""
        if not self.has_transfers:
            return self.inputs
        sends = (Kind.SEND_F, Kind.SEND_B)
        pairs = zip(self.actions, self.takers, self.inputs, strict=True)
        return [taker if action.kind in sends else source for action, taker, source in pairs]

    @cached_property
    def crossing(self) -> list[int]:
        """Indices of the actions whose input crosses devices by a transfer not written out."""
        device = self.device_of
        return [
            i
            for i, source in enumerate(self.inputs)
            if source is not None
            and device[source] != device[i]
            and self.actions[i].kind < Kind.SEND_F
        ]

    # ---- in time

    def walk(self, duration: Sequence[float], delay: Sequence[float]) -> Walk:
        """When each action runs if all start as early as they can, see `earliest`."""
        joined = self.joined
        return earliest(self.bounds, self.needs, self.device_of, duration, delay, joined)

    def unit_times(self) -> Walk:
        """`walk` with one unit of time per action and no time per transfer."""
        count = self.bounds[-1]
        return self.walk([1.0] * count, [0.0] * count)

    def arrivals(self, spans: Sequence[Span]) -> list[float]:
        """When each action's input is on its device (-inf: it takes none)."""
        found = []
        for span, source in zip(spans, self.inputs, strict=True):
            if span.arrived is not None:
                found.append(span.arrived)
            else:
                found.append(-math.inf if source is None else spans[source].end)
        return found


def _shares(lengths: Sequence[float]) -> tuple[float, ...]:
    """Lengths as shares of their sum. ScheduleError for one that is not positive."""
    try:
        found = tuple(float(x) for x in lengths)
    except (TypeError, ValueError):
        found = (0.0,)
    if not all(0 < x < math.inf for x in found):
        raise ScheduleError(f"slices={lengths!r}: give the length of each slice, above 0")
    whole = math.fsum(found)
    return found if math.isclose(whole, 1) else tuple(x / whole for x in found)
