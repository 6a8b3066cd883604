"""The data of the editor's picture: rows of cells with their texts, and the level, par, numbers and
run shown beside them."""

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from pipelab.editor.puzzle import (
    Advice,
    Draft,
    Level,
    Refused,
    Task,
    coach,
    could_run,
    least_makespan,
    why_idle,
)
from pipelab.editor.puzzle.link import task_of
from pipelab.editor.puzzle.recognise import gap_reasons
from pipelab.predict.timeline import Timeline
from pipelab.show import palette
from pipelab.table.action import Action, Kind

if TYPE_CHECKING:
    from pipelab.editor.try_out import TryOut

RUNGS = {
    "free": "anything goes",
    "legal": "legal moves only",
    "ready": "show what is ready",
    "coach": "a coach",
}
ADVICE = 6_400  # the coach's search after every move: at most its steps times the table's actions


def board(draft: Draft, rung: str, critical: bool) -> list[dict[str, Any]]:
    """A row for every device: its cells, what it holds over time, and what is left to place.

    A cell holds what it is (action, gap, stuck or end), when it begins and ends, its index in the
    row, its text and colours, and a sentence about it.
    """
    task, stages = draft.task, range(draft.task.table.stages)
    states = dict.fromkeys(draft.ready(), "ready") if tells(rung) else {}
    marks = states | (_marks(draft) if rung == "coach" and not draft.whole else {})
    path = _critical_path(draft) if critical else set()
    return [
        {
            "device": device,
            "name": f"device {device}",
            "stages": f"stages {', '.join(map(str, stages[device :: task.devices]))}",
            "cells": _cells(draft, device, path, tells(rung), states),
            "held": _held(draft, device),
            "cap": task.cap and task.caps[device],
            "left": [look(task, a) | {"state": marks.get(a, "")} for a in draft.left(device)],
        }
        for device in range(task.devices)
    ]


def tells(rung: str) -> bool:
    """Whether this help shows what can be placed."""
    return rung in ("ready", "coach")


def advice(draft: Draft) -> Advice:
    """The coach's advice, quick enough to follow every move. Refused where it has none."""
    return coach(draft, ADVICE // draft.size)


def _marks(draft: Draft) -> dict[Action, str]:
    """The coach's move ("best") and its ties ("tie"); nothing where it has no advice."""
    try:
        found = advice(draft)
    except Refused:
        return {}
    return {found.move: "best"} | dict.fromkeys(found.ties, "tie")


def board_legend(task: Task) -> list[list[str]]:
    """Names and colours of the kinds that a task's table has."""
    return palette.legend(sorted({a.kind for a in task.needs}))


# ---- cells


def _cells(
    draft: Draft, device: int, path: set[Action], tell: bool, ready: Iterable[Action]
) -> list[dict[str, Any]]:
    task, running = draft.task, _flowing(draft)
    over = _over(draft, device)
    cells, now = [], 0.0
    for i, action in enumerate(draft.rows[device]):
        if i < len(running.rows[device]):
            start, end = running.spans[action]
            if start > now + 1e-9:
                cells.append(_gap(running, device, i, tell))
            about = f"{_name(action)} on device {device}, from {start:g} to {end:g}."
            if action in path:
                about += " It is on the critical path: if it took longer, so would the table."
            if action in over:
                about += f" It is over the cap: {draft.over_cap}."
            marks = {"critical": action in path, "over": action in over}
            cell = framed(task, "action", action, start, end) | marks
        else:
            end = now + task.seconds[action]
            cell, about = framed(task, "stuck", action, now, end), _why_stuck(draft, action)
        cells.append(cell | {"index": i, "about": about})
        now = end
    left = draft.left(device)
    about = f"device {device} has done all its work at {now:g}."
    if left:
        about = f"device {device} is free from {now:g} on, with {len(left)} actions to place."
        mine = ", ".join(str(a) for a in left if a in ready)
        about += f" Ready: {mine}." if mine else ""
    last = {"what": "end", "from": now, "until": now, "index": len(draft.rows[device])}
    return [*cells, last | {"about": about}]


def framed(task: Task, what: str, action: Action, start: float, end: float) -> dict[str, Any]:
    """The cell of an action."""
    return look(task, action) | {"what": what, "from": start, "until": end}


def _gap(draft: Draft, device: int, index: int, tell: bool) -> dict[str, Any]:
    begin, until = gap_reasons(draft, device, index)
    about = f"device {device} is idle from {begin:g} to {until:g}: {why_idle(draft, device, index)}"
    if tell:
        about = f"{about} {could_run(draft, device, index)}".rstrip()
    return {"what": "gap", "from": begin, "until": until, "index": index, "about": about}


def _why_stuck(draft: Draft, action: Action) -> str:
    missing = [a for a in draft.task.needs[action] if a not in draft.placed]
    if missing:
        device = draft.task.device(missing[0])
        if not draft.rows[device]:
            return f"{action} waits for device {device}, whose row is not written yet."
        return f"{action} waits for {missing[0]} on device {device}, which is not placed yet."
    return f"{action} cannot run: {draft.problem or 'an action before it cannot'}."


def _flowing(draft: Draft) -> Draft:
    """The part of every row that runs, whatever the cap: a table over its cap has times, too."""
    return Draft(_uncapped(draft.task), draft.rows).running if draft.over_cap else draft.running


_uncapped = lru_cache(lambda task: replace(task, cap=None))


def _over(draft: Draft, device: int) -> set[Action]:
    """The forwards at which the device exceeds its cap."""
    row, cap = draft.rows[device], draft.task.cap
    counts = zip(row, draft.task.in_flight(row), strict=True)
    return {a for a, n in counts if cap and a.kind is Kind.F and n > draft.task.caps[device]}


def waiting(draft: Draft) -> str:
    """What the first action that cannot run waits for; "" where all can."""
    stuck = (
        row[len(runs)]
        for row, runs in zip(draft.rows, _flowing(draft).rows, strict=True)
        if len(row) > len(runs)
    )
    return next((_why_stuck(draft, action) for action in stuck), "")


def _critical_path(draft: Draft) -> set[Action]:
    if not draft.whole or draft.problem:
        return set()
    return {draft.completed.actions[i] for i in draft.timeline.critical_path()}


def _held(draft: Draft, device: int) -> list[list[float]]:
    """(time, how many micro-batches the device holds from then on)."""
    running = _flowing(draft)
    row = running.rows[device]
    held = [[0.0, 0.0]]
    for action, count in zip(row, draft.task.in_flight(row), strict=True):
        start, end = running.spans[action]
        if count != held[-1][1]:
            held.append([start if count > held[-1][1] else end, count])
    return held


def _name(action: Action) -> str:
    s, kind, k = action
    if kind is Kind.U:
        return f"{action}, update {k} of stage {s},"
    return f"{action}, the {palette.NAMES[kind]} of micro-batch {k} through stage {s},"


def look(task: Task, action: Action) -> dict[str, Any]:
    """An action's names and colours; its text omits the stage if the device has only one."""
    short = str(action) if task.virtual > 1 else f"{action.kind.name}{action.microbatch}"
    colours = _colours(action.kind, action.stage, task.devices, task.table.stages)
    return {"text": short, "action": str(action), "colours": colours}


_colours = lru_cache(palette.box_colours)  # every move draws every cell again


# ---- beside the table


def about_level(level: Level) -> dict[str, Any]:
    """A level's texts, and its task as the form shows it."""
    task = level.task
    sizes = "devices", "microbatches", "virtual", "batches"
    return {
        "name": level.name,
        "text": level.text,
        "par": level.par,
        "unit": min(filter(None, task.seconds.values()), default=1.0),
        "sizes": {size: getattr(task, size) for size in sizes},
        "cap": " ".join(map(str, task.caps)) if task.cap else "",
        "split": task.split,
        "chunks": task.virtual > 1,
    }


def par_rows(level: Level) -> dict[str, Any]:
    """A table that reaches par, to draw below."""
    return {"title": f"par: {level.par:g}", "rows": rows_of(level.table().timeline)}


def trial_rows(trial: "TryOut") -> dict[str, Any]:
    """Planned and measured rows in milliseconds."""
    planned = rows_of(trial.planned, trial.scale)
    return {"text": str(trial), "planned": planned, "measured": rows_of(trial.run.timeline, 1e3)}


def rows_of(timeline: Timeline, scale: float = 1.0) -> list[dict[str, Any]]:
    """A row of cells for every device of a timeline; cells of no length are omitted."""
    task, begin = task_of(timeline.schedule), min(timeline.start)
    rows: list[dict[str, Any]] = [{"name": f"device {d}", "cells": []} for d in range(task.devices)]
    for span in timeline.spans:
        start, end = (scale * (time - begin) for time in (span.start, span.end))
        if end > start:
            rows[span.device]["cells"].append(framed(task, "action", span.action, start, end))
    return rows


def numbers(draft: Draft, par: float, tell: bool) -> list[list[str]]:
    """Rows of a table: name, hint, value, and what that is compared with.

    tell  whether to show the least makespan of an unfinished table
    """
    task, cap = draft.task, draft.task.cap
    held = _each(max(task.in_flight(row), default=0) for row in draft.rows)
    makespan = bubble = versions = ""
    if tell and not draft.whole and draft.running is draft:
        makespan = f"{least_makespan(draft):g} or more"
    if draft.whole and not draft.problem:
        makespan = f"{draft.timeline.makespan:g}"
        bubble = f"{draft.timeline.bubble.of_total:.1%}"
        versions = _each(draft.completed.weight_versions)
    rows = [
        ["makespan", "from the first start to the last end", makespan, f"par {par:g}"],
        ["bubble", "idle time / (devices x makespan)", bubble, ""],
        [
            "peak in flight",
            "the most held for a backward, by device",
            held,
            f"cap {_each(task.caps)}" if cap else "",
        ],
    ]
    if task.by_hand:
        rows.append(["weight versions", "the most kept of a stage, by device", versions, ""])
    return rows


def _each(values: Iterable[int]) -> str:
    return " ".join(map(str, values))
