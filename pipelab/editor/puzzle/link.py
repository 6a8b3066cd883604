"""A draft as text: in a link, and in a file that any reader of tables knows."""

import re
from dataclasses import fields, replace
from enum import Enum
from typing import Any
from urllib.parse import parse_qsl, urlencode

from pipelab.editor.puzzle.draft import Draft
from pipelab.editor.puzzle.task import PLAIN, Task
from pipelab.predict.costs import Costs, Recompute
from pipelab.table.action import Action, Kind, Reads, ScheduleError
from pipelab.table.schedule import Schedule

SIZES = {field.name for field in fields(Task)} - {"costs"}
COSTS = {field.name for field in fields(Costs)}
NAMED: dict[str, type[Enum]] = {"reads": Reads, "recompute": Recompute}


def read(task: Task, text: str) -> Draft:
    """The draft of its text, its file, or a grid: rows on lines, `.` for idle, headers passed over.

    Updates that follow by themselves are passed over, too. Nothing but names and rows is checked:
    see `Draft.settled`. ScheduleError for what this task does not have.

    >>> read(Task(devices=2, microbatches=1), "0F0 . ~ . 1F0").rows[1]
    (Action(stage=1, kind=<Kind.F: 0>, microbatch=0),)
    """
    lines = re.split("[\n~]", text.rstrip("\n"))
    lines = [line for line in lines if not line.startswith("#")]
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
            draft = draft.put(action)
            if task.device(action) != device:
                raise ScheduleError(
                    f"row {device}: {action} belongs on device {task.device(action)}"
                )
    return draft


# ---- sizes and rules in a link


def write_task(task: Task) -> str:
    """The difference from a plain task, as in an address: devices=4&microbatches=8&cap=4_4_4_4."""
    given = {"devices": task.devices, "microbatches": task.microbatches}
    plain = Task(task.devices, task.microbatches)
    for mine, usual in ((task, plain), (task.costs, PLAIN)):
        values = {field.name: getattr(mine, field.name) for field in fields(mine)}
        given |= {n: value for n, value in values.items() if value != getattr(usual, n)}
    given.pop("costs", None)
    return urlencode({name: _text(value) for name, value in given.items()})


def read_task(text: str) -> Task:
    """The inverse of `write_task`. ScheduleError or CostError for what is no task."""
    found = dict(parse_qsl(text))
    if unknown := sorted(found.keys() - SIZES - COSTS):
        raise ScheduleError(
            f"{unknown[0]}= is not known: there are {', '.join(sorted(SIZES | COSTS))}"
        )
    if missing := sorted({"devices", "microbatches"} - found.keys()):
        raise ScheduleError(f"the link has no {missing[0]}=: copy all of it")
    values = {name: _value(name, part) for name, part in found.items()}
    costs = Costs(**{name: values.pop(name) for name in found if name in COSTS})
    return Task(**values, costs=costs)


def _text(value: Any) -> str:
    if isinstance(value, Enum):
        return value.name
    numbers = value if isinstance(value, tuple) else [value]
    return "_".join(str(float(x)).removesuffix(".0") for x in numbers)


def _value(name: str, text: str) -> Any:
    if name in NAMED:
        members = NAMED[name].__members__
        if text not in members:
            raise ScheduleError(f"{name}={text}: use one of {', '.join(members)}")
        return members[text]
    try:
        values = tuple(float(x) if name in COSTS else int(x) for x in text.split("_"))
    except ValueError:
        raise ScheduleError(
            f"{name}={text!r} is not a number: give one, or several with _ between"
        ) from None
    return values if len(values) > 1 else values[0]


def task_of(table: Schedule) -> Task:
    """The task that a table does. ScheduleError where it is none that can be edited."""
    sizes = table.devices, table.microbatches, table.stages // table.devices, table.batches
    task = Task(*sizes, table.per_update, table.reads, split=Kind.I in table.kinds)
    task = replace(task, slices=table.per_sequence)
    if (
        table.has_transfers
        or table.placement != task.table.placement
        or (table.slices != task.table.slices)
    ):
        raise ScheduleError(
            f"{table.name} cannot be edited: its stages must be placed in a loop over the devices, "
            "its transfers must not be written out, and slices must be equally long"
        )
    return task
