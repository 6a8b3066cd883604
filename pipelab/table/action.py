"""The cells of a table: what an action is, and its text form."""

import re
import reprlib
from collections.abc import Iterable
from enum import IntEnum
from operator import index
from typing import NamedTuple, NoReturn


class Kind(IntEnum):
    """The kinds of actions, in torch.distributed.pipelining's letters."""

    F = 0  # forward
    B = 1  # full backward: input and weight gradient together
    I = 2  # input gradient alone  # noqa: E741
    W = 3  # weight gradient alone
    U = 4  # optimizer update; its number stands where the micro-batch would
    OFFLOAD = 5  # what a forward keeps, to the host's memory
    RELOAD = 6  # and back, for its backward
    SEND_F = 7  # a stage's output, to the next stage
    RECV_F = 8
    SEND_B = 9  # a stage's input gradient, to the stage before
    RECV_B = 10


WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.U: "update",
    Kind.OFFLOAD: "offload",
    Kind.RELOAD: "reload",
}
COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W, Kind.U})
HOST = frozenset({Kind.OFFLOAD, Kind.RELOAD})
_NUMBER = "(0|[1-9][0-9]{0,8})"  # below a billion
_TEXT = re.compile(f"{_NUMBER}({'|'.join(Kind.__members__)}){_NUMBER}")
# Two actions in one cell, ours and torch's; and what in torch's tables is no action of ours.
_OVERLAPPED = re.compile(r"\(([^();]*);([^();]*)\)OVERLAP_F_B|([^+]*)\+([^+]*)")
_WITHOUT_WORK = re.compile(r"\.?|\d+(UNSHARD|RESHARD|REDUCE_GRAD|WAIT_SEND_?[FB]?)\d*")


LARGEST = 10_000_000  # actions of a table: more take minutes
MOST_DEVICES = 10_000
MOST_STAGES = 100_000


class Reads(IntEnum):
    """Which weight version a forward reads (its backward reads the same one)."""

    LATEST = 0  # whatever its row has made before it: flush and weight stashing
    FIRST = 1  # what stage 0 read for this micro-batch: PipeDream's vertical sync
    PREVIOUS = 2  # max(batch - 1, 0): PipeDream-2BW

    @classmethod
    def _missing_(cls, value: object) -> NoReturn:
        names = ", ".join(f"Reads.{name}" for name in cls.__members__)
        raise ScheduleError(f"reads={value!r}: give one of {names}")


class ScheduleError(ValueError):
    """A table that is malformed or cannot run; the message says where and what to do."""


class Action(NamedTuple):
    """One cell of the table.

    >>> str(Action(2, Kind.F, 0)), Action.parse("1SEND_B3")
    ('2F0', Action(stage=1, kind=<Kind.SEND_B: 9>, microbatch=3))
    """

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.name}{self.microbatch}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """The exact inverse of `str`; ScheduleError for a cell that is not one action."""
        match = _TEXT.fullmatch(text)
        if not match:
            raise ScheduleError(
                f"{reprlib.repr(text)} is not an action: write <stage><kind><micro-batch>, such as "
                "2F0, 2B0, 2U0 or 0SEND_F1"
            )
        return cls(int(match[1]), Kind[match[2]], int(match[3]))


def parse_cell(text: str) -> list[Action]:
    """The actions of a cell in a file, ours or torch's.

    An overlapping forward and backward are two. A cell that only gathers or scatters weights for
    FSDP, or waits for a send, has none.

    >>> [str(action) for action in parse_cell("(0F7;7B3)OVERLAP_F_B")], parse_cell("0UNSHARD")
    (['0F7', '7B3'], [])
    >>> parse_cell("0F7+7B3") == parse_cell("(0F7;7B3)OVERLAP_F_B")
    True
    """
    if _WITHOUT_WORK.fullmatch(text):
        return []
    both = _OVERLAPPED.fullmatch(text)
    parts = both.groups() if both else (text,)
    return [Action.parse(part.strip()) for part in parts if part is not None]


def F(stage: int, microbatch: int) -> Action:
    return Action(stage, Kind.F, microbatch)


def B(stage: int, microbatch: int) -> Action:
    return Action(stage, Kind.B, microbatch)


def I(stage: int, microbatch: int) -> Action:  # noqa: E743
    return Action(stage, Kind.I, microbatch)


def W(stage: int, microbatch: int) -> Action:
    return Action(stage, Kind.W, microbatch)


def U(stage: int, number: int = 0) -> Action:
    return Action(stage, Kind.U, number)


def insert_updates(rows: Iterable[Iterable[Action]], per_update: int) -> list[list[Action]]:
    """Rows with `U t` of each of a row's stages after the row's last backward (B or W) of group t.

    If a stage begins its next group earlier, its update follows its own last backward of the group.
    """
    check_counts(per_update=per_update)
    return [_with_updates([*row], per_update) for row in rows]


def _with_updates(row: list[Action], per_update: int) -> list[Action]:
    # [1] Where each stage's first and last backward of a group stand, and the row's last one.
    first: dict[tuple[int, int], int] = {}
    own_last: dict[tuple[int, int], int] = {}
    row_last: dict[int, int] = {}
    for i, (stage, kind, microbatch) in enumerate(row):
        if kind in (Kind.B, Kind.W):
            group = microbatch // per_update
            first.setdefault((stage, group), i)
            own_last[stage, group] = row_last[group] = i
    # [2] The updates that follow each of these.
    after: dict[int, list[Action]] = {}
    for (stage, group), own in sorted(own_last.items()):
        last = row_last[group]
        next_begins = first.get((stage, group + 1), len(row))
        after.setdefault(own if next_begins < last else last, []).append(U(stage, group))
    return [cell for i, action in enumerate(row) for cell in (action, *after.get(i, ()))]


SMALLEST_NUMBER, LARGEST_NUMBER = 1e-100, 1e100
"""Of costs: products and quotients of three such numbers, and ten million of those, are finite."""


def check_counts(**values: int) -> list[int]:
    """The counts as Python ints; ScheduleError for one that is not a whole number >= 1."""
    for name, value in values.items():
        if not hasattr(value, "__index__") or value < 1:
            raise ScheduleError(f"{name}={value!r}: give a whole number of at least 1")
    return [*map(index, values.values())]
