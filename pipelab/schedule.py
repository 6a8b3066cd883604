"""A schedule is data: a table of actions, one row per device, read from left to right.

    device 0   0F0 0F1 .   .   0B0 0B1 0U0        0F1: stage 0, forward, micro-batch 1
    device 1   .   1F0 1F1 1B0 1B1 1U0 .

The same table is validated, simulated, drawn, exported and run. Needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, groupby, pairwise
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from pipelab.action import COMPUTE, Action, Kind, Reads, ScheduleError, check_counts
from pipelab.earliest import earliest
from pipelab.text import header_line, read_table


class Columns(NamedTuple):
    """The table as flat integer arrays, rows one after another."""

    device: np.ndarray
    stage: np.ndarray
    kind: np.ndarray
    microbatch: np.ndarray


class VersionLife(NamedTuple):
    """A weight version of a stage: made by the action at flat index `born` (-1: there from the start), needed up to `last`."""

    stage: int
    version: int
    born: int
    last: int


@dataclass(frozen=True)
class Schedule:
    """Rows of actions and how to read them.

    name          for titles and files
    rows          one tuple of actions per device
    placement     stage -> device
    microbatches  per batch; actions number them through all batches
    batches       how many batches the table trains on
    per_update    micro-batches per optimizer update (default: a whole batch)
    reads         the rule that says which weight version a forward reads
    versions_read  only of a `part` whose forwards reach back before it: [stage][micro-batch], as `versions`

    The constructor checks types, ranges and placement; `pipelab.validate` checks that the table is complete and can
    run, so that a broken one can still be built and shown.

    >>> s = Schedule.from_grid("0F0 .   .   0B0 0U0\\n.   1F0 1B0 1U0 .")
    >>> s.devices, s.stages, s.microbatches
    (2, 2, 1)
    """

    name: str
    rows: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    microbatches: int
    batches: int = 1
    per_update: int = 0
    reads: Reads = Reads.LATEST
    versions_read: tuple[tuple[int, ...], ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(tuple(row) for row in self.rows))
        object.__setattr__(self, "placement", tuple(self.placement))
        if (
            not self.name.isprintable()
            or "=" in self.name
            or self.name != self.name.strip()
            or not self.name
        ):
            raise ScheduleError(f"name={self.name!r}: give a name of one line, without '='")
        if not self.rows:
            raise ScheduleError("a schedule needs at least one device (row)")
        check_counts(microbatches=self.microbatches, batches=self.batches)
        if not self.per_update:
            object.__setattr__(self, "per_update", self.microbatches)
        check_counts(per_update=self.per_update)
        if self.total % self.per_update:
            raise ScheduleError(
                f"per_update={self.per_update} does not divide the {self.total} micro-batches of the table"
            )
        if not isinstance(self.reads, Reads):
            raise ScheduleError(
                f"reads={self.reads!r}: use Reads.LATEST, Reads.FIRST or Reads.PREVIOUS"
            )
        if not self.placement or any(
            not isinstance(d, int) or not 0 <= d < self.devices for d in self.placement
        ):
            raise ScheduleError(
                f"placement {self.placement}: give each stage a device from 0 to {self.devices - 1}"
            )
        self._check_cells()

    def _check_cells(self) -> None:
        for d, row in enumerate(self.rows):
            for i, a in enumerate(row):
                if (
                    type(a) is not Action
                    or type(a.kind) is not Kind
                    or not type(a.stage) is type(a.microbatch) is int
                ):
                    raise ScheduleError(
                        f"row {d}, cell {i}: {a!r} is not an Action(stage, Kind, microbatch)"
                    )
        if self.total > max(self.bounds[-1], 1):
            raise ScheduleError(
                f"{self.total} micro-batches for a table of {self.bounds[-1]} actions: each needs at least one"
            )
        device, stage, kind, microbatch = self.columns
        limit = np.where(kind == Kind.U, self.updates, self.total)
        outside = (stage < 0) | (stage >= self.stages)
        wrong = outside | (microbatch < 0) | (microbatch >= limit)
        wrong |= np.asarray(self.placement)[np.where(outside, 0, stage)] != device
        if wrong.any():
            i = int(np.argmax(wrong))
            a, d = self.action(i), int(device[i])
            if outside[i]:
                why = f"stage {a.stage} is not among stages 0 to {self.stages - 1}"
            elif not 0 <= a.microbatch < limit[i]:
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

    @property
    def asynchronous(self) -> bool:
        """Whether some forward reads weights that miss an update of an earlier batch: training differs from a flush."""
        batch = np.arange(self.total) // self.per_update
        return self.per_update < self.microbatches or bool((self.versions != batch).any())

    # ---- the table as arrays: what the simulator, the validator and the executors share

    @cached_property
    def bounds(self) -> list[int]:
        """Row d of the flat arrays is bounds[d]:bounds[d + 1]."""
        return [0, *accumulate(len(row) for row in self.rows)]

    @cached_property
    def columns(self) -> Columns:
        count = self.bounds[-1]
        device = np.repeat(np.arange(self.devices), np.diff(self.bounds))
        fields = (
            np.fromiter(map(itemgetter(f), chain.from_iterable(self.rows)), np.int64, count)
            for f in range(3)
        )
        return Columns(device, *fields)

    def action(self, index: int) -> Action:
        """The action at a flat index."""
        stage, kind, microbatch = (int(c[index]) for c in self.columns[1:])
        return Action(stage, Kind(kind), microbatch)

    @cached_property
    def position(self) -> np.ndarray:
        """position[kind, stage, microbatch]: the action's flat index, or -1 where the table has none."""
        table = np.full((len(Kind), self.stages, self.total), -1)
        table[self.columns[2], self.columns[1], self.columns[3]] = np.arange(self.bounds[-1])
        return table

    @cached_property
    def inputs(self) -> np.ndarray:
        """For each action, the flat index of the action of a neighbouring stage whose output it takes, or -1.

        F takes the output of the stage before; B and I take the gradient of the stage after. In a table with transfers
        an action takes what its own RECV brought, and a RECV what the matching SEND gave.
        """
        at = self.position
        gradient = np.where(at[Kind.B] >= 0, at[Kind.B], at[Kind.I])
        source = np.full_like(at, -1)
        source[Kind.F, 1:] = at[Kind.F, :-1]
        source[Kind.B, :-1] = source[Kind.I, :-1] = gradient[1:]
        if self.has_transfers:
            for does, receive in (
                (Kind.F, Kind.RECV_F),
                (Kind.B, Kind.RECV_B),
                (Kind.I, Kind.RECV_B),
            ):
                source[does] = np.where(at[receive] >= 0, at[receive], source[does])
            source[Kind.RECV_F, 1:] = at[Kind.SEND_F, :-1]
            source[Kind.RECV_B, :-1] = at[Kind.SEND_B, 1:]
        _, stage, kind, microbatch = self.columns
        return source[kind, stage, microbatch]

    @cached_property
    def crossing(self) -> np.ndarray:
        """Flat indices of the actions whose input comes from another device by a transfer that is not in the table."""
        device, _, kind, _ = self.columns
        source = self.inputs
        return np.flatnonzero((source >= 0) & (device != device[source]) & (kind < Kind.SEND_F))

    @cached_property
    def takers(self) -> np.ndarray:
        """For each action, the flat index of the action that takes its output, or -1: `inputs` the other way round."""
        out = np.full(self.bounds[-1], -1)
        taken = np.flatnonzero(self.inputs >= 0)
        out[self.inputs[taken]] = taken
        return out

    @cached_property
    def has_transfers(self) -> bool:
        return bool((self.columns.kind >= Kind.SEND_F).any())

    @property
    def needs(self) -> np.ndarray:
        """`inputs`, but -2 - j for each SEND and RECV whose other side is j: they meet (see `earliest`)."""
        kind, inputs = self.columns.kind, self.inputs
        receives, sends = (
            np.isin(kind, (Kind.RECV_F, Kind.RECV_B)),
            np.isin(kind, (Kind.SEND_F, Kind.SEND_B)),
        )
        return np.where(receives, -2 - inputs, np.where(sends, -2 - self.takers, inputs))

    def unit_times(self) -> tuple[list[float], list[float], list[int]]:
        """`earliest` with one unit of time per action and none per transfer."""
        count = self.bounds[-1]
        return earliest(
            self.bounds, self.needs.tolist(), self.columns.device.tolist(), [1] * count, [0] * count
        )

    @cached_property
    def versions(self) -> np.ndarray:
        """versions[stage, microbatch]: the weight version that its forward and backward read. `U t` makes version t + 1."""
        if self.versions_read is not None:
            return np.array(self.versions_read)
        if self.reads is Reads.PREVIOUS:
            batch = np.arange(self.total) // self.microbatches
            return np.tile(np.maximum(batch - 1, 0), (self.stages, 1))
        latest = self.latest
        return np.tile(latest[0], (self.stages, 1)) if self.reads is Reads.FIRST else latest

    @cached_property
    def latest(self) -> np.ndarray:
        """latest[stage, microbatch]: how many updates its row has made on the stage before this forward."""
        out = np.zeros((self.stages, self.total), np.int64)
        _, stage, kind, microbatch = self.columns
        for s in range(self.stages):
            mine = np.flatnonzero(stage == s)
            forward = kind[mine] == Kind.F
            out[s, microbatch[mine][forward]] = np.cumsum(kind[mine] == Kind.U)[forward]
        return out

    @cached_property
    def lives(self) -> tuple[VersionLife, ...]:
        """From when to when each weight version must be kept: until its last reader, or until it is replaced."""
        at, lives = self.position, []
        done = np.maximum.reduce(
            [at[k] for k in (Kind.F, Kind.B, Kind.I, Kind.W)]
        )  # last reader of each (stage, mb)
        oldest, newest = min(0, int(self.versions.min())), self.updates if self.training else 0
        for s in range(self.stages):
            last = np.full(newest - oldest + 1, -1)
            np.maximum.at(last, np.minimum(self.versions[s], newest) - oldest, done[s])
            for v in range(oldest, newest + 1):
                end = self.bounds[self.placement[s] + 1] - 1
                replaced = -1 if v < 0 else int(at[Kind.U, s, v]) if v < newest else end
                born = int(at[Kind.U, s, v - 1]) if v > 0 else -1
                lives.append(VersionLife(s, v, born, max(int(last[v - oldest]), replaced)))
        return tuple(lives)

    @cached_property
    def peak_in_flight(self) -> list[int]:
        """Per device, the most micro-batches (chunk activations) held for a backward at one time, in row order."""
        kind = self.columns.kind
        step = (kind == Kind.F).astype(int) - ((kind == Kind.B) | (kind == Kind.W))
        return [int(np.cumsum(step[a:b]).max(initial=0)) for a, b in pairwise(self.bounds)]

    @cached_property
    def weight_versions(self) -> list[int]:
        """Per device, the most weight versions of one stage that are kept at one time."""
        peaks = [0] * self.stages
        for s, of_stage in groupby(self.lives, key=itemgetter(0)):
            lives = list(of_stage)
            # A version made by U at index i is first held at i; one that dies there gave it its storage (in place).
            change = sorted(
                e for life in lives for e in ((life.born, 1), (max(life.last, life.born), -1))
            )
            peaks[s] = max(accumulate(c for _, c in change))
        return [
            max((peaks[s] for s in range(self.stages) if self.placement[s] == d), default=0)
            for d in range(self.devices)
        ]

    # ---- parts of the table

    def part(self, first: int, last: int) -> Schedule:
        """Batches `first` to `last` - 1 as a table of their own, numbered from 0: what a run does between two checkpoints.

        Weight versions count from the part's start; one below 0 was made before it. Dependencies stay inside a micro-batch,
        so that a valid table without whole batches stays valid. Raises ScheduleError where an update needs batches of both.
        """
        if not 0 <= first < last <= self.batches:
            raise ScheduleError(
                f"batches {first} to {last} of {self.name}, which has {self.batches}: give a part of them"
            )
        a, b = first * self.microbatches, last * self.microbatches
        if a % self.per_update or b % self.per_update:
            raise ScheduleError(
                f"{self.name} updates every {self.per_update} micro-batches: cut it where an update ends"
            )
        begun = a // self.per_update
        rows = []
        for row in self.rows:
            kept = (Action(s, k, i - (begun if k is Kind.U else a)) for s, k, i in row)
            sizes = ((b - a) // self.per_update, b - a)
            rows.append(tuple(x for x in kept if 0 <= x.microbatch < sizes[x.kind is not Kind.U]))
        part = replace(self, rows=tuple(rows), batches=last - first, versions_read=None)
        read = self.versions[:, a:b] - begun
        return (
            part
            if (part.versions == read).all()
            else replace(part, versions_read=tuple(map(tuple, read.tolist())))
        )

    def forward_only(self) -> Schedule:
        """The table with nothing but its forwards: what evaluation runs."""
        kept = (Kind.F, Kind.SEND_F, Kind.RECV_F)
        return replace(
            self,
            rows=tuple(tuple(a for a in row if a.kind in kept) for row in self.rows),
            reads=Reads.LATEST,
            versions_read=None,
        )

    # ---- transfers written out

    def with_transfers(self) -> Schedule:
        """The same table with every SEND and RECV between devices written into both rows.

        A SEND and its RECV stand at the same moment of a unit-time simulation (ties broken by stage, then kind), which
        makes the order safe for rendezvous: each pair is one point in a common order of all events.
        """
        if self.has_transfers:
            raise ScheduleError(f"{self.name} already has its transfers")
        device, stage, kind, microbatch = (c.tolist() for c in self.columns)
        start, end, heads = self.unit_times()
        if any(h < b for h, b in zip(heads, self.bounds[1:], strict=True)):
            raise ScheduleError(
                f"{self.name} cannot run as it stands, so its transfers have no order: see pipelab.validate"
            )
        events = [
            (start[i], 1, stage[i], kind[i], microbatch[i], [(device[i], self.action(i))])
            for i in range(len(start))
        ]
        for i in self.crossing.tolist():
            j = int(self.inputs[i])
            letter = "F" if kind[i] == Kind.F else "B"
            send = Action(stage[j], Kind[f"SEND_{letter}"], microbatch[j])
            receive = Action(stage[i], Kind[f"RECV_{letter}"], microbatch[i])
            cells = [(device[j], send), (device[i], receive)]
            events.append((end[j], 0, stage[j], int(send.kind), microbatch[j], cells))
        rows: list[list[Action]] = [[] for _ in self.rows]
        for *_, cells in sorted(events, key=itemgetter(0, 1, 2, 3, 4)):
            for d, action in cells:
                rows[d].append(action)
        return replace(self, rows=tuple(map(tuple, rows)))

    # ---- text: a grid for people, CSV for files, torch's CSV for torch

    def grid(self, mark: Iterable[int] = ()) -> str:
        """The table as text, one column per unit of time, `.` for idle; actions at the flat indices in `mark` stand in > <."""
        start, _, heads = self.unit_times()
        marked, lines = set(mark), []
        for d, row in enumerate(self.rows):
            cells: list[str] = []
            for i, a in enumerate(row, self.bounds[d]):
                cells += ["."] * (int(start[i] if i < heads[d] else 0) - len(cells))
                cells.append(f">{a}<" if i in marked else str(a))
            lines.append(cells)
        width = max((len(c) for cells in lines for c in cells), default=1)
        length = max(map(len, lines))
        return "\n".join(
            " ".join(c.ljust(width) for c in cells + ["."] * (length - len(cells))).rstrip()
            for cells in lines
        )

    def __str__(self) -> str:
        return f"{self._header()}\n{self.grid()}"

    def _header(self) -> str:
        return header_line(
            {
                "name": self.name,
                "devices": self.devices,
                "microbatches": self.microbatches,
                "batches": self.batches,
                "per_update": self.per_update,
                "reads": self.reads.name,
                "placement": " ".join(map(str, self.placement)),
            }
        )

    def to_csv(self) -> str:
        """One line that says how to read the table, then one line per device. `from_csv` is the exact inverse."""
        if self.versions_read is not None:
            raise ScheduleError(
                f"this part of {self.name} reads weights from before it: write the whole table"
            )
        return "\n".join([self._header(), *(",".join(map(str, row)) for row in self.rows)]) + "\n"

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> Schedule:
        """Read `to_csv`, or bare rows (an empty cell is idle; updates are added where there are none)."""
        return cls._read(text, name, lambda line: line.split(","))

    @classmethod
    def from_grid(cls, text: str, name: str = "grid") -> Schedule:
        """Read `str(schedule)`, or a bare grid: cells apart by spaces, `.` for idle."""
        return cls._read(text, name, str.split)

    @classmethod
    def _read(cls, text: str, name: str, split: Callable[[str], list[str]]) -> Schedule:
        return cls(**read_table(text, name, split))

    def to_torch_csv(self) -> str:
        """What torch.distributed.pipelining loads with format="compute_only": one batch of computes, no updates."""
        if self.asynchronous:
            raise ScheduleError(
                f"{self.name} updates without a flush; torch would train it as a flush: export a flush schedule"
            )
        if self.batches > 1:
            raise ScheduleError(
                f"torch's tables hold one batch, this one has {self.batches}: build it with batches=1"
            )
        keep = COMPUTE - {Kind.U}
        return (
            "\n".join(",".join(str(a) for a in row if a.kind in keep) for row in self.rows) + "\n"
        )

    from_torch_csv = from_csv
