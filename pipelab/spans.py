"""Spans of a pipeline's actions to a measured timeline: the table that ran, clocks, transfers."""

from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

import numpy as np

from pipelab.action import Action, Kind, ScheduleError
from pipelab.schedule import Schedule
from pipelab.schedules import SCHEDULES, make, takes
from pipelab.theory import THEORY
from pipelab.timeline import Timeline
from pipelab.validate import validate

SAME = 2e-6  # seconds: traces round to microseconds, so what comes next may seem to be so early


class Span(NamedTuple):
    """An action on a device, in seconds; its micro-batch counts through all batches."""

    device: int
    action: Action
    start: float
    end: float


def timeline_of(
    spans: list[Span], batch: int | None, schedule: Schedule | str | None, shared: bool = True
) -> Timeline:
    """A measured timeline.

    batch   micro-batches of a batch; None: an update ends a batch
    shared  whether the devices share a clock
    """
    made = [s.action.microbatch for s in spans if s.action.kind is Kind.U]
    total = 1 + max((s.action.microbatch for s in spans if s.action.kind is not Kind.U), default=0)
    if batch is None:
        updates = 1 + max(made, default=0)
        batch = total // updates if total % updates == 0 else total
    sizes: dict[str, Any] = {
        "microbatches": batch,
        "batches": -(-total // batch),
        "per_update": batch,
    }
    if isinstance(schedule, Schedule):
        sizes = {name: getattr(schedule, name) for name in sizes}
    rows = _rows(spans, sizes["per_update"])
    home = {s.action.stage: s.device for s in spans}
    placement = tuple(home[stage] for stage in range(len(home)))
    actions = [[s.action for s in row] for row in rows]
    table = Schedule("trace", actions, placement, **sizes)
    start, end = np.array([(s.start, s.end) for row in rows for s in row]).T
    nowhere = np.full(len(start), np.nan)
    found = Timeline(table, start, end, nowhere, nowhere, "measured")
    table = validate(checked(found, schedule).schedule if schedule else _same_named(table))
    later = _ahead(table, start, end, shared)[table.columns.device]
    zero = (start - later).min()
    return _with_transfers(
        replace(found, schedule=table, start=start - later - zero, end=end - later - zero)
    )


def _rows(spans: list[Span], per_update: int) -> list[list[Span]]:
    """One a device, in the order of the starts, with updates that take no time where there are
    none; ValueError for what cannot be the rows of a table."""
    check_stages({s.action.stage for s in spans})
    devices = {s.device for s in spans}
    if missing := set(range(len(devices))) - devices:
        raise ValueError(f"device {min(missing)} has no span: number devices from 0 without gaps")
    rows = []
    for d in range(len(devices)):
        row = [s for s in spans if s.device == d]
        seen: set[Action] = set()
        for s in row:
            check_times(s)
            if s.action in seen:
                raise ValueError(f"{s.action} is there twice: give each action of a run one span")
            seen.add(s.action)
        last: dict[Action, Span] = {}  # an update -> the row's last backward of its group
        for s in sorted(row, key=lambda s: s.end):
            if s.action.kind in (Kind.B, Kind.W):
                group = s.action.microbatch // per_update
                for stage in {a.stage for a in seen}:
                    last[Action(stage, Kind.U, group)] = s
        row += [Span(d, u, s.end, s.end) for u, s in sorted(last.items()) if u not in seen]
        row.sort(key=lambda s: (s.start, s.end))
        for one, other in pairwise(row):
            if other.start < one.end - SAME:
                raise ValueError(
                    f"{other.action} starts {one.end - other.start:.3g} s before {one.action} "
                    f"ends, both on device {d}: give the device of each span, and one stream of it"
                )
        rows.append(row)
    return rows


def check_times(span: Span) -> None:
    """ValueError if a span does not end, or not after its start."""
    _, action, start, end = span
    if end < start or not np.isfinite([start, end]).all():
        raise ValueError(
            f"{action} starts at {start:g} s and ends at {end:g} s: an end comes after its start"
        )


def check_stages(found: Collection[int], least: int = 0) -> None:
    """ValueError if a stage from 0 to the largest one, or of at least so many, is not there."""
    stages = max(least, 1 + max(found))
    missing = next((s for s in range(stages) if s not in found), None)
    if missing is not None:
        raise ValueError(
            f"stage {missing} of {stages} has no span: give the files of all ranks, or number "
            "stages from 0 without gaps"
        )


def asked_for(schedule: Schedule | str, table: Schedule) -> Schedule:
    """The schedule that the caller says it is, in the table's sizes if that is a name."""
    if isinstance(schedule, Schedule):
        return schedule
    chunks = takes(schedule, "virtual") if schedule in SCHEDULES else False
    virtual = max(table.stages // table.devices, 1) if chunks else 1
    return make(schedule, table.devices, table.microbatches, virtual=virtual, batches=table.batches)


def checked(found: Timeline, schedule: Schedule | str) -> Timeline:
    """The timeline with the table that the caller says it is of; ValueError where they differ."""
    table, asked = found.schedule, asked_for(schedule, found.schedule)
    if (table.devices, table.placement) != (asked.devices, asked.placement):
        raise ValueError(
            f"the run has {table.devices} devices, stages placed on {table.placement}, and "
            f"{asked.name} {asked.devices}, on {asked.placement}: give the table that ran"
        )
    for d, (row, other) in enumerate(zip(table.rows, asked.rows, strict=True)):
        for i, (a, b) in enumerate(zip_longest(row, other)):
            if a != b:
                raise ValueError(
                    f"action {i} of device {d} is {a or 'none'} in the run and {b or 'none'} in "
                    f"{asked.name}: give the table that ran, or none"
                )
    return replace(found, schedule=asked)


def _same_named(table: Schedule) -> Schedule:
    """The named schedule that has this table, else the table; what forwards read does not show.

    Of several (they are alike where micro-batches are few) the one that `THEORY` has first.
    """
    found = []
    for name in [*THEORY, *(name for name in SCHEDULES if name not in THEORY)]:
        if takes(name, "virtual") and table.stages == table.devices:
            continue  # it has a name of its own
        if takes(name, "costs"):
            continue  # its tables depend on what the run was made for
        with suppress(ScheduleError):  # some have not all sizes
            found.append(asked_for(name, table))
    same = [s for s in found if (s.rows, s.placement) == (table.rows, table.placement)]
    return min(same, key=lambda s: s.reads, default=table)


def _ahead(table: Schedule, start: np.ndarray, end: np.ndarray, shared: bool) -> np.ndarray:
    """Seconds by which each device's clock is ahead of device 0's, by the quickest messages."""
    takers = table.crossing
    makers = table.inputs[takers]
    quickest = np.full((table.devices, table.devices), np.inf)
    pairs = table.columns.device[makers], table.columns.device[takers]
    np.minimum.at(quickest, pairs, start[takers] - end[makers])
    ahead = np.zeros(table.devices)
    if shared and (quickest >= -SAME).all():
        return ahead
    settled, left = [0], set(range(1, table.devices))
    for a in settled:
        for b in sorted(left):
            most, least = quickest[a, b], -quickest[b, a]
            if np.isfinite([most, least]).all():
                ahead[b] = ahead[a] + (most + least) / 2
            elif np.isfinite(most) or np.isfinite(least):  # messages one way alone
                ahead[b] = ahead[a] + np.clip(0, least, most)
            else:
                continue
            settled.append(b)
            left.remove(b)
    return ahead


def _with_transfers(t: Timeline) -> Timeline:
    """When inputs were sent and arrived, as far as spans tell: see `from_trace`."""
    s = t.schedule
    takers = s.crossing
    makers, before = s.inputs[takers], s.before[takers]
    link = s.columns.device[makers] * s.devices + s.columns.device[takers]
    sent = np.minimum(t.end[makers], t.start[takers])
    quickest = np.full(s.devices**2, np.inf)
    np.minimum.at(quickest, link, t.start[takers] - sent)
    soonest = sent + quickest[link]
    free = np.where(before >= 0, t.end[before], -np.inf)
    arrived = np.where(soonest >= free, t.start[takers], soonest)
    columns = np.full((2, len(t.start)), np.nan)
    columns[:, takers] = sent, arrived
    return replace(t, sent=columns[0], arrived=columns[1])
