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
from pipelab.memory import memory_used, shares
from pipelab.schedule import Schedule
from pipelab.simulate import durations, simulate

SLACK = 1e-6  # of a limit of memory, or of a makespan: less is rounding
PLACEMENTS = ("loop", "v")


def place(placement: str, devices: int, virtual: int = 1) -> tuple[int, ...]:
    """stage -> device: around the devices `virtual` times, or to the last one and back.

    >>> place("loop", 3), place("v", 3)
    ((0, 1, 2), (0, 1, 2, 2, 1, 0))
    """
    check_counts(devices=devices, virtual=virtual)
    if placement not in PLACEMENTS:
        raise ScheduleError(f"placement={placement!r}: use {' or '.join(map(repr, PLACEMENTS))}")
    if placement == "v":
        if virtual not in (1, 2):
            raise ScheduleError(f"virtual={virtual}: a v has two stages a device")
        return (*range(devices), *reversed(range(devices)))
    return (*range(devices),) * virtual


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
        if self.costs.recompute is not Recompute.NEVER:
            raise CostError("the search knows no recomputation: use Recompute.NEVER")

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
        """[kind, stage]: seconds of an action, up to U."""
        rows: list[list[Action]] = [[] for _ in range(self.devices)]
        for kind in (Kind.F, Kind.B, Kind.I, Kind.W, Kind.U):
            for s in range(self.stages):
                rows[self.placement[s]].append(Action(s, kind, 0))
        every = Schedule("costs", rows, self.placement, 1)
        return durations(every, self.costs)[every.position[: Kind.U + 1, :, 0]]

    @cached_property
    def seconds(self) -> np.ndarray:
        """[kind, stage]: what an action keeps its device busy for, its overhead included."""
        return self.compute + self.costs.overhead

    @cached_property
    def delay(self) -> np.ndarray:
        """[stage]: seconds from it to the next stage (and back); 0 on the same device."""
        home = np.array(self.placement)
        return np.where(home[1:] == home[:-1], 0.0, self.costs.links(self.stages))

    def makespan(self, schedule: Schedule) -> float:
        return simulate(schedule, self.costs).makespan

    # ---- memory

    @cached_property
    def change(self) -> np.ndarray:
        """[kind, stage]: memory that an action takes (F, as it starts) or gives back (at its end).

        In micro-batches' activations of its device; where the costs have no bytes of activations,
        stages of a device count alike, and hold as much from I to W.
        """
        whole, late = (
            shares(self.costs, self.placement, name)
            for name in ("activations", "weight_activations")
        )
        change = np.zeros((len(Kind), self.stages))
        change[Kind.F], change[Kind.B] = whole, -whole
        change[Kind.I], change[Kind.W] = late - whole, -late
        return change

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
