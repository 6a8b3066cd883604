"""The cells of a table: what an action is, and its text form."""

import re
from collections.abc import Iterable
from enum import IntEnum
from numbers import Real
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


def numbers(row: Iterable[Action] | np.ndarray) -> np.ndarray:
    """A row as numbers, [action, (stage, kind, micro-batch)]."""
    return row if isinstance(row, np.ndarray) else np.array([*row], np.int64).reshape(-1, 3)


def one_kind(stage: np.ndarray | int, kind: Kind, microbatches: np.ndarray) -> np.ndarray:
    """Actions of one kind as `numbers`; stages and micro-batches are broadcast.

    >>> one_kind(2, Kind.B, np.arange(2)).tolist()
    [[2, 1, 0], [2, 1, 1]]
    """
    cells = np.empty((*np.broadcast(stage, microbatches).shape, 3), np.int64)
    cells[..., 0], cells[..., 1], cells[..., 2] = stage, kind, microbatches
    return cells.reshape(-1, 3)


def every_batch(one: np.ndarray, batches: int, microbatches: int) -> np.ndarray:
    """The row of one batch (`numbers`) for each batch, its micro-batches counted on."""
    ahead = np.arange(batches)[:, None, None] * (0, 0, microbatches)
    return (one + ahead).reshape(-1, 3)


def insert_updates(
    rows: Iterable[Iterable[Action] | np.ndarray], per_update: int
) -> list[np.ndarray]:
    """Rows with `U t` of each of a row's stages after the row's last backward (B or W) of group t.

    Where a stage begins its next group before that, its update stands after its own last backward
    of the group. Takes rows of actions or `numbers`, returns `numbers`.
    """
    check_counts(per_update=per_update)
    arrays = [*map(numbers, rows)]
    cells, lengths = np.concatenate(arrays), np.array([len(row) for row in arrays])
    device = np.repeat(np.arange(len(arrays)), lengths)
    # [1] every backward, ordered by device, stage and group: where it stands
    place = np.flatnonzero((cells[:, 1] == Kind.B) | (cells[:, 1] == Kind.W))
    keys = np.stack([device[place], cells[place, 0], cells[place, 2] // per_update])
    order = np.lexsort(keys[::-1])
    keys, place = keys[:, order], place[order]
    # [2] of every device, stage and group the first one and the last one
    begins = (np.diff(keys, prepend=-1) != 0).any(axis=0)
    first, own_last = place[begins], place[np.roll(begins, -1)]
    device, stage, group = keys = keys[:, begins]
    # [3] the row's last one of the group; where its stage's next group begins
    in_row = np.unique(device * (1 + group.max(initial=0)) + group, return_inverse=True)[1]
    row_last = np.zeros(len(first), np.int64)
    np.maximum.at(row_last, in_row, own_last)
    follows = np.flatnonzero((np.diff(keys) == [[0], [0], [1]]).all(axis=0))
    next_begins = np.full(len(first), len(cells))
    next_begins[follows] = first[follows + 1]
    # [4] there the updates stand
    after = np.where(next_begins < row_last[in_row], own_last, row_last[in_row])
    cells = np.insert(cells, after + 1, one_kind(stage, Kind.U, group), axis=0)
    lengths += np.bincount(device, minlength=len(arrays))
    return np.split(cells, np.cumsum(lengths)[:-1])


def check_counts(**values: int) -> None:
    """Each a whole number of at least 1, or a ScheduleError that names it."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ScheduleError(f"{name}={value!r}: give a whole number of at least 1")


def check_memory(value: float | None) -> None:
    """A number of micro-batches, or None for as many as usual; or a ScheduleError."""
    if value is not None and (not isinstance(value, Real) or isinstance(value, bool)):
        raise ScheduleError(f"memory={value!r}: give a number of micro-batches, or None")
