"""Tables made of a table: fewer or more batches, forwards alone, transfers written out or not."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple, TypeVar

from pipelab.table.action import HOST, Action, Kind, Reads, ScheduleError
from pipelab.table.versions import VersionedTable

AnyTable = TypeVar("AnyTable", bound=VersionedTable)


class Offset(NamedTuple):
    """How far a table's numbers move if batches come before it."""

    microbatches: int
    updates: int

    @classmethod
    def of(cls, table: VersionedTable, batches: int) -> "Offset":
        """This many batches of the table, which end with their updates."""
        microbatches = batches * table.microbatches
        return cls(microbatches, microbatches // table.per_update)

    def moved(self, actions: Iterable[Action]) -> list[Action]:
        return [
            Action(s, kind, number + (self.updates if kind is Kind.U else self.microbatches))
            for s, kind, number in actions
        ]


def part(table: AnyTable, first: int, last: int) -> AnyTable:
    """Batches `first` to `last` - 1 as a table of their own, numbered from 0.

    A run between two checkpoints executes such a part. Weight versions count from its start; a
    negative one is older. Dependencies stay inside a micro-batch, so a valid table stays valid
    without whole batches. Raises ScheduleError if an update needs batches from both sides of a cut.
    """
    if not 0 <= first < last <= table.batches:
        raise ScheduleError(
            f"batches {first} to {last} of {table.name}, which has {table.batches}: choose a range "
            "within them"
        )
    begin, end = first * table.microbatches, last * table.microbatches
    if begin % table.per_update or end % table.per_update:
        raise ScheduleError(
            f"{table.name} updates every {table.per_update} micro-batches: cut it where an update "
            "ends"
        )
    kept, sizes, back = range(begin, end), (1, table.per_update), Offset.of(table, -first)
    rows = [
        back.moved(a for a in row if a.microbatch * sizes[a.kind == Kind.U] in kept)
        for row in table.rows
    ]
    overlapped = frozenset(back.moved(_still_overlapped(table, kept)))
    batches = last - first
    cut = replace(table, rows=rows, batches=batches, overlapped=overlapped, versions_read=None)
    read = {
        (stage, k + back.microbatches): version + back.updates
        for (stage, k), version in table.versions.items()
        if k in kept
    }
    return cut if cut.versions == read else replace(cut, versions_read=read)


def fewer(table: AnyTable, microbatches: int) -> AnyTable:
    """A table of one batch and one update, cut to its first micro-batches.

    As in `part`, a valid table stays valid.
    """
    rows = [
        [action for action in row if action.kind is Kind.U or action.microbatch < microbatches]
        for row in table.rows
    ]
    overlapped = frozenset(_still_overlapped(table, range(microbatches)))
    return replace(
        table,
        rows=rows,
        microbatches=microbatches,
        per_update=microbatches,
        overlapped=overlapped,
    )


def _still_overlapped(table: VersionedTable, kept: range) -> list[Action]:
    """Those that overlap with a forward where only these micro-batches are left."""
    pairs = [table.actions[i - 1 : i + 1] for i in table.joined]
    return [b for a, b in pairs if a.microbatch in kept and b.microbatch in kept]


def repeat(table: AnyTable, batches: int) -> AnyTable:
    """A one-batch table with a flush, repeated in the same order for each of the batches."""
    if batches == 1:
        return table
    offsets = [Offset.of(table, batch) for batch in range(batches)]
    rows = [[a for offset in offsets for a in offset.moved(row)] for row in table.rows]
    overlapped = frozenset(a for offset in offsets for a in offset.moved(table.overlapped))
    return replace(table, rows=rows, batches=batches, overlapped=overlapped)


def overlap(table: AnyTable) -> AnyTable:
    """The same table, with every forward overlapping the backward B right behind it.

    A forward's own backward cannot overlap with it. A pair waits for both inputs, so not every such
    table can run: see `validate`. A copy to or from the host stays beside an action without a
    partner.
    """
    pairs = [pair for row in table.rows for pair in pairwise(row)]
    found = frozenset(
        b for f, b in pairs if (f.kind, b.kind) == (Kind.F, Kind.B) and f != b._replace(kind=Kind.F)
    )
    copies = (b for a, b in pairs if b in table.overlapped and b.kind in HOST and a not in found)
    return replace(table, overlapped=found.union(copies))


def offload(table: AnyTable, stages: Collection[int] | None = None) -> AnyTable:
    """The same table, but activations wait for their backwards in the host's memory.

    They move out during the next action and return during the last one before their backward; at
    most one copy overlaps with an action. If the row waits for a gradient anyway, the reload runs
    alone. Activations that would be away for less than an action stay. (PipeOffload, arXiv
    2503.01328, section 4.)

    stages  whose activations are offloaded (default: all)
    """
    start, end, _ = table.unit_times()
    rows, overlapped = [], set(table.overlapped)
    for row, first in zip(table.rows, table.bounds, strict=False):
        waits = {i for i in range(1, len(row)) if start[first + i] > end[first + i - 1]}
        ends = {
            i
            for i, a in enumerate(row)
            if (stages is None or a.stage in stages)
            and a._replace(kind=Kind.OFFLOAD) not in table.position
        }
        alone, beside = _copies(row, overlapped, ends, waits)
        rows.append(
            [
                cell
                for i, action in enumerate(row)
                for cell in (*alone.get(i, ()), action, *beside.get(i, ()))
            ]
        )
        overlapped.update(*beside.values())
    return replace(table, rows=rows, overlapped=frozenset(overlapped))


Copies = dict[int, tuple[Action]]  # by the place in a row


def _copies(
    row: Sequence[Action], overlapped: set[Action], ends: set[int], waits: set[int]
) -> tuple[Copies, Copies]:
    """The reloads that stand alone before an action, and the copies beside one.

    ends   where an action may end what is offloaded, if it is a backward
    waits  where the row waits before an action
    """
    at = {action: i for i, action in enumerate(row)}
    free = {
        i
        for i, action in enumerate(row)
        if action.kind < Kind.U and overlapped.isdisjoint(row[i : i + 2])
    }
    back: dict[Action, int] = {}
    # [1] The way back, as late as it can be; where it waits, before the backward itself.
    for i in sorted(ends, reverse=True):
        forward = row[i]._replace(kind=Kind.F)
        if row[i].kind in (Kind.B, Kind.I):
            places = (j for j in range(i - 1, at[forward], -1) if j in free)
            place = i if i in waits else next(places, None)
            if place is not None:
                back[forward] = place
                free -= {place} - {i}
    # [2] The way there, as early as it can be; who has none stays.
    alone: Copies = {}
    beside: Copies = {}
    for forward in sorted(back, key=at.__getitem__):
        place = back[forward]
        there = next((j for j in range(at[forward] + 1, place - 1) if j in free), None)
        if there is not None:
            free.remove(there)
            beside[there] = (forward._replace(kind=Kind.OFFLOAD),)
            own = row[place]._replace(kind=Kind.F) == forward
            (alone if own else beside)[place] = (forward._replace(kind=Kind.RELOAD),)
    return alone, beside


def forward_only(table: AnyTable) -> AnyTable:
    """The table's forwards alone, as evaluation runs them."""
    kept = (Kind.F, Kind.SEND_F, Kind.RECV_F)
    rows = [[action for action in row if action.kind in kept] for row in table.rows]
    nothing = frozenset[Action]()
    return replace(table, rows=rows, reads=Reads.LATEST, overlapped=nothing, versions_read=None)


def with_transfers(table: AnyTable) -> AnyTable:
    """The same table with every SEND and RECV between devices written into both rows.

    They follow the order of a unit-time simulation (ties broken by stage, then kind). That is safe
    for rendezvous: each SEND and its RECV are one point in a common order of all events.
    """
    if table.has_transfers:
        raise ScheduleError(f"{table.name} already has its transfers")
    start, end, heads = table.unit_times()
    if heads != table.bounds[1:]:
        raise ScheduleError(
            f"{table.name} cannot run, so its transfers have no order: see pipelab.validate"
        )
    # Events in a common order: (time, transfers first, stage, kind, micro-batch), device, action.
    device = table.device_of
    events = []
    for i, action in enumerate(table.actions):
        first = table.actions[i - 1] if i in table.joined else action  # overlapped: side by side
        events.append(((start[i], 1, *first, i in table.joined), device[i], action))
    for i in table.crossing:
        source = table.inputs[i]
        assert source is not None
        taker, maker = table.actions[i], table.actions[source]
        send, receive = Kind.SEND_B, Kind.RECV_B
        if taker.kind is Kind.F:
            send, receive = Kind.SEND_F, Kind.RECV_F
        event = (end[source], 0, maker.stage, send, maker.microbatch, False)
        events.append((event, device[source], maker._replace(kind=send)))
        events.append((event, device[i], taker._replace(kind=receive)))
    rows: list[list[Action]] = [[] for _ in table.rows]
    for _, d, action in sorted(events):
        rows[d].append(action)
    return replace(table, rows=rows)


def without_transfers(table: AnyTable) -> AnyTable:
    """The same table without SEND and RECV: they follow from the placement."""
    return replace(table, rows=[[a for a in row if a.kind < Kind.SEND_F] for row in table.rows])
