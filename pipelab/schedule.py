"""A schedule is data: a table of actions, one row per device, read from left to right.

    device 0   0F0 0F1 .   .   0B0 0B1 0U0        0F1: stage 0, forward, micro-batch 1
    device 1   .   1F0 1F1 1B0 1B1 1U0 .

The same table is validated, simulated, drawn, exported and run. Needs numpy alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import accumulate, chain
from operator import itemgetter
from typing import NamedTuple

import numpy as np


class Kind(IntEnum):
    """What an action does, in torch.distributed.pipelining's letters."""

    F = 0  # forward
    B = 1  # full backward: input and weight gradient together
    I = 2  # input gradient alone  # noqa: E741
    W = 3  # weight gradient alone
    U = 4  # optimizer update; its number stands where the micro-batch would
    SEND_F = 5  # a stage's output, to the next stage
    RECV_F = 6
    SEND_B = 7  # a stage's input gradient, to the stage before
    RECV_B = 8


COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.U})
_TEXT = re.compile(r"(0|[1-9][0-9]*)(F|B|I|W|U|SEND_F|RECV_F|SEND_B|RECV_B)(0|[1-9][0-9]*)")


class Reads(IntEnum):
    """Which weight version a forward reads (its backward reads the same one)."""

    LATEST = 0  # whatever its row has made before it: flush and weight stashing
    FIRST = 1  # what stage 0 read for this micro-batch: PipeDream's vertical sync
    PREVIOUS = 2  # max(batch - 1, 0): PipeDream-2BW


class ScheduleError(ValueError):
    """A table that is malformed or cannot run; the message says where and what to do."""


class Action(NamedTuple):
    """One cell of the table.

    >>> str(Action(2, Kind.F, 0)), Action.parse("1SEND_B3")
    ('2F0', Action(stage=1, kind=<Kind.SEND_B: 7>, microbatch=3))
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.name}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """The exact inverse of `str`: the whole cell, or a ScheduleError."""
        match = _TEXT.fullmatch(text)
        if not match:
            raise ScheduleError(
                f"{text!r} is not an action: write <stage><kind><micro-batch>, such as 2F0, 2B0, 2U0 or 0SEND_F1"
            )
        return cls(int(match[1]), Kind[match[2]], int(match[3]))


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

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(tuple(row) for row in self.rows))
        object.__setattr__(self, "placement", tuple(self.placement))
        if not re.fullmatch(r"[^=\s]([^=\n\r]*[^=\s])?", self.name):
            raise ScheduleError(f"name={self.name!r}: give a name of one line, without '='")
        if not self.rows:
            raise ScheduleError("a schedule needs at least one device (row)")
        for field in ("microbatches", "batches"):
            check_count(field, getattr(self, field))
        if not self.per_update:
            object.__setattr__(self, "per_update", self.microbatches)
        check_count("per_update", self.per_update)
        if self.total % self.per_update:
            raise ScheduleError(f"per_update={self.per_update} does not divide the {self.total} micro-batches of the table")
        if not isinstance(self.reads, Reads):
            raise ScheduleError(f"reads={self.reads!r}: use Reads.LATEST, Reads.FIRST or Reads.PREVIOUS")
        if not self.placement or any(not isinstance(d, int) or not 0 <= d < self.devices for d in self.placement):
            raise ScheduleError(f"placement {self.placement}: give each stage a device from 0 to {self.devices - 1}")
        self._check_cells()

    def _check_cells(self) -> None:
        for d, row in enumerate(self.rows):
            for i, a in enumerate(row):
                if type(a) is not Action or type(a.kind) is not Kind:
                    raise ScheduleError(f"row {d}, cell {i}: {a!r} is not an Action(stage, Kind, microbatch)")
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
        fields = (np.fromiter(map(itemgetter(f), chain.from_iterable(self.rows)), np.int64, count) for f in range(3))
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
            for kind, receive in ((Kind.F, Kind.RECV_F), (Kind.B, Kind.RECV_B), (Kind.I, Kind.RECV_B)):
                source[kind] = np.where(at[receive] >= 0, at[receive], source[kind])
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
    def partners(self) -> np.ndarray:
        """For each SEND its RECV and the other way round, -1 for every other action."""
        kind = self.columns.kind
        receives, sends = np.isin(kind, (Kind.RECV_F, Kind.RECV_B)), np.isin(kind, (Kind.SEND_F, Kind.SEND_B))
        return np.where(receives, self.inputs, np.where(sends, self.takers, -1))

    @cached_property
    def versions(self) -> np.ndarray:
        """versions[stage, microbatch]: the weight version that its forward and backward read. `U t` makes version t + 1."""
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
        done = np.maximum.reduce([at[k] for k in (Kind.F, Kind.B, Kind.I, Kind.W)])  # last reader of each (stage, mb)
        for s in range(self.stages):
            last = np.full(self.updates + 1, -1)
            np.maximum.at(last, np.minimum(self.versions[s], self.updates), done[s])
            made = at[Kind.U, s, : self.updates]
            for v in range(self.updates + 1):
                replaced = made[v] if v < self.updates else self.bounds[self.placement[s] + 1] - 1
                born = int(made[v - 1]) if v else -1
                lives.append(VersionLife(s, v, born, max(int(last[v]), int(replaced))))
        return tuple(lives)

    @cached_property
    def peak_in_flight(self) -> list[int]:
        """Per device, the most micro-batches (chunk activations) held for a backward at one time, in row order."""
        kind = self.columns.kind
        step = (kind == Kind.F).astype(int) - ((kind == Kind.B) | (kind == Kind.W))
        pairs = zip(self.bounds, self.bounds[1:], strict=False)
        return [int(np.cumsum(step[a:b]).max(initial=0)) for a, b in pairs]

    @cached_property
    def weight_versions(self) -> list[int]:
        """Per device, the most weight versions of one stage that are kept at one time."""
        peaks = [0] * self.stages
        for s in range(self.stages):
            lives = [life for life in self.lives if life.stage == s]
            # A version made by U at index i is first held at i; one that dies there gave it its storage (in place).
            change = sorted(e for life in lives for e in ((life.born, 1), (max(life.last, life.born), -1)))
            peaks[s] = max(accumulate(c for _, c in change))
        return [max((peaks[s] for s in range(self.stages) if self.placement[s] == d), default=0) for d in range(self.devices)]

    # ---- transfers written out

    def with_transfers(self) -> Schedule:
        """The same table with every SEND and RECV between devices written into both rows.

        A SEND and its RECV stand at the same moment of a unit-time simulation (ties broken by stage, then kind), which
        makes the order safe for rendezvous: each pair is one point in a common order of all events.
        """
        if self.has_transfers:
            raise ScheduleError(f"{self.name} already has its transfers")
        device, stage, kind, microbatch = (c.tolist() for c in self.columns)
        count = len(device)
        start, end, heads = earliest(self.bounds, self.inputs.tolist(), [1] * count, [0] * count, device)
        if any(h < b for h, b in zip(heads, self.bounds[1:], strict=True)):
            raise ScheduleError(f"{self.name} cannot run as it stands, so its transfers have no order: see pipelab.validate")
        events = [(start[i], 1, stage[i], kind[i], microbatch[i], [(device[i], self.action(i))]) for i in range(count)]
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
        return Schedule(self.name, tuple(map(tuple, rows)), self.placement, self.microbatches, self.batches, self.per_update, self.reads)

    # ---- text: a grid for people, CSV for files, torch's CSV for torch

    def grid(self, mark: Iterable[int] = ()) -> str:
        """The table as text, one column per unit of time, `.` for idle; actions at the flat indices in `mark` stand in > <."""
        device = self.columns.device.tolist()
        count = len(device)
        start, _, heads = earliest(self.bounds, self.inputs.tolist(), [1] * count, [0] * count, device)
        marked, lines = set(mark), []
        for d, row in enumerate(self.rows):
            cells: list[str] = []
            for i, a in enumerate(row, self.bounds[d]):
                cells += ["."] * (int(start[i] if i < heads[d] else 0) - len(cells))
                cells.append(f">{a}<" if i in marked else str(a))
            lines.append(cells)
        width = max((len(c) for cells in lines for c in cells), default=1)
        length = max(map(len, lines))
        return "\n".join(" ".join(c.ljust(width) for c in cells + ["."] * (length - len(cells))).rstrip() for cells in lines)

    def __str__(self) -> str:
        return f"{self._header()}\n{self.grid()}"

    def _header(self) -> str:
        devices = " ".join(map(str, self.placement))
        return (
            f"# name={self.name} microbatches={self.microbatches} batches={self.batches} per_update={self.per_update} "
            f"reads={self.reads.name} placement={devices}"
        )

    def to_csv(self) -> str:
        """One line that says how to read the table, then one line per device. `from_csv` is the exact inverse."""
        return "\n".join([self._header(), *(",".join(map(str, row)) for row in self.rows)]) + "\n"

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> Schedule:
        """Read `to_csv`, or bare rows (one batch; an empty cell is idle; updates are added where there are none)."""
        return cls._read(text, name, lambda line: line.split(","))

    @classmethod
    def from_grid(cls, text: str, name: str = "grid") -> Schedule:
        """Read `str(schedule)`, or a bare grid: cells apart by spaces, `.` for idle."""
        return cls._read(text, name, str.split)

    @classmethod
    def _read(cls, text, name, split) -> Schedule:
        lines = text.splitlines()
        if lines and lines[0].startswith("#"):
            header = dict(re.findall(r"(\w+)=([^=]*)(?:\s|$)", lines.pop(0)[1:]))
        else:
            header, lines = {}, [line for line in lines if line.strip()]
        rows: list[list[Action]] = []
        for r, line in enumerate(lines):
            rows.append([])
            for c, cell in enumerate(cell.strip() for cell in split(line)):
                if cell not in ("", "."):
                    try:
                        rows[-1].append(Action.parse(cell))
                    except ScheduleError as error:
                        raise ScheduleError(f"row {r}, cell {c}: {error}") from None
        if not any(rows):
            raise ScheduleError("the table is empty: write one line of actions per device")
        numbers = {k: cls._number(header, k) for k in ("microbatches", "batches", "per_update")}
        compute = [a for row in rows for a in row if a.kind is not Kind.U]
        seen = 1 + max((a.microbatch for a in compute), default=0)
        if seen > len(compute):
            raise ScheduleError(f"micro-batch {seen - 1} in a table of {len(compute)} actions: number them from 0 without gaps")
        microbatches = numbers["microbatches"] or seen
        per_update = numbers["per_update"] or microbatches
        reads = header.get("reads", "LATEST").strip()
        if reads not in Reads.__members__:
            raise ScheduleError(f"header: reads={reads} is none of {', '.join(Reads.__members__)}")
        if not any(a.kind is Kind.U for row in rows for a in row):
            rows = [insert_updates(row, per_update) for row in rows]
        placement = [int(d) for d in header["placement"].split()] if "placement" in header else cls._placement(rows)
        return cls(
            header.get("name", name).strip(), tuple(map(tuple, rows)), tuple(placement), microbatches, numbers["batches"] or 1,
            per_update, Reads[reads],
        )  # fmt: skip

    @staticmethod
    def _number(header: dict[str, str], key: str) -> int:
        if not re.fullmatch(r"[0-9]*", value := header.get(key, "").strip()):
            raise ScheduleError(f"header: {key}={value} is not a whole number")
        return int(value or 0)

    @staticmethod
    def _placement(rows: Sequence[Sequence[Action]]) -> list[int]:
        home = {a.stage: d for d, row in enumerate(rows) for a in row}
        if max(home) >= len(home):
            missing = next(s for s in range(len(home)) if s not in home)
            raise ScheduleError(f"stage {missing} has no action, though stage {max(home)} has: number the stages from 0 without gaps")
        return [home[s] for s in sorted(home)]

    def to_torch_csv(self) -> str:
        """What torch.distributed.pipelining loads with format="compute_only": one batch of computes, no updates."""
        if self.asynchronous:
            raise ScheduleError(f"{self.name} updates without a flush; torch would train it as a flush: export a flush schedule")
        if self.batches > 1:
            raise ScheduleError(f"torch's tables hold one batch, this one has {self.batches}: build it with batches=1")
        keep = COMPUTE - {Kind.U}
        return "\n".join(",".join(str(a) for a in row if a.kind in keep) for row in self.rows) + "\n"

    from_torch_csv = from_csv


def insert_updates(row: Iterable[Action], per_update: int) -> list[Action]:
    """The row with `U t` after the last backward (B or W) of each update group of each of its stages."""
    row = list(row)
    last = {(a.stage, a.microbatch // per_update): i for i, a in enumerate(row) if a.kind in (Kind.B, Kind.W)}
    after: dict[int, Action] = {i: Action(stage, Kind.U, group) for (stage, group), i in last.items()}
    return [b for i, a in enumerate(row) for b in ((a, after[i]) if i in after else (a,))]


def check_count(name: str, value: int) -> None:
    """A whole number of at least 1, or a ScheduleError."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ScheduleError(f"{name}={value!r}: give a whole number of at least 1")


def earliest(
    bounds: Sequence[int], inputs: Sequence[int], duration: Sequence[float], delay: Sequence[float],
    device: Sequence[int], partners: Sequence[int] | None = None,
) -> tuple[list[float], list[float], list[int]]:  # fmt: skip
    """Start and end of every action when each starts as soon as its row and its input allow; linear in the table.

    All arguments are flat over the table: `inputs[i]` is the action whose output i takes (-1: none), which arrives
    `delay[i]` after that action ends. `partners[i]` (-1: none) is the other half of a rendezvous: both start together.
    Returns starts, ends and the head of each row: a head before the row's bound is an action that can never start.
    """
    count = len(inputs)
    start, end = [0.0] * count, [-1.0] * count
    waiter = [-1] * count  # the device that waits for an action, as every output has one taker
    head, clock = list(bounds[:-1]), [0.0] * (len(bounds) - 1)
    ready = list(range(len(head)))
    while ready:
        d = ready.pop()
        i, t, stop = head[d], clock[d], bounds[d + 1]
        while i < stop:
            j = inputs[i]
            begin = t
            if partners is not None and partners[i] >= 0:
                j = partners[i]
                other = device[j]
                if other == d or head[other] != j:
                    break  # its row looks here when it gets to j
                begin = max(t, clock[other])
                start[j], end[j] = begin, begin + duration[j]
                clock[other], head[other] = end[j], j + 1
                ready.append(other)
            elif j >= 0:
                begin = end[j]
                if begin < 0:
                    waiter[j] = d
                    break
                begin += delay[i]
                if begin < t:
                    begin = t
            start[i] = begin
            end[i] = t = begin + duration[i]
            if waiter[i] >= 0:
                ready.append(waiter[i])
            i += 1
        clock[d], head[d] = t, i
    return start, end, head
