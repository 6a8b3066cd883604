"""The search problem: the seconds and the memory of every action, and which tables are allowed.

Micro-batches of a batch are alike, so every stage may take them in order, in each kind of action:
renumber the j-th action of a stage and kind as j. Inputs that let any j forwards start also let the
first j start, so the new table is as fast and holds as much. So kinds and stages alone define a
row, and the search loses nothing.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real

from pipelab.predict.costs import Costs, Recompute
from pipelab.predict.memory import Changes, changes, memory_used
from pipelab.predict.simulate import compute_seconds, simulate, transfer_seconds
from pipelab.table.action import (
    Action,
    Kind,
    ScheduleError,
    check_counts,
    insert_updates,
)
from pipelab.table.placement import check_placement, loop_placement, stages_of, v_placement
from pipelab.table.schedule import Schedule
from pipelab.table.validate import check_type

SLACK = 1e-6  # of a limit of memory: less is rounding
PLACEMENTS = ("loop", "v")


def as_placement(placement: str | Sequence[int], devices: int, virtual: int = 1) -> tuple[int, ...]:
    """The placement named "loop" or "v", or the given one (stage -> device), after checking it.

    >>> as_placement("loop", 3), as_placement("v", 3)
    ((0, 1, 2), (0, 1, 2, 2, 1, 0))
    """
    devices, virtual = check_counts(devices=devices, virtual=virtual)
    if not isinstance(placement, str):
        return check_placement(placement, devices, each=True)
    if placement not in PLACEMENTS:
        raise ScheduleError(f"placement={placement!r}: use {' or '.join(map(repr, PLACEMENTS))}")
    if placement == "loop":
        return loop_placement(devices, virtual)
    if virtual > 2:
        raise ScheduleError(f"virtual={virtual}: a v has two stages per device; omit virtual")
    return v_placement(devices)


@dataclass(frozen=True)
class OrderProblem:
    """One batch, its stages' costs, and what a device can hold.

    memory  micro-batches whose activations (of all of a device's stages) fit on a device
    split   whether backwards may be split into I and W; otherwise they are whole
    """

    costs: Costs
    placement: tuple[int, ...]
    microbatches: int
    memory: float
    split: bool = True

    def __post_init__(self) -> None:
        check_type(Costs, costs=self.costs)
        check_type(Real, memory=self.memory)
        object.__setattr__(self, "memory", float(self.memory))  # Python's own: a proof becomes JSON

    @cached_property
    def stages_of(self) -> list[list[int]]:
        return stages_of(self.placement)

    @property
    def devices(self) -> int:
        return len(self.stages_of)

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def kinds(self) -> tuple[Kind, ...]:
        return (Kind.F, Kind.I, Kind.W) if self.split else (Kind.F, Kind.B)

    @property
    def actions(self) -> int:
        """The number of a table's actions, without updates."""
        return self.stages * len(self.kinds) * self.microbatches

    # ---- seconds

    @cached_property
    def compute(self) -> dict[Kind, list[float]]:
        """Kind -> per stage, the seconds of an action."""
        recomputed = self.costs.recompute is not Recompute.NEVER
        return compute_seconds(self.costs, self.placement, recomputed)

    @cached_property
    def seconds(self) -> dict[Kind, list[float]]:
        """The same with the overhead: how long an action keeps its device busy."""
        overhead = self.costs.overhead
        return {kind: [x + overhead for x in each] for kind, each in self.compute.items()}

    @cached_property
    def delay(self) -> list[float]:
        """Seconds from each stage to the next one (and back); 0 on the same device."""
        return transfer_seconds(self.costs, self.placement)

    def makespan(self, schedule: Schedule) -> float:
        return simulate(schedule, self.costs).makespan

    # ---- memory

    @cached_property
    def change(self) -> Changes:
        """Kind -> per stage, memory in micro-batches that an action takes, or frees if negative."""
        return changes(self.costs, self.placement)

    @cached_property
    def least_memory(self) -> float:
        """The most memory that one micro-batch needs on a device with split backwards."""
        # between I and W it may hold more than its activations
        needs = [max(f, -w) for f, w in zip(self.change[Kind.F], self.change[Kind.W], strict=True)]
        return max(sum(needs[s] for s in stages) for stages in self.stages_of)

    @property
    def whole_may_pay(self) -> bool:
        """Whether a whole backward may be better than a split one: it saves one overhead, and holds
        less if W needs more than I did."""
        return self.split and bool(self.costs.overhead or max(self.change[Kind.I]) > 0)

    def variants(self) -> Iterator["OrderProblem"]:
        """The problem for tables with only split backwards, and with only whole ones."""
        if not self.split or self.least_memory <= self.memory * (1 + SLACK):
            yield self
        if self.whole_may_pay:
            yield replace(self, split=False)

    def fits(self, schedule: Schedule) -> bool:
        return max(memory_used(schedule, self.costs)) <= self.memory * (1 + SLACK)

    # ---- tables

    def table(self, name: str, rows: Iterable[Sequence[tuple[int, Kind]]]) -> Schedule:
        """The schedule whose rows have these stages and kinds; micro-batches in their order."""
        # The j-th action of a stage and kind is that of micro-batch j: see the module.
        numbered: list[list[Action]] = []
        for row in rows:
            done: dict[tuple[int, Kind], int] = {}
            numbered.append([])
            for cell in row:
                k = done[cell] = done.get(cell, -1) + 1
                numbered[-1].append(Action(*cell, k))
        updated = insert_updates(numbered, self.microbatches)
        return Schedule(name, updated, self.placement, self.microbatches)
