"""A table of actions as data: its rows, its sizes, and the same as arrays.

    device 0   0F0 0F1 .   .   0B0 0B1 0U0        0F1: stage 0, forward, micro-batch 1
    device 1   .   1F0 1F1 1B0 1B1 1U0 .

Everything else is a function of it: `versions`, `text`, `transform`; `schedule.Schedule` has them
as methods. Needs numpy alone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from pipelab.action import Action, Kind, Reads, ScheduleError, check_counts, numbers
from pipelab.earliest import Walk, earliest


class Columns(NamedTuple):
    """The table as flat integer arrays, rows one after another."""

    device: np.ndarray
    stage: np.ndarray
    kind: np.ndarray
    microbatch: np.ndarray


class Rows(Sequence):
    """The rows of a table as numbers; a row's tuple of actions is made when it is asked for.

    numbers  per row [action, (stage, kind, micro-batch)], read-only
    """

    def __init__(self, rows: Iterable[Iterable[Action] | np.ndarray]) -> None:
        """ScheduleError for what is no action."""
        self._made: dict[int, tuple[Action, ...]] = {}
        arrays = []
        for d, row in enumerate(rows):
            if isinstance(row, np.ndarray):
                _check_numbers(d, row)
                row = row.astype(np.int64)  # a copy, which the caller cannot change
            else:
                self._made[d] = row = tuple(row)
                _check_types(d, row)
                try:
                    row = numbers(row)
                except OverflowError:
                    raise ScheduleError(f"row {d} has a number beyond 64 bits") from None
            row.setflags(write=False)
            arrays.append(row)
        self.numbers = tuple(arrays)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, d: Any) -> Any:
        if isinstance(d, slice):
            return tuple(self)[d]
        d = range(len(self))[d]
        if d not in self._made:
            stage, kind, microbatch = self.numbers[d].T.tolist()
            kinds = map(tuple(Kind).__getitem__, kind)
            # Action(...) for each, in half the time.
            make = partial(tuple.__new__, Action)
            self._made[d] = tuple(map(make, zip(stage, kinds, microbatch, strict=True)))
        return self._made[d]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rows):
            return tuple(self) == other
        alike = map(np.array_equal, self.numbers, other.numbers)
        return len(self) == len(other) and all(alike)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __reduce__(self) -> tuple:
        return Rows, (self.numbers,)


def _check_types(d: int, row: Sequence[Any]) -> None:
    for i, a in enumerate(row):
        is_action = type(a) is Action and type(a.kind) is Kind
        if not is_action or not type(a.stage) is type(a.microbatch) is int:
            raise ScheduleError(
                f"row {d}, cell {i}: {a!r} is not an Action(stage, Kind, microbatch)"
            )


def _check_numbers(d: int, row: np.ndarray) -> None:
    if row.dtype.kind not in "iu" or row.shape[1:] != (3,):
        raise ScheduleError(
            f"row {d} is an array of {row.dtype} {row.shape}: give whole numbers, [action, (stage, "
            "kind, micro-batch)]"
        )
    unknown = (row[:, 1] < 0) | (row[:, 1] > max(Kind))
    if unknown.any():
        i = int(np.argmax(unknown))
        raise ScheduleError(f"row {d}, cell {i}: kind {row[i, 1]} is not among 0 to {max(Kind)}")


@dataclass(frozen=True)
class Table:
    """Rows of actions and how to read them.

    name           for titles and files
    rows           one tuple of actions per device; kept as `Rows`
    placement      stage -> device
    microbatches   per batch; actions number them through all batches
    batches        how many batches the table trains on
    per_update     micro-batches per optimizer update (default: a whole batch)
    reads          the rule that says which weight version a forward reads
    versions_read  only of a `part` whose forwards reach back before it: [stage][micro-batch], as
                   `Schedule.versions`

    The constructor checks types, ranges and placement; `pipelab.validate` checks that the table is
    complete and can run, so that a broken one can still be built and shown.
    """

    name: str
    rows: Sequence[Any]
    placement: tuple[int, ...]
    microbatches: int
    batches: int = 1
    per_update: int = 0
    reads: Reads = Reads.LATEST
    versions_read: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rows, Rows):
            object.__setattr__(self, "rows", Rows(self.rows))
        object.__setattr__(self, "placement", tuple(self.placement))
        stripped = self.name.strip()
        if not stripped or stripped != self.name or not stripped.isprintable() or "=" in stripped:
            raise ScheduleError(f"name={self.name!r}: give a name of one line, without '='")
        if not self.rows:
            raise ScheduleError("a schedule needs at least one device (row)")
        check_counts(microbatches=self.microbatches, batches=self.batches)
        if not self.per_update:
            object.__setattr__(self, "per_update", self.microbatches)
        check_counts(per_update=self.per_update)
        if self.total % self.per_update:
            raise ScheduleError(
                f"per_update={self.per_update} does not divide the {self.total} micro-batches of "
                "the table"
            )
        if not isinstance(self.reads, Reads):
            raise ScheduleError(
                f"reads={self.reads!r}: use Reads.LATEST, Reads.FIRST or Reads.PREVIOUS"
            )
        devices = range(self.devices)
        if not self.placement or any(
            not isinstance(d, int) or d not in devices for d in self.placement
        ):
            raise ScheduleError(
                f"placement {self.placement}: give each stage a device from 0 to {devices[-1]}"
            )
        self._check_ranges()

    def _check_ranges(self) -> None:
        count = self.bounds[-1]
        if self.total > max(count, 1):
            raise ScheduleError(
                f"{self.total} micro-batches for a table of {count} actions: each needs at least "
                "one"
            )
        device, stage, kind, microbatch = self.columns
        limit = np.where(kind == Kind.U, self.updates, self.total)
        unknown = (stage < 0) | (stage >= self.stages)
        outside = (microbatch < 0) | (microbatch >= limit)
        elsewhere = np.take(self.placement, stage, mode="clip") != device
        wrong = unknown | outside | elsewhere
        if wrong.any():
            i = int(np.argmax(wrong))
            a, d = self.action(i), int(device[i])
            if unknown[i]:
                why = f"stage {a.stage} is not among stages 0 to {self.stages - 1}"
            elif outside[i]:
                why = f"number {a.microbatch} is not in 0 to {limit[i] - 1}"
            else:
                why = f"stage {a.stage} is placed on device {self.placement[a.stage]}"
            raise ScheduleError(f"row {d}, cell {i - self.bounds[d]}, {a}: {why}")

    # ---- sizes

    @property
    def devices(self) -> int:
        return len(self.rows)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def total(self) -> int:
        """Micro-batches of all batches."""
        return self.microbatches * self.batches

    @property
    def updates(self) -> int:
        return self.total // self.per_update

    @cached_property
    def training(self) -> bool:
        """Whether the table has anything but forwards (and their transfers)."""
        return bool(np.isin(self.columns.kind, (Kind.B, Kind.I, Kind.W, Kind.U)).any())

    @cached_property
    def has_transfers(self) -> bool:
        return bool((self.columns.kind >= Kind.SEND_F).any())

    # ---- the table as arrays: what the simulator, the validator and the executors share

    @property
    def numbers(self) -> tuple[np.ndarray, ...]:
        """The rows, each [action, (stage, kind, micro-batch)], read-only."""
        return self.rows.numbers  # type: ignore[attr-defined]

    @cached_property
    def bounds(self) -> list[int]:
        """Row d of the flat arrays is bounds[d]:bounds[d + 1]."""
        return [0, *accumulate(map(len, self.numbers))]

    @cached_property
    def columns(self) -> Columns:
        device = np.repeat(np.arange(self.devices), np.diff(self.bounds))
        return Columns(device, *np.concatenate(self.numbers).T.copy())

    def action(self, index: int) -> Action:
        """The action at a flat index."""
        stage, kind, microbatch = (int(column[index]) for column in self.columns[1:])
        return Action(stage, Kind(kind), microbatch)

    @cached_property
    def position(self) -> np.ndarray:
        """position[kind, stage, microbatch]: the action's flat index, or -1 where there is none."""
        position = np.full((len(Kind), self.stages, self.total), -1)
        _, stage, kind, microbatch = self.columns
        position[kind, stage, microbatch] = np.arange(len(kind))
        return position

    @cached_property
    def inputs(self) -> np.ndarray:
        """For each action, the flat index of the action whose output it takes, or -1.

        F takes the output of the stage before; B and I take the gradient of the stage after. Where
        transfers are written out, these take what the RECV on their own device received, and a RECV
        takes what the matching SEND sent.
        """
        at = self.position
        gradient = np.where(at[Kind.B] >= 0, at[Kind.B], at[Kind.I])
        source = np.full_like(at, -1)
        source[Kind.F, 1:] = at[Kind.F, :-1]
        source[Kind.B, :-1] = source[Kind.I, :-1] = gradient[1:]
        for kinds, receive in (([Kind.F], Kind.RECV_F), ([Kind.B, Kind.I], Kind.RECV_B)):
            source[kinds] = np.where(at[receive] >= 0, at[receive], source[kinds])
        source[Kind.RECV_F, 1:] = at[Kind.SEND_F, :-1]
        source[Kind.RECV_B, :-1] = at[Kind.SEND_B, 1:]
        _, stage, kind, microbatch = self.columns
        return source[kind, stage, microbatch]

    @cached_property
    def takers(self) -> np.ndarray:
        """For each action, the flat index of the action that takes its output, or -1."""
        takers = np.full(len(self.inputs), -1)
        taken = np.flatnonzero(self.inputs >= 0)
        takers[self.inputs[taken]] = taken
        return takers

    @cached_property
    def before(self) -> np.ndarray:
        """For each action, the flat index of the one before it in its row, or -1."""
        index = np.arange(self.bounds[-1])
        return np.where(np.isin(index, self.bounds), -1, index - 1)

    @property
    def needs(self) -> np.ndarray:
        """`inputs`; but a SEND needs its RECV, as that needs the SEND: they meet (rendezvous)."""
        sends = np.isin(self.columns.kind, (Kind.SEND_F, Kind.SEND_B))
        return np.where(sends, self.takers, self.inputs)

    @cached_property
    def crossing(self) -> np.ndarray:
        """Flat indices of actions whose input crosses devices by a transfer not written out."""
        device, _, kind, _ = self.columns
        moved = (self.inputs >= 0) & (device != device[self.inputs])
        return np.flatnonzero(moved & (kind < Kind.SEND_F))

    # ---- in time

    def walk(self, duration: np.ndarray, delay: np.ndarray) -> Walk:
        """When each action runs if all start as early as they can, see `earliest`."""
        return earliest(
            self.bounds,
            self.needs.tolist(),
            self.columns.device.tolist(),
            duration.tolist(),
            delay.tolist(),
        )

    def unit_times(self) -> Walk:
        """`walk` with one unit of time per action and no time per transfer."""
        count = self.bounds[-1]
        return self.walk(np.ones(count), np.zeros(count))
