"""What the editor's picture is drawn from: rows of cells with their words, as plain data."""

from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.colors import to_hex

from pipelab.action import Action, Kind
from pipelab.plot import style
from pipelab.plot.timeline import colour_of
from pipelab.puzzle import Advice, Draft, Refused, Task, coach, could_run, why_idle
from pipelab.puzzle.draft import in_flight
from pipelab.puzzle.reasons import gap

RUNGS = {
    "free": "anything goes",
    "legal": "legal moves only",
    "ready": "show what is ready",
    "coach": "a coach",
}
ADVICE = 6_400  # of the coach's search after every move: its steps times the actions of a table


def board(draft: Draft, rung: str, critical: bool) -> list[dict[str, Any]]:
    """A row for every device: its cells, what it holds over time, and what is left to place.

    A cell has what it is (action, gap, stuck or end), from and until when, its place in the row,
    its text and colours, and what there is to say about it.
    """
    ready = set(draft.ready()) if tells(rung) else set()
    marks = _marks(draft) if rung == "coach" else {}
    path = _critical_path(draft) if critical else set()
    return [
        {
            "device": device,
            "name": f"device {device}",
            "stages": _stages(draft.task, device),
            "cells": _cells(draft, device, ready, path, tells(rung)),
            "held": _held(draft, device),
            "cap": draft.task.cap[device] if draft.task.cap else None,  # type: ignore[index]
            "left": [
                {
                    "text": _short(draft.task, action),
                    "action": str(action),
                    "colours": _colours(draft.task, action),
                    "state": marks.get(action, "ready" if action in ready else ""),
                }
                for action in draft.left(device)
            ],
        }
        for device in range(draft.task.devices)
    ]


def tells(rung: str) -> bool:
    """Whether this much help says what could be done."""
    return rung in ("ready", "coach")


def advice(draft: Draft) -> Advice:
    """What the coach says in the time of a move. Refused where it has nothing to say."""
    return coach(draft, ADVICE // draft.size)


def _marks(draft: Draft) -> dict[Action, str]:
    """The coach's move ("best") and its ties ("tie"); nothing where it has no advice."""
    try:
        found = advice(draft)
    except Refused:
        return {}
    return {found.move: "best"} | dict.fromkeys(found.ties, "tie")


def legend(task: Task) -> list[list[str]]:
    """Names and colours of the kinds that a task's table has."""
    kinds = [Kind.F, Kind.I, Kind.W] if task.split else [Kind.F, Kind.B]
    if task.by_hand:
        kinds.append(Kind.U)
    return [[style.NAMES[kind], style.KINDS[kind]] for kind in kinds]


# ---- cells


def _cells(
    draft: Draft, device: int, ready: Iterable[Action], path: set[Action], tell: bool
) -> list[dict[str, Any]]:
    running = draft.running
    row, task = running.rows[device], draft.task
    cells, now = [], 0.0
    for i, action in enumerate(row):
        start, end = running.span(action)
        if start > now + 1e-9:
            cells.append(_gap(running, device, i, tell))
        about = f"{_name(action)} on device {device}, from {start:g} to {end:g}."
        if action in path:
            about += " It is on the critical path: were it shorter, the table would be."
        cell = box(task, "action", action, start, end)
        cells.append(cell | {"index": i, "about": about, "critical": action in path})
        now = end
    for i, action in enumerate(draft.rows[device][len(row) :], len(row)):
        cell = box(task, "stuck", action, now, now + task.seconds[action])
        cells.append(cell | {"index": i, "about": _why_stuck(draft, action)})
        now += task.seconds[action]
    last = {"what": "end", "from": now, "until": now, "index": len(draft.rows[device])}
    return [*cells, last | {"about": _about_end(draft, device, now, ready)}]


def box(task: Task, what: str, action: Action, start: float, end: float) -> dict[str, Any]:
    """The cell of an action."""
    return {
        "what": what,
        "from": start,
        "until": end,
        "text": _short(task, action),
        "action": str(action),
        "colours": _colours(task, action),
    }


def _gap(draft: Draft, device: int, index: int, tell: bool) -> dict[str, Any]:
    begin, until = gap(draft, device, index)
    about = f"device {device} is idle from {begin:g} to {until:g}: {why_idle(draft, device, index)}"
    if tell:
        about = f"{about} {could_run(draft, device, index)}".rstrip()
    return {"what": "gap", "from": begin, "until": until, "index": index, "about": about}


def _about_end(draft: Draft, device: int, now: float, ready: Iterable[Action]) -> str:
    left = draft.left(device)
    if not left:
        return f"device {device} has done all its work at {now:g}."
    mine = [str(a) for a in left if a in ready]
    now_ready = f" Ready: {', '.join(mine)}." if mine else ""
    return f"device {device} is free from {now:g} on, with {len(left)} actions to place.{now_ready}"


def _why_stuck(draft: Draft, action: Action) -> str:
    missing = [a for a in draft.task.needs[action] if a not in draft.placed]
    if missing:
        return f"{action} waits for {missing[0]}, which is not placed."
    return f"{action} cannot run: {draft.problem or 'it stands behind one that cannot'}."


def _critical_path(draft: Draft) -> set[Action]:
    if not draft.whole or draft.problem:
        return set()
    return {draft.completed.action(i) for i in draft.timeline.critical_path()}


def _held(draft: Draft, device: int) -> list[list[float]]:
    """Times, and how many micro-batches the device holds from then on."""
    row = draft.running.rows[device]
    held = [[0.0, 0.0]]
    for action, count in zip(row, in_flight(draft.task, row), strict=True):
        start, end = draft.running.span(action)
        if count != held[-1][1]:
            held.append([start if count > held[-1][1] else end, count])
    return held


# ---- texts and colours


def _stages(task: Task, device: int) -> str:
    return f"stages {', '.join(map(str, range(device, task.stages, task.devices)))}"


def _short(task: Task, action: Action) -> str:
    """An action without its stage where the device has only one."""
    return str(action) if task.virtual > 1 else f"{action.kind.name}{action.microbatch}"


def _name(action: Action) -> str:
    if action.kind is Kind.U:
        return f"{action}, update {action.microbatch} of stage {action.stage},"
    name = style.NAMES[action.kind]
    return f"{action}, the {name} of micro-batch {action.microbatch} through stage {action.stage},"


def _colours(task: Task, action: Action) -> Sequence[str]:
    colour = to_hex(colour_of(action.kind, action.stage, task.devices, task.stages))
    return colour, style.ink(colour)
