"""The cells of a table: what an action is, and its text form."""

import re
from collections.abc import Iterable
from enum import IntEnum
from typing import NamedTuple


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
_NUMBER = "(0|[1-9][0-9]{0,8})"  # below a billion
_TEXT = re.compile(f"{_NUMBER}({'|'.join(Kind.__members__)}){_NUMBER}")


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
    def parse(cls, text: str) -> "Action":
        """The exact inverse of `str`: the whole cell, or a ScheduleError."""
        match = _TEXT.fullmatch(text)
        if not match:
            raise ScheduleError(
                f"{text!r} is not an action: write <stage><kind><micro-batch>, such as 2F0, 2B0, "
                "2U0 or 0SEND_F1"
            )
        return cls(int(match[1]), Kind[match[2]], int(match[3]))


def insert_updates(row: Iterable[Action], per_update: int) -> tuple[Action, ...]:
    """The row with `U t` of each of its stages after its last backward (B or W) of update group t.

    Where a stage begins its next group before that, its update stands after its own last backward
    of the group.
    """
    row = list(row)
    last: dict[int, int] = {}  # group -> where the row's last backward of it is
    last_of: dict[tuple[int, int], int] = {}  # the same of each stage
    first_of: dict[tuple[int, int], int] = {}
    for i, a in enumerate(row):
        if a.kind in (Kind.B, Kind.W):
            group = a.microbatch // per_update
            last[group] = last_of[a.stage, group] = i
            first_of.setdefault((a.stage, group), i)
    after: dict[int, list[Action]] = {}
    for (stage, group), own in sorted(last_of.items()):
        next_begins = first_of.get((stage, group + 1), len(row))
        place = own if next_begins < last[group] else last[group]
        after.setdefault(place, []).append(Action(stage, Kind.U, group))
    return tuple(b for i, a in enumerate(row) for b in (a, *after.get(i, ())))


def check_counts(**values: int) -> None:
    """Each a whole number of at least 1, or a ScheduleError that names it."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ScheduleError(f"{name}={value!r}: give a whole number of at least 1")
