"""The result of a search: a schedule, and how good it is."""

import math
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from pipelab.table.schedule import Schedule

ROUNDING = 1e-6  # as a share of the bound: times are rounded to units far below that


@dataclass(frozen=True)
class Proof:
    """How good a schedule is among all with its placement and memory.

    makespan  its own, in seconds
    bound     seconds that none can beat
    memory    the limit: micro-batches whose activations fit on a device
    split     whether backwards may be split
    seconds   that the search took
    found_by  what made the schedule: greedy, exact, repeat, or a schedule's name
    """

    makespan: float
    bound: float
    memory: float
    split: bool
    seconds: float
    found_by: str

    @property
    def gap(self) -> float:
        """How far the makespan is above the bound, as a share of the bound."""
        return self.makespan / self.bound - 1 if self.bound > 0 else 0.0

    @property
    def status(self) -> Literal["optimal", "gap"]:
        """ "optimal" if the gap is at most a millionth, which rounding may leave."""
        return "optimal" if self.gap <= ROUNDING else "gap"

    def to_json(self) -> dict[str, Any]:
        names = ("status", "makespan", "bound", "gap", "memory", "split", "seconds", "found_by")
        found = {name: getattr(self, name) for name in names}
        return found | {"memory": self.memory if self.memory < math.inf else None}

    def __str__(self) -> str:
        limit = f"within memory for {self.memory:g} micro-batches"
        if self.memory == math.inf:
            limit = "with any memory"
        if self.status == "optimal":
            verdict = f"optimal: no schedule {limit} is faster than {self.makespan:.6g}"
        else:
            verdict = (
                f"{self.makespan:.6g}, at most {self.gap:.2%} above the best {limit}: none is "
                f"faster than {self.bound:.6g}"
            )
        return f"{verdict} (found in {self.seconds:.1f} s, by {self.found_by})"


@dataclass(frozen=True)
class Found(Schedule):
    """The result of a search: a schedule with its `proof` (of one batch).

    Its parts, its forwards and its table with transfers are plain schedules, without a proof.
    """

    proof: Proof = field(kw_only=True)

    @property
    def plain(self) -> Schedule:
        """The same table without its proof."""
        return Schedule(**{each.name: getattr(self, each.name) for each in fields(Schedule)})

    def part(self, first: int, last: int) -> Schedule:  # type: ignore[override]
        return self.plain.part(first, last)

    def forward_only(self) -> Schedule:  # type: ignore[override]
        return self.plain.forward_only()

    def with_transfers(self) -> Schedule:  # type: ignore[override]
        return self.plain.with_transfers()
