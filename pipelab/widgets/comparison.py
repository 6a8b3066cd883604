"""What stands beside the editor's table: its level, par, its numbers, and a run of it."""

from typing import Any

from pipelab.puzzle import Bound, Draft, Level
from pipelab.puzzle.draft import in_flight
from pipelab.puzzle.link import task_of
from pipelab.timeline import Timeline
from pipelab.widgets.board import box
from pipelab.widgets.drawing import per_device
from pipelab.widgets.try_out import Trial


def about_level(level: Level) -> dict[str, Any]:
    """Its words, and what the form says of its task."""
    task = level.task
    sizes = "devices", "microbatches", "virtual", "batches"
    return {
        "name": level.name,
        "title": level.title,
        "text": level.text,
        "par": level.par,
        "unit": min(filter(None, task.seconds.values()), default=1.0),
        "sizes": {size: getattr(task, size) for size in sizes},
        "cap": " ".join(map(str, task.cap)) if task.cap else "",  # type: ignore[arg-type]
        "split": task.split,
        "byHand": task.by_hand,
        "chunks": task.virtual > 1,
    }


def par_rows(level: Level) -> dict[str, Any]:
    """A table that reaches par, to draw below."""
    table = level.table()
    return {"title": f"par: {level.par:g}", "rows": rows_of(table.timeline)}


def trial_rows(trial: Trial) -> dict[str, Any]:
    """Planned and measured rows in milliseconds."""
    planned = rows_of(trial.planned, trial.scale)
    return {"text": str(trial), "planned": planned, "measured": rows_of(trial.run.timeline, 1e3)}


def rows_of(timeline: Timeline, scale: float = 1.0) -> list[dict[str, Any]]:
    """A row of cells for every device of a timeline; those of no length are left out."""
    s, task = timeline.schedule, task_of(timeline.schedule)
    begin = float(timeline.start.min())
    rows: list[dict[str, Any]] = [{"name": f"device {d}", "cells": []} for d in range(s.devices)]
    for i, device in enumerate(timeline.device.tolist()):
        start, end = (float(t[i] - begin) * scale for t in (timeline.start, timeline.end))
        if end > start:
            rows[device]["cells"].append(box(task, "action", s.action(i), start, end))
    return rows


def numbers(draft: Draft, par: float, tell: bool) -> list[list[str]]:
    """Rows of a table: name, hint, value, and what that is compared with.

    tell  what an unfinished table takes at least
    """
    task = draft.task
    held = [max(in_flight(task, row), default=0) for row in draft.rows]
    cap = f"cap {per_device(task.cap)}" if task.cap else ""  # type: ignore[arg-type]
    makespan = bubble = versions = ""
    if tell and not draft.whole and draft.running is draft:
        makespan = f"{Bound(task).least(draft):g} or more"
    if draft.whole and not draft.problem:
        makespan = f"{draft.timeline.makespan:g}"
        bubble = f"{draft.timeline.bubble.of_total:.1%}"
        versions = per_device(draft.completed.weight_versions)
    rows = [
        ["makespan", "from the first start to the last end", makespan, f"par {par:g}"],
        ["bubble", "idle time / (devices x makespan)", bubble, ""],
        ["peak in flight", "the most held for a backward, by device", per_device(held), cap],
    ]
    if task.by_hand:
        rows.append(["weight versions", "the most kept of a stage, by device", versions, ""])
    return rows
