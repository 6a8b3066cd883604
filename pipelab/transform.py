"""Tables made of a table: fewer or more batches, forwards alone, transfers written out."""

from dataclasses import replace
from typing import TypeVar

import numpy as np

from pipelab.action import Action, Kind, Reads, ScheduleError, every_batch, insert_updates
from pipelab.table import Table
from pipelab.versions import read_versions

AnyTable = TypeVar("AnyTable", bound=Table)


def part(table: AnyTable, first: int, last: int) -> AnyTable:
    """Batches `first` to `last` - 1 as a table of their own, numbered from 0.

    That is what a run does between two checkpoints. Weight versions count from the part's start;
    one below 0 was made before it. Dependencies stay inside a micro-batch, so that a valid table
    without whole batches stays valid. Raises ScheduleError where an update needs batches of both.
    """
    if not 0 <= first < last <= table.batches:
        raise ScheduleError(
            f"batches {first} to {last} of {table.name}, which has {table.batches}: give a part of "
            "them"
        )
    begin, end = first * table.microbatches, last * table.microbatches
    if begin % table.per_update or end % table.per_update:
        raise ScheduleError(
            f"{table.name} updates every {table.per_update} micro-batches: cut it where an update "
            "ends"
        )
    rows = []
    for row in table.numbers:
        _, kind, number = row.T
        group = np.where(kind == Kind.U, table.per_update, 1)  # micro-batches of a number
        a, b = begin // group, end // group
        counted_anew = row - np.outer(a, (0, 0, 1))
        rows.append(counted_anew[(a <= number) & (number < b)])
    cut = replace(table, rows=rows, batches=last - first, versions_read=None)
    read = read_versions(table)[:, begin:end] - begin // table.per_update
    if (read_versions(cut) == read).all():
        return cut
    return replace(cut, versions_read=tuple(map(tuple, read.tolist())))


def repeat(table: AnyTable, batches: int) -> AnyTable:
    """A table of one batch with a flush: the same order for each of so many batches."""
    m = table.microbatches
    rows = [every_batch(row[row[:, 1] != Kind.U], batches, m) for row in table.numbers]
    return replace(table, rows=insert_updates(rows, m), batches=batches)


def forward_only(table: AnyTable) -> AnyTable:
    """The table with nothing but its forwards: what evaluation runs."""
    kept = (Kind.F, Kind.SEND_F, Kind.RECV_F)
    rows = [row[np.isin(row[:, 1], kept)] for row in table.numbers]
    return replace(table, rows=rows, reads=Reads.LATEST, versions_read=None)


def with_transfers(table: AnyTable) -> AnyTable:
    """The same table with every SEND and RECV between devices written into both rows.

    A SEND and its RECV stand at the same moment of a unit-time simulation (ties broken by stage,
    then kind), which makes the order safe for rendezvous: each pair is one point in a common order
    of all events.
    """
    if table.has_transfers:
        raise ScheduleError(f"{table.name} already has its transfers")
    start, end, heads = table.unit_times()
    if heads != table.bounds[1:]:
        raise ScheduleError(
            f"{table.name} cannot run as it stands, so its transfers have no order: see "
            "pipelab.validate"
        )
    # Events in a common order: (time, transfers first, stage, kind, micro-batch), device, action.
    device = table.columns.device.tolist()
    events = []
    for i, d in enumerate(device):
        action = table.action(i)
        events.append(((start[i], 1, *action), d, action))
    for i in table.crossing.tolist():
        source = int(table.inputs[i])
        taker, maker = table.action(i), table.action(source)
        send, receive = Kind.SEND_B, Kind.RECV_B
        if taker.kind is Kind.F:
            send, receive = Kind.SEND_F, Kind.RECV_F
        event = (end[source], 0, maker.stage, send, maker.microbatch)
        events.append((event, device[source], maker._replace(kind=send)))
        events.append((event, device[i], taker._replace(kind=receive)))
    rows: list[list[Action]] = [[] for _ in table.rows]
    for _, d, action in sorted(events):
        rows[d].append(action)
    return replace(table, rows=rows)
