"""What rules.js knows of a task: rows, needs and times, of which nothing has to be worked out."""

from typing import Any

from pipelab.editor.puzzle.draft import Draft
from pipelab.editor.puzzle.task import Task
from pipelab.table.action import U


def task_data(task: Task) -> dict[str, Any]:
    """A task as data; actions are numbers, device after device.

    rows      all actions as text, as `Draft` writes them
    needs     of each action, those that come before it
    seconds   of each action, without what it loses at its start (wait)
    ways      "need>action" -> seconds from the end of one until the other has it
    after     of each device, the seconds of updates that follow by themselves
    banker    whether a legal move can leave a table that cannot become whole
    """
    actions = [a for row in task.actions for a in row]
    number = {a: i for i, a in enumerate(actions)}
    ways = {(need, a): task.way(need, a) for a in actions for need in task.needs[a]}
    updates = range(0 if task.by_hand else task.table.stages)
    return {
        "rows": str(Draft(task, task.actions)),
        "needs": [[number[need] for need in task.needs[a]] for a in actions],
        "seconds": [task.times[a][0] for a in actions],
        "wait": task.costs.overhead,
        "ways": {f"{number[need]}>{number[a]}": way for (need, a), way in ways.items() if way},
        "after": [
            sum(task.seconds[U(s, 0)] for s in updates if s % task.devices == d)
            for d in range(task.devices)
        ],
        "caps": task.caps or None,
        "releases": task.releases.name,
        "slices": task.slices,
        "banker": not task.simple,
    }
