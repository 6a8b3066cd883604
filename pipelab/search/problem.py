"""What is searched: the seconds and the memory of every action, and which tables are allowed.

Micro-batches of a batch are alike. So every stage may take them in their order, in each kind of
action: number a table's actions anew, the j-th one of a stage and kind with j. What was there for j
forwards to start is there for the first j ones, so the new table is as fast, and it holds as much.
A row is therefore told by the kinds and stages alone, and the search loses nothing by that order.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipelab.action import Action, Kind, ScheduleError, check_counts, insert_updates
from pipelab.costs import CostError, Costs, Recompute
from pipelab.memory import changes, memory_used
from pipelab.placement import loop_placement, v_placement
from pipelab.schedule import Schedule
from pipelab.simulate import compute_seconds, simulate, transfer_seconds

SLACK = 1e-6  # of a limit of memory, or of a makespan: less is rounding
LARGEST = 200_000  # actions: a heuristic takes seconds for so many
PLACEMENTS = ("loop", "v")


def place(placement: str, devices: int, virtual: int = 1) -> tuple[int, ...]:
    """The placement of that name, "loop" or "v"; ScheduleError for another one.

    >>> place("loop", 3), place("v", 3)
    ((0, 1, 2), (0, 1, 2, 2, 1, 0))
    """
    check_counts(devices=devices, virtual=virtual)
    if placement not in PLACEMENTS:
        raise ScheduleError(f"placement={placement!r}: use {' or '.join(map(repr, PLACEMENTS))}")
    if placement == "v":
        if virtual not in (1, 2):
            raise ScheduleError(f"virtual={virtual}: a v has two stages a device")
        return v_placement(devices)
    return loop_placement(devices, virtual)


@dataclass(frozen=True)
class Problem:
    """One batch, its stages' costs, and what a device can hold.

    memory  micro-batches whose activations (of all of a device's stages) fit on a device
    split   whether backwards may be split into I and W; otherwise they are whole
    """

    costs: Costs
    placement: tuple[int, ...]
    microbatches: int
    memory: float
    split: bool

    def __post_init__(self) -> None:
        check_counts(microbatches=self.microbatches)
        if (count := self.stages * len(self.kinds) * self.microbatches) > LARGEST:
            raise ScheduleError(
                f"microbatches={self.microbatches} in {self.stages} stages: {count:,} actions. The "
                f"search takes {LARGEST:,}: give fewer micro-batches, whose steady state repeats"
            )
        if self.costs.recompute is not Recompute.NEVER:
            raise CostError(
                f"recompute={self.costs.recompute}: the search knows no recomputation. Use "
                "Recompute.NEVER, and where forwards run every time again (ALWAYS) add their "
                "seconds to input_grad; activations are then those of the boundary"
            )

    @property
    def devices(self) -> int:
        return max(self.placement) + 1

    @property
    def stages(self) -> int:
        return len(self.placement)

    @cached_property
    def stages_of(self) -> list[list[int]]:
        """Of each device, its stages."""
        home = np.array(self.placement)
        return [np.flatnonzero(home == d).tolist() for d in range(self.devices)]

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return (Kind.F, Kind.I, Kind.W) if self.split else (Kind.F, Kind.B)

    def with_microbatches(self, microbatches: int) -> "Problem":
        return replace(self, microbatches=microbatches)

    # ---- seconds

    @cached_property
    def compute(self) -> np.ndarray:
        """[kind, stage]: seconds of an action."""
        return compute_seconds(self.costs, self.placement)

    @cached_property
    def seconds(self) -> np.ndarray:
        """[kind, stage]: what an action keeps its device busy for, its overhead included."""
        return self.compute + self.costs.overhead

    @cached_property
    def delay(self) -> np.ndarray:
        """[stage]: seconds from it to the next stage (and back); 0 on the same device."""
        return transfer_seconds(self.costs, self.placement)

    def makespan(self, schedule: Schedule) -> float:
        return simulate(schedule, self.costs).makespan

    # ---- memory

    @cached_property
    def change(self) -> np.ndarray:
        """[kind, stage]: memory that an action takes or gives back, in micro-batches."""
        return changes(self.costs, self.placement)

    @cached_property
    def least_memory(self) -> float:
        """What a micro-batch needs on a device where its backwards are split."""
        most = np.maximum(self.change[Kind.F], -self.change[Kind.W])
        return float(np.bincount(self.placement, most).max())

    @property
    def whole_may_pay(self) -> bool:
        """Whether a whole backward may be better than a split one: it has one overhead less, and
        holds less where W needs more than I did."""
        return self.split and bool(self.costs.overhead or (self.change[Kind.I] > 0).any())

    def variants(self) -> Iterator["Problem"]:
        """The problem for tables of split backwards alone, and for those of whole ones."""
        if not self.split or self.least_memory <= self.memory * (1 + SLACK):
            yield self
        if self.whole_may_pay:
            yield replace(self, split=False)

    def fits(self, schedule: Schedule) -> bool:
        return max(memory_used(schedule, self.costs)) <= self.memory * (1 + SLACK)

    # ---- tables

    def table(self, name: str, rows: Iterable[Sequence[tuple[int, Kind]]]) -> Schedule:
        """The schedule whose rows have these stages and kinds; micro-batches in their order."""
        numbered: list[list[Action]] = []
        for row in rows:
            done: dict[tuple[int, Kind], int] = {}
            numbered.append([])
            for cell in row:
                k = done[cell] = done.get(cell, -1) + 1
                numbered[-1].append(Action(*cell, k))
        updated = insert_updates(numbered, self.microbatches)
        return Schedule(name, updated, self.placement, self.microbatches)
