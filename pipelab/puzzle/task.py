"""What a table has to do: its sizes, its costs, and how much a device may hold."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pipelab.action import Action, Kind, Reads, ScheduleError, check_counts, insert_updates
from pipelab.costs import Costs
from pipelab.schedule import Schedule
from pipelab.simulate import durations, waits

PLAIN = Costs()  # unit times


@dataclass(frozen=True)
class Task:
    """The sizes of a table, and the rules that it is judged by.

    virtual   chunks a device, placed in a loop: stage s on device s mod p
    costs     of one device's whole share of the model: a chunk has 1/v of it (`Costs.split`)
    cap       per device, the most micro-batches (of chunks) held for a backward; one number is for
              every device; None: as many as you like
    split     whether backwards come in two parts, I and W, in place of B

    Updates are placed by hand where a stage has several; a single one follows the row's last
    backward by itself.
    """

    devices: int
    microbatches: int
    virtual: int = 1
    batches: int = 1
    per_update: int = 0
    reads: Reads = Reads.LATEST
    costs: Costs = PLAIN
    cap: tuple[int, ...] | int | None = None
    split: bool = False

    def __post_init__(self) -> None:
        check_counts(devices=self.devices, microbatches=self.microbatches)
        check_counts(virtual=self.virtual, batches=self.batches)
        if not self.per_update:
            object.__setattr__(self, "per_update", self.microbatches)
        check_counts(per_update=self.per_update)
        if self.total % self.per_update:
            raise ScheduleError(
                f"per_update={self.per_update} does not divide the {self.total} micro-batches"
            )
        if self.reads is Reads.FIRST:
            raise ScheduleError("reads=FIRST cannot be edited: use Reads.LATEST or Reads.PREVIOUS")
        if self.reads is Reads.PREVIOUS and self.per_update != self.microbatches:
            raise ScheduleError("reads=PREVIOUS counts batches: leave out per_update")
        if self.cap is not None:
            caps = self.cap if isinstance(self.cap, Iterable) else [self.cap] * self.devices
            caps = tuple(caps)
            if len(caps) != self.devices:
                raise ScheduleError(f"cap={self.cap}: give one number, or {self.devices}")
            check_counts(**{f"cap of device {d}": cap for d, cap in enumerate(caps)})
            if min(caps) < self.virtual:
                raise ScheduleError(
                    f"cap={self.cap}: a micro-batch needs room in all {self.virtual} chunks"
                )
            object.__setattr__(self, "cap", caps)

    # ---- sizes

    @property
    def stages(self) -> int:
        return self.devices * self.virtual

    @property
    def placement(self) -> tuple[int, ...]:
        return tuple(s % self.devices for s in range(self.stages))

    @property
    def total(self) -> int:
        """Micro-batches of all batches."""
        return self.microbatches * self.batches

    @property
    def by_hand(self) -> bool:
        """Whether updates are placed like any other action."""
        return self.total > self.per_update

    @property
    def gradient(self) -> Kind:
        """The kind that gives the stage before its gradient."""
        return Kind.I if self.split else Kind.B

    @property
    def releases(self) -> Kind:
        """The kind after which a micro-batch's activations are not needed any more."""
        return Kind.W if self.split else Kind.B

    @cached_property
    def stage_costs(self) -> Costs:
        return self.costs.split(self.virtual)

    @cached_property
    def seconds(self) -> dict[Action, float]:
        """What each action takes, its overhead included; of micro-batches and updates alike."""
        table, costs = self.schedule_of("task", self.actions), self.stage_costs
        seconds = (durations(table, costs) + waits(table, costs)).tolist()
        every = (table.action(i) for i in range(len(seconds)))
        return dict(zip(every, seconds, strict=True))

    # ---- the actions of a table

    @cached_property
    def actions(self) -> tuple[tuple[Action, ...], ...]:
        """Per device what has to be placed, in an order in which all of it can run.

        One update group after the other: its forwards, its backwards, its update.
        """
        kinds = [Kind.F, Kind.I, Kind.W] if self.split else [Kind.F, Kind.B]
        rows: list[list[Action]] = [[] for _ in range(self.devices)]
        for group in range(self.total // self.per_update):
            first = group * self.per_update
            for kind in kinds:
                for k in range(first, first + self.per_update):
                    order = range(self.stages) if kind is Kind.F else reversed(range(self.stages))
                    for s in order:
                        rows[s % self.devices].append(Action(s, kind, k))
            if self.by_hand:
                for s in range(self.stages):
                    rows[s % self.devices].append(Action(s, Kind.U, group))
        return tuple(map(tuple, rows))

    @cached_property
    def needs(self) -> dict[Action, list[Action]]:
        """For each action those that have to come before it in any table."""
        return {action: self._needs(action) for row in self.actions for action in row}

    def _needs(self, action: Action) -> list[Action]:
        s, kind, k = action
        if kind is Kind.U:
            members = range(k * self.per_update, (k + 1) * self.per_update)
            return [Action(s, self.releases, member) for member in members]
        found = []
        if kind is Kind.F:
            # What the stage before makes; with Reads.PREVIOUS also the version that it reads.
            if s > 0:
                found.append(Action(s - 1, Kind.F, k))
            version = max(k // self.microbatches - 1, 0) if self.reads is Reads.PREVIOUS else 0
            if version:
                found.append(Action(s, Kind.U, version - 1))
            return found
        if kind is self.gradient:
            found.append(Action(s, Kind.F, k))
            if s + 1 < self.stages:
                found.append(Action(s + 1, kind, k))
        else:
            found.append(Action(s, self.gradient, k))
        group = k // self.per_update
        if kind is self.releases and group:
            found.append(Action(s, Kind.U, group - 1))  # the next group adds to new sums
        return found

    def resized(self, **sizes: Any) -> "Task":
        """The same with other sizes; costs that are given per stage stay only if they still fit."""
        per_update = 0 if self.per_update == self.microbatches else self.per_update
        same = all(
            sizes.get(name, getattr(self, name)) == getattr(self, name)
            for name in ("devices", "virtual")
        )
        per_stage = any(isinstance(value, tuple) for value in vars(self.costs).values())
        costs = self.costs if same or not per_stage else PLAIN
        return replace(self, **{"costs": costs, "cap": None, "per_update": per_update} | sizes)

    def device(self, action: Action) -> int:
        return action.stage % self.devices

    def way(self, source: Action, taker: Action) -> float:
        """Seconds from the end of one action until what another needs of it is there."""
        if self.device(source) == self.device(taker):
            return 0.0
        return self.links[min(source.stage, taker.stage)]

    @cached_property
    def links(self) -> list[float]:
        """Seconds between stage s and the next one."""
        return self.stage_costs.links(self.stages).tolist()

    def check(self, action: Action) -> None:
        """ScheduleError for an action that this task does not have, with the reason."""
        s, kind, k = action
        if s >= self.stages:
            raise ScheduleError(f"{action}: stage {s} is not among stages 0 to {self.stages - 1}")
        kinds = {Kind.F, self.gradient, self.releases} | ({Kind.U} if self.by_hand else set())
        if kind not in kinds:
            why = (
                "the update follows the last backward by itself"
                if kind is Kind.U
                else (f"this table is made of {', '.join(sorted(k.name for k in kinds))}")
            )
            raise ScheduleError(f"{action}: {why}")
        limit = self.total // self.per_update if kind is Kind.U else self.total
        if k >= limit:
            what = "update" if kind is Kind.U else "micro-batch"
            raise ScheduleError(f"{action}: {what} {k} is not among 0 to {limit - 1}")

    def schedule_of(self, name: str, rows: Iterable) -> Schedule:
        """A table of these rows, with the updates that follow by themselves."""
        cells: Sequence = [*rows] if self.by_hand else insert_updates(rows, self.per_update)
        sizes = self.microbatches, self.batches, self.per_update
        return Schedule(name, cells, self.placement, *sizes, self.reads)
