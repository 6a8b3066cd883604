"""A training without an end: a table that repeats, executed batch by batch.

order of batch 0 | 1               | 2               | ...         pipedream, p = 2, m = 2
0F0 0F1 0B0 0U0  | 0F2 0B1 0U1 0F3 0B2 0U2 | 0F4 0B3 0U3 ...       an order ends before the
1F0 1B0 1U0 1F1 1B1 1U1 | 1F2 1B2 1U2 ...                          next batch's first action
"""

from dataclasses import replace
from functools import cache, cached_property
from math import ceil

from pipelab.runtime.work import Work
from pipelab.schedules import SCHEDULES, make
from pipelab.table.action import Action, Kind
from pipelab.table.schedule import Schedule
from pipelab.table.transform import Offset, repeat


class Endless:
    """The rows and versions of a training of any number of batches.

    table   enough batches of it that the two orders before the last one are the same, one batch
            apart; all later ones repeat them
    steady  the batch of the second of them
    ahead   how many batches further on an order, or a batch's loss, may depend on
    """

    def __init__(self, schedule: Schedule) -> None:
        """ValueError for a table that does not repeat, or has too few batches to show it."""
        m, size = schedule.microbatches, schedule.per_update
        if m % size:
            raise ValueError(
                f"{schedule.name} updates every {size} micro-batches, which does not divide a "
                f"batch of {m}: make one with microbatches={size}"
            )
        self.table = _longer(schedule)
        self.steady = self.table.batches - 2
        self.updates = m // size  # of a batch
        # What batches repeat is found once.
        self._orders, self._later = cache(self._find_orders), cache(self._find_later)
        if self.steady < 1 or not self._goes_on():
            raise ValueError(
                f"the {self.table.batches} batches of {schedule.name} do not show how it repeats: "
                "make it with more (batches=), the last ones alike"
            )

    def orders(self, batch: int, begun: int, *, rest: bool = False) -> list[list[Action]]:
        """What each row does from its first action of a batch to that of the next.

        begun  the first batch since the pipeline was empty: older ones are done
        rest   instead, what is left to do after that if no batch follows
        """
        at = min(batch, self.steady)
        more = batch - at  # as many batches later
        kept = self._orders(at, max(begun - more, 0), rest)
        return [Offset.of(self.table, more).moved(row) for row in kept]

    def _find_orders(self, at: int, begun: int, rest: bool) -> list[list[Action]]:
        """The same of a batch of the table."""
        orders = []
        for row, cuts in zip(self.table.rows, self.cuts, strict=True):
            cells = row[cuts[at + 1] :] if rest else row[cuts[at] : cuts[at + 1]]
            orders.append([action for action in cells if begun <= self._batch(action) <= at])
        return orders

    def work(self, batch: int, begun: int | None = None, pieces: int = 0) -> Work:
        """A batch alone in the pipeline; or, `begun` as for `orders`, between others.

        pieces  as in `Work`
        """
        rows = None if begun is None else self.orders(batch, begun)
        return replace(self._at(batch), later=self.later(batch), pieces=pieces, given_rows=rows)

    def _at(self, batch: int) -> Work:
        at = min(batch, self.steady)
        return Work(self.table, at, at + 1, batch - at)

    def later(self, batch: int) -> list[set[int]]:
        """Per stage, the versions that batches after this one read, as far as they may be there."""
        at = min(batch, self.steady)
        updates = (batch - at) * self.updates
        return [{version + updates for version in read} for read in self._later(at)]

    def _find_later(self, at: int) -> list[set[int]]:
        """The same of a batch of the table."""
        m = self.table.microbatches
        works = [(b, self._at(b)) for b in range(at + 1, at + 2 + self.staleness)]
        return [
            {work.version(s, k) for b, work in works for k in range(b * m, (b + 1) * m)}
            for s in range(self.table.stages)
        ]

    # ---- of the table

    @cached_property
    def cuts(self) -> list[list[int]]:
        """Per row, the positions of each batch's first action, and the row's end."""
        cuts = []
        for row in self.table.rows:
            first: dict[int, int] = {}
            for i, action in enumerate(row):
                first.setdefault(self._batch(action), i)
            cuts.append([first.get(b, len(row)) for b in range(self.table.batches + 1)])
        return cuts

    @cached_property
    def staleness(self) -> int:
        """How many batches further on a version may still be read, at most."""
        m = self.table.microbatches
        return 1 + max(
            ceil(k // m - version / self.updates) for (_, k), version in self.table.versions.items()
        )

    @cached_property
    def ahead(self) -> int:
        table = self.table
        order_of: dict[Action, int] = {}
        for row, cuts in zip(table.rows, self.cuts, strict=True):
            for batch in range(table.batches):
                order_of |= dict.fromkeys(row[cuts[batch] : cuts[batch + 1]], batch)
        sources = zip(table.actions, table.inputs, strict=True)
        waits = [order_of[table.actions[i]] - order_of[a] for a, i in sources if i is not None]
        last = [order_of[a] - self._batch(a) for a in order_of if a.kind is Kind.F]
        return max(0, *waits, *last)

    def _goes_on(self) -> bool:
        b, m, read = self.steady, self.table.microbatches, self.table.read_at
        pairs = zip(self.orders(b, 0), self.orders(b - 1, 0), strict=True)
        return (
            all(cuts == sorted(cuts) for cuts in self.cuts)
            and all(new == Offset.of(self.table, 1).moved(old) for new, old in pairs)
            and all(
                read(s, k) + self.updates == read(s, k + m)
                for s in range(self.table.stages)
                for k in range((b - 1) * m, b * m)
            )
        )

    def _batch(self, action: Action) -> int:
        per_batch = self.updates if action.kind is Kind.U else self.table.microbatches
        return action.microbatch // per_batch


def _longer(schedule: Schedule) -> Schedule:
    """The same with more batches, where it is known how it goes on."""
    name, p, m = schedule.name, schedule.devices, schedule.microbatches
    if name in SCHEDULES and schedule.stages == p:
        # One batch of a table without a flush looks as if it had one.
        made = make(name, p, m, batches=schedule.batches, reads=schedule.reads)
        if made.rows == schedule.rows:
            return make(name, p, m, batches=4 + -(-p // m), reads=schedule.reads)
    if not schedule.asynchronous:
        one = schedule.part(0, 1)
        if repeat(one, schedule.batches).rows == schedule.rows:
            return repeat(one, 3)
    return schedule
