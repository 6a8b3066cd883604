"""Tasks: a table's sizes, the rules that it is judged by, and what it takes."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from graphlib import TopologicalSorter
from itertools import accumulate
from typing import Any

from pipelab.predict.costs import CostError, Costs
from pipelab.predict.simulate import delays, durations, waits
from pipelab.schedules import looped_bfs
from pipelab.table.action import (
    Action,
    Kind,
    Reads,
    ScheduleError,
    U,
    check_counts,
    insert_updates,
)
from pipelab.table.schedule import Schedule
from pipelab.table.validate import check_type, needed_in_row

Rows = tuple[tuple[Action, ...], ...]
PLAIN = Costs()  # unit times
LARGEST = 400  # actions: beyond, a move is not answered at once
BACK = (Kind.B, Kind.I, Kind.W)


@dataclass(frozen=True)
class Task:
    """The sizes of a table, and the rules that it is judged by.

    virtual   chunks a device, placed in a loop: stage s on device s mod p
    costs     of one device's whole share of the model: a chunk has 1/v of it (`Costs.split`)
    cap       per device, the most micro-batches (of chunks) held for a backward; one number is for
              every device; None: as many as you like
    split     whether backwards come in two parts, I and W, in place of B
    slices    of each sequence, equally long: `microbatches`, numbers and caps count these then

    Updates are placed by hand where a stage has several; a single one follows the row's last
    backward by itself.
    """

    devices: int
    microbatches: int
    virtual: int = 1
    batches: int = 1
    per_update: int = 0
    reads: Reads = Reads.LATEST
    costs: Costs = field(default=PLAIN, hash=False)
    cap: tuple[int, ...] | int | None = None
    split: bool = False
    slices: int = 1

    def __post_init__(self) -> None:
        per_update = self.per_update or self.microbatches
        check_counts(
            **{
                size: getattr(self, size)
                for size in ("devices", "microbatches", "virtual", "batches", "slices")
            },
            per_update=per_update,
        )
        check_type(Reads, reads=self.reads)
        check_type(Costs, costs=self.costs)
        object.__setattr__(self, "per_update", per_update)
        if self.size > LARGEST:  # before a table of that size is made
            raise ScheduleError(
                f"{self.size} actions: the editor takes {LARGEST}, so make a size smaller"
            )
        once_a_batch = self.reads is Reads.PREVIOUS and self.per_update == self.microbatches
        if self.reads is not Reads.LATEST and not once_a_batch:
            raise ScheduleError(
                f"reads={self.reads.name} cannot be edited: use Reads.LATEST, or Reads.PREVIOUS "
                "with an update a batch"
            )
        if self.cap is not None:
            caps = self.cap if isinstance(self.cap, Iterable) else [self.cap] * self.devices
            caps = [most for cap in caps for most in check_counts(cap=cap)]
            object.__setattr__(self, "cap", tuple(caps))
            least = self.virtual * self.slices
            if len(self.caps) != self.devices or min(self.caps) < least:
                raise ScheduleError(
                    f"cap={self.cap}: give one number or {self.devices}, each {least} or more: a "
                    f"micro-batch needs room in all {self.virtual} chunks"
                )
        _ = self.seconds  # raises for other sizes that make no table, and for costs that do not fit

    def resized(self, **sizes: Any) -> "Task":
        """The same with other sizes, without a cap; with plain costs where its own do not fit."""
        per_update = 0 if self.per_update == self.microbatches else self.per_update
        changes: dict[str, Any] = {"cap": None, "per_update": per_update, "slices": 1} | sizes
        try:
            return replace(self, **changes)
        except CostError:
            return replace(self, **({"costs": PLAIN} | changes))

    # ---- what has to be placed

    @property
    def size(self) -> int:
        """How many actions have to be placed."""
        total = self.microbatches * self.batches
        updates = total // self.per_update
        each = total * (3 if self.split else 2) + (updates if updates > 1 else 0)
        return self.devices * self.virtual * each

    @cached_property
    def table(self) -> Schedule:
        """A table of this task, whatever its cap: of each update's micro-batches all forwards, all
        backwards, the updates."""
        total = self.microbatches * self.batches
        group = min(self.per_update, total)
        whole = looped_bfs(self.devices, group, self.virtual, total // group)
        parts = {Kind.B: (Kind.I, Kind.W)} if self.split else {}
        rows = [
            [a._replace(kind=kind) for a in row for kind in parts.get(a.kind, (a.kind,))]
            for row in whole.rows
        ]
        slices: tuple[float, ...] = ()
        if (n := self.slices) > 1:  # those of a sequence come back last first
            slices = (1.0,) * n
            rows = [
                [
                    a._replace(microbatch=k + n - 1 - 2 * (k % n)) if a.kind in BACK else a
                    for a in row
                    for k in [a.microbatch]
                ]
                for row in rows
            ]
        sizes = self.microbatches, self.batches, self.per_update
        return Schedule("a table", rows, whole.placement, *sizes, self.reads, slices=slices)

    @property
    def by_hand(self) -> bool:
        """Whether updates are placed like any other action."""
        return self.table.updates > 1

    @cached_property
    def needs(self) -> dict[Action, list[Action]]:
        """The actions that come before each in any table, in an order in which all can run."""
        table, found = self.table, {}
        for action, source, needed in zip(
            table.actions, table.inputs, needed_in_row(table), strict=True
        ):
            found[action] = [Action(*cell) for cell in needed if cell in table.position]
            found[action] += [table.actions[source]] if source is not None else []
            stage, kind, k = action
            if kind is Kind.F and self.reads is Reads.PREVIOUS and table.versions[stage, k]:
                found[action].append(U(stage, table.versions[stage, k] - 1))
        order = TopologicalSorter(found).static_order()
        return {a: found[a] for a in order if self.by_hand or a.kind is not Kind.U}

    @property
    def simple(self) -> bool:
        """Whether each device has one stage, whole sequences and one update: then micro-batches are
        alike, and within the cap every table can become whole."""
        return self.virtual == self.slices == 1 and not self.by_hand

    def rows_of(self, table: Schedule) -> Rows:
        """The actions to be placed of a table: updates that follow by themselves are left out."""
        return tuple(tuple(a for a in row if a in self.needs) for row in table.rows)

    @cached_property
    def actions(self) -> Rows:
        """The actions to be placed on every device."""
        return self.rows_of(self.table)

    @property
    def releases(self) -> Kind:
        """The kind after which a micro-batch's activations are not needed any more."""
        return Kind.W if self.split else Kind.B

    @property
    def caps(self) -> tuple[int, ...]:
        """The cap of every device; none where there is no cap."""
        return self.cap or ()  # type: ignore[return-value]

    def device(self, action: Action) -> int:
        return action.stage % self.devices

    def in_flight(self, row: Iterable[Action]) -> list[int]:
        """After each action of a row, how many micro-batches the device holds for a backward."""
        steps = {Kind.F: 1, self.releases: -1}
        return [*accumulate(steps.get(a.kind, 0) for a in row)]

    def schedule_of(self, name: str, rows: Iterable[Iterable[Action]]) -> Schedule:
        """A table of these rows, with the updates that follow by themselves."""
        cells: Any = rows if self.by_hand else insert_updates(rows, self.per_update)
        return replace(self.table, name=name, rows=cells)

    # ---- what it takes

    @cached_property
    def stage_costs(self) -> Costs:
        return self.costs.split(self.virtual)

    @cached_property
    def times(self) -> dict[Action, tuple[float, float, float]]:
        """Seconds of each action, how long its input is on its way, what it loses at its start."""
        parts = (make(self.table, self.stage_costs) for make in (durations, delays, waits))
        return dict(zip(self.table.actions, zip(*parts, strict=True), strict=True))

    @cached_property
    def seconds(self) -> dict[Action, float]:
        """The seconds of each action, its loss included."""
        return {a: duration + wait for a, (duration, _, wait) in self.times.items()}

    def way(self, source: Action, taker: Action) -> float:
        """Seconds from the end of one action until what another needs of it is there."""
        return self.times[taker][1] if source.stage != taker.stage else 0.0
