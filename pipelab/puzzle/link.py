"""A draft as text: in a link, and in a file that any reader of tables knows."""

import re
from dataclasses import fields
from typing import Any
from urllib.parse import parse_qsl, urlencode

import numpy as np

from pipelab.action import Action, Kind, Reads, ScheduleError
from pipelab.costs import Costs, Recompute
from pipelab.puzzle.draft import Draft
from pipelab.puzzle.task import PLAIN, Task
from pipelab.schedule import Schedule

NUMBERS = [field.name for field in fields(Costs) if field.name != "recompute"]
NAMED = {"reads": Reads, "recompute": Recompute}


def write(draft: Draft) -> str:
    """The rows on one line: cells with `_` between, rows with `~`; such as 0F0_0F1~1F0."""
    return "~".join("_".join(map(str, row)) for row in draft.rows)


def read(task: Task, text: str) -> Draft:
    """The draft of `write`, `to_csv`, or a grid: rows on lines, `.` for idle, headers passed over.

    Updates that follow by themselves are passed over, too. Nothing but names and rows is checked:
    see `Draft.settled`. ScheduleError for what this task does not have.

    >>> read(Task(devices=2, microbatches=1), "0F0 . ~ . 1F0").rows[1]
    (Action(stage=1, kind=<Kind.F: 0>, microbatch=0),)
    """
    lines = [line for line in re.split("[\n~]", text) if not line.startswith("#")]
    while len(lines) > task.devices and not lines[-1].strip():
        lines.pop()
    if len(lines) > task.devices:
        raise ScheduleError(f"{len(lines)} rows for {task.devices} devices: write one row for each")
    draft = Draft.of(task)
    for device, line in enumerate(lines):
        for cell in re.split("[,_\\s]+", line):
            if cell in ("", "."):
                continue
            action = Action.parse(cell)
            if action.kind is Kind.U and not task.by_hand:
                continue
            task.check(action)
            if task.device(action) != device:
                raise ScheduleError(
                    f"row {device}: {action} belongs on device {task.device(action)}"
                )
            draft = draft.put(action)
    return draft


def to_csv(draft: Draft) -> str:
    """The table as a file; a whole one is read by `Schedule.from_csv`, too."""
    header, *rows = draft.completed.to_csv().splitlines()
    if not draft.whole:
        rows = [",".join(map(str, row)) for row in draft.rows]
    return "\n".join([header, *rows]) + "\n"


# ---- sizes and rules in a link


def write_task(task: Task) -> str:
    """What differs from a plain task, as in an address: devices=4&microbatches=8&cap=4_4_4_4."""
    given: dict[str, Any] = {}
    for field in fields(Task):
        value = getattr(task, field.name)
        if field.name not in ("costs", "reads") and value != field.default:
            given[field.name] = _joined(value)
    if task.per_update == task.microbatches:
        del given["per_update"]
    if task.reads is not Reads.LATEST:
        given["reads"] = task.reads.name
    if task.costs.recompute is not Recompute.NEVER:
        given["recompute"] = task.costs.recompute.name
    for name in NUMBERS:
        if (value := getattr(task.costs, name)) != getattr(PLAIN, name):
            given[name] = _joined(value)
    return urlencode(given)


def read_task(text: str) -> Task:
    """The inverse of `write_task`. ScheduleError or CostError for what is no task."""
    found: dict[str, Any] = dict(parse_qsl(text))
    costs: dict[str, Any] = {n: _numbers(found.pop(n), float) for n in NUMBERS if n in found}
    known = {field.name for field in fields(Task)} - {"costs"} | {"recompute"}
    if unknown := sorted(set(found) - known):
        raise ScheduleError(f"{unknown[0]}= is none of {', '.join(sorted((*known, *NUMBERS)))}")
    for name in "devices", "microbatches":
        if name not in found:
            raise ScheduleError(f"{name}= is missing")
    for name in found:
        found[name] = _named(name, found[name]) if name in NAMED else _numbers(found[name], int)
    if "recompute" in found:
        costs["recompute"] = found.pop("recompute")
    if "split" in found:
        found["split"] = bool(found["split"])
    return Task(**found, costs=Costs(**costs))


def task_of(table: Schedule) -> Task:
    """The task that a table does. ScheduleError where it is none that can be edited."""
    virtual = table.stages // table.devices
    split = bool((table.columns.kind == Kind.I).any())
    sizes = table.devices, table.microbatches, virtual, table.batches, table.per_update
    task = Task(*sizes, table.reads, split=split)
    if table.has_transfers or table.placement != task.placement:
        raise ScheduleError(
            f"{table.name} cannot be edited: stages have to stand in a loop over the devices, and "
            "transfers must not be written out"
        )
    return task


def _joined(value: Any) -> str:
    return "_".join(str(x).removesuffix(".0") for x in np.ravel(value).astype(float).tolist())


def _named(name: str, text: str) -> Any:
    members = NAMED[name].__members__
    if text not in members:
        raise ScheduleError(f"{name}={text} is none of {', '.join(members)}")
    return members[text]


def _numbers(text: str, number: type) -> Any:
    try:
        values = tuple(number(part) for part in text.split("_"))
    except ValueError:
        raise ScheduleError(
            f"{text!r} is no number, and no list of numbers with _ between"
        ) from None
    return values if len(values) > 1 else values[0]
