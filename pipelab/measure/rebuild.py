"""Spans of a pipeline's actions to a measured timeline: the table that ran, clocks, transfers."""

import math
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import suppress
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

from pipelab.predict.theory import THEORY
from pipelab.predict.timeline import Timeline
from pipelab.schedules import SCHEDULES, make, takes
from pipelab.table.action import LARGEST_NUMBER, Action, Kind, ScheduleError
from pipelab.table.schedule import Schedule
from pipelab.table.transform import repeat
from pipelab.table.validate import validate

SAME = 2e-6  # seconds: traces round to microseconds, so what comes next may seem to be so early


class Recorded(NamedTuple):
    """An action on a device, in seconds; its micro-batch counts through all batches."""

    device: int
    action: Action
    start: float
    end: float


def rebuilt_timeline(
    found: list[Recorded], batch: int | None, schedule: Schedule | str | None, shared: bool = True
) -> Timeline:
    """A measured timeline.

    batch   micro-batches of a batch; None: an update ends a batch
    shared  whether the devices share a clock
    """
    updates = 1 + max((s.action.microbatch for s in found if s.action.kind is Kind.U), default=0)
    total = 1 + max((s.action.microbatch for s in found if s.action.kind is not Kind.U), default=0)
    batch = batch or (total // updates if total % updates == 0 else total)
    sizes = batch, -(-total // batch), batch
    if isinstance(schedule, Schedule):
        if schedule.batches == 1 and not schedule.asynchronous:  # as torch's tables, of every step
            schedule = repeat(schedule, -(-total // schedule.microbatches))
        sizes = schedule.microbatches, schedule.batches, schedule.per_update
    rows, home = _rows(found, sizes[-1]), {s.action.stage: s.device for s in found}
    placement = tuple(home[stage] for stage in range(len(home)))
    table = Schedule("trace", [[s.action for s in row] for row in rows], placement, *sizes)
    table = validate(checked(table, schedule) if schedule else _same_named(table))
    flat = [s for row in rows for s in row]
    ahead = _ahead(table, flat, shared)
    zero = min(s.start - ahead[s.device] for s in flat)
    start = [s.start - ahead[s.device] - zero for s in flat]
    end = [s.end - ahead[s.device] - zero for s in flat]
    spans = table.spans(start, end, _transfers(table, start, end))
    return Timeline(table, spans, "measured")


def _rows(found: list[Recorded], per_update: int) -> list[list[Recorded]]:
    """One a device, in the order of the starts, with updates that take no time where there are
    none; ValueError if these cannot be the rows of a table."""
    check_stage_numbers({s.action.stage for s in found})
    rows: list[list[Recorded]] = [[] for _ in {s.device for s in found}]
    for s in found:
        check_span(s.action, s.start, s.end)
        if not 0 <= s.device < len(rows):
            raise ValueError(
                f"{s.action} is on device {s.device}, of {len(rows)} in all: number devices from 0 "
                "without gaps"
            )
        rows[s.device].append(s)
    for action, times in Counter(s.action for s in found).items():
        if times > 1:
            raise ValueError(f"{action} appears twice: give each action of a run one span")
    for row in rows:
        row += _updates(row, per_update)
        row.sort(key=lambda s: (s.start, s.end))
        for one, other in pairwise(row):
            if other.start < one.end - SAME:
                raise ValueError(
                    f"{other.action} starts {one.end - other.start:.3g} s before {one.action} "
                    f"ends, both on device {one.device}: give the device of each span, and one "
                    "stream of it"
                )
    return rows


def _updates(row: list[Recorded], per_update: int) -> list[Recorded]:
    """Updates of no time after the row's last backward of a group, where there is none."""
    seen = {s.action for s in row}
    last: dict[Action, Recorded] = {}
    for s in sorted(row, key=lambda s: s.end):
        if s.action.kind in (Kind.B, Kind.W):
            for stage in {action.stage for action in seen}:
                last[Action(stage, Kind.U, s.action.microbatch // per_update)] = s
    return [Recorded(s.device, u, s.end, s.end) for u, s in sorted(last.items()) if u not in seen]


def check_span(action: Action, start: float, end: float) -> None:
    """ValueError for a span that ends before it starts, or is outside of all time."""
    if not -LARGEST_NUMBER <= start <= end <= LARGEST_NUMBER:
        raise ValueError(
            f"{action} starts at {start:g} s and ends at {end:g} s: give an end after the start, "
            f"and times of at most {LARGEST_NUMBER:g} s"
        )


def check_stage_numbers(found: Collection[int], least: int = 0) -> None:
    """ValueError if a stage from 0 to the largest one, or below the known number, is missing."""
    stages = max(least, 1 + max(found))
    missing = next((s for s in range(stages) if s not in found), None)
    if missing is not None:
        raise ValueError(
            f"stage {missing} of {stages} has no span: give the files of all ranks, or number "
            "stages from 0 without gaps"
        )


# ---- which table ran


def asked_for(schedule: Schedule | str, table: Schedule) -> Schedule:
    """The schedule that the caller names or gives; a named one in the table's sizes."""
    if isinstance(schedule, Schedule):
        return schedule
    chunks = schedule in SCHEDULES and takes(schedule, "virtual")
    virtual = max(table.stages // table.devices, 1) if chunks else 1
    return make(schedule, table.devices, table.microbatches, virtual=virtual, batches=table.batches)


def checked(table: Schedule, schedule: Schedule | str) -> Schedule:
    """The table that the caller gives; ValueError if the one that ran differs."""
    asked = asked_for(schedule, table)
    if (table.devices, table.placement) != (asked.devices, asked.placement):
        raise ValueError(
            f"the run has {table.devices} devices with stages on {table.placement}, but "
            f"{asked.name} has {asked.devices}, with stages on {asked.placement}: give the table "
            "that ran"
        )
    for d, (row, other) in enumerate(zip(table.rows, asked.rows, strict=True)):
        for i, (a, b) in enumerate(zip_longest(row, other, fillvalue="nothing")):
            if a != b:
                raise ValueError(
                    f"action {i} of device {d} is {a} in the run, but {b} in {asked.name}: give "
                    "the table that ran, or leave the schedule out"
                )
    return asked


def _same_named(table: Schedule) -> Schedule:
    """The named schedule that has this table, else the table; what forwards read does not show.

    Of several (they are alike where micro-batches are few) the one that `THEORY` has first.
    """
    same = []
    for name in [*THEORY, *(name for name in SCHEDULES if name not in THEORY)]:
        # With one chunk a device it has a name of its own; and a search has no table of its own.
        if takes(name, "costs") or (takes(name, "virtual") and table.stages == table.devices):
            continue
        with suppress(ScheduleError):  # some have not all sizes
            made = asked_for(name, table)
            if (made.rows, made.placement) == (table.rows, table.placement):
                same.append(made)
    return min(same, key=lambda s: s.reads, default=table)


# ---- clocks and transfers


def _messages(table: Schedule) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Each transfer: the flat indices of who makes and who takes it, and their devices."""
    for taker in table.crossing:
        maker: Any = table.inputs[taker]
        yield maker, taker, (table.device_of[maker], table.device_of[taker])


def _quickest(
    table: Schedule, start: list[float], end: list[float]
) -> dict[tuple[int, int], float]:
    """From each device to each, the least seconds from an output's end to the start of its use."""
    quickest: dict[tuple[int, int], float] = {}
    for maker, taker, link in _messages(table):
        quickest[link] = min(quickest.get(link, math.inf), start[taker] - end[maker])
    return quickest


def _ahead(table: Schedule, flat: list[Recorded], shared: bool) -> list[float]:
    """Seconds by which each device's clock is ahead of device 0's, by the quickest messages."""
    quickest = _quickest(table, [s.start for s in flat], [s.end for s in flat])
    ahead = [0.0] * table.devices
    if shared and min(quickest.values(), default=0.0) >= -SAME:
        return ahead
    settled, left = [0], set(range(1, table.devices))
    for a in settled:
        for b in sorted(left):
            if (a, b) not in quickest and (b, a) not in quickest:
                continue
            most, least = quickest.get((a, b), math.inf), -quickest.get((b, a), math.inf)
            both = math.isfinite(most - least)  # else messages went one way alone
            ahead[b] = ahead[a] + ((most + least) / 2 if both else min(max(0.0, least), most))
            settled.append(b)
            left.remove(b)
    return ahead


def _transfers(
    table: Schedule, start: list[float], end: list[float]
) -> dict[int, tuple[float, float]]:
    """When inputs were sent and arrived, as far as spans tell: see `from_trace`."""
    quickest = _quickest(table, start, end)
    found = {}
    for maker, taker, link in _messages(table):
        sent, before = min(end[maker], start[taker]), table.before[taker]
        soonest = sent + max(quickest[link], 0.0)
        free = -math.inf if before is None else end[before]
        found[taker] = sent, start[taker] if soonest >= free else soonest
    return found
