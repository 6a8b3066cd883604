"""Statements about a draft: which schedule it is, and why a device does nothing in it."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from pipelab.editor.puzzle.draft import Draft, Refused, Span
from pipelab.editor.puzzle.task import Rows, Task
from pipelab.schedules import SCHEDULES, make, takes
from pipelab.table.action import Action, Kind, ScheduleError

LONGEST = 5  # actions of a chain that are told
NEW = "The library has no such table."

# Of those that a draft can be: its stages are placed in a loop. One without a title has its name.
TITLES = {  # the plainest first: it comes first where a table is several
    "inter_layer": "inter-layer parallelism",
    "gpipe": "GPipe",
    "pipedream_flush": "1F1B (PipeDream-Flush)",
    "pipedream": "PipeDream",
    "pipedream_2bw": "PipeDream-2BW",
    "interleaved": "interleaved 1F1B",
    "looped_bfs": "looped breadth-first",
    "eager_1f1b": "eager 1F1B",
    "zb_h1": "ZB-H1",
    "zb_h2": "ZB-H2",
    "zb": "the automatic zero-bubble schedule",
    "terapipe": "TeraPipe",
    "seq1f1b": "Seq1F1B",
}


@lru_cache(maxsize=32)
def known_rows(task: Task) -> tuple[tuple[str, Rows], ...]:
    """Titles and rows of the schedules that do this task, whatever its cap."""
    found = []
    sizes: dict[str, Any] = {"virtual": task.virtual, "batches": task.batches}
    counts = {"virtual": task.virtual > 1, "slices": task.slices > 1}
    for name in dict.fromkeys([*TITLES, *SCHEDULES]):
        if name not in SCHEDULES or any(takes(name, size) != of for size, of in counts.items()):
            continue
        sizes |= {"slices": task.slices} if task.slices > 1 else {}
        try:
            table = make(name, task.devices, task.microbatches // task.slices, **sizes)
            same_rows = replace(table, name=task.table.name, rows=task.table.rows)
        except ScheduleError:
            continue  # it does not come in these sizes, or places other stages
        if same_rows == task.table and table.kinds == task.table.kinds:
            found.append((TITLES.get(name, name), task.rows_of(table)))
    return tuple(found)


@lru_cache(maxsize=32)
def allowed_rows(task: Task) -> tuple[tuple[str, Rows], ...]:
    """Those of `known_rows` that stay within the task's cap."""
    return tuple(pair for pair in known_rows(task) if not Draft.of(task, pair[1]).over_cap)


def recognise(draft: Draft) -> str:
    """In a sentence which schedules a draft is, or could become.

    The numbers of micro-batches do not count where there is a single update: a table is the same
    with other ones.

    >>> task = Task(devices=2, microbatches=2)
    >>> recognise(Draft.of(task, task.rows_of(make("gpipe", 2, 2))))
    'This is GPipe.'
    """
    if not draft.count:
        return ""
    mine = _renumbered(draft)
    names = [
        title
        for title, rows in allowed_rows(draft.task)
        if all(row[: len(part)] == part for row, part in zip(rows, mine, strict=True))
    ]
    *others, last = names or [""]
    either = f"{', '.join(others)} or {last}" if others else last
    if draft.whole:
        return f"This is {either}." if names else NEW
    return (
        f"This could become {either}."
        if names
        else "The library has no table that begins like this."
    )


def _renumbered(draft: Draft) -> Rows:
    """The rows with micro-batches numbered in the order in which the first stage takes them."""
    if draft.task.by_hand:
        return draft.rows
    taken = [a.microbatch for a in draft.rows[0] if a.kind is Kind.F and a.stage == 0]
    order = [*dict.fromkeys([*taken, *range(draft.task.table.total)])]
    return tuple(
        tuple(a._replace(microbatch=order.index(a.microbatch)) for a in row) for row in draft.rows
    )


# ---- idle time


def gap_reasons(draft: Draft, device: int, index: int) -> Span:
    """From when to when a device is idle before the action at this place of its row."""
    row = draft.rows[device]
    free = draft.spans[row[index - 1]][1] if index else 0.0
    return free, draft.spans[row[index]][0]


def why_idle(draft: Draft, device: int, index: int) -> str:
    """The actions that one after a gap waits for, in turn, back to what runs in the gap.

    >>> from pipelab.editor.puzzle import Task
    >>> draft = Draft.of(Task(devices=2, microbatches=1)).place("0F0").place("1F0").place("1B0")
    >>> why_idle(draft.place("0B0"), device=0, index=1)
    '0B0 waits for 1B0, which comes after 1F0, which runs until 2.'
    """
    task, (idle_from, until) = draft.task, gap_reasons(draft, device, index)
    action = draft.rows[device][index]
    here = [draft.spans[need][1] + task.way(need, action) for need in task.needs[action]]
    if max(here, default=0.0) <= idle_from:
        return f"{action} loses {until - idle_from:g} before it starts: the overhead."
    words = f"{action} waits for"
    for _ in range(LONGEST):
        source = _waits_for(draft, action)
        start, end = draft.spans[source]
        arrives = end + task.way(source, action)
        if end <= idle_from:
            return f"{words} {source}, which is on its way until {arrives:g}."
        if start - task.costs.overhead <= idle_from:
            there = f" and is here at {arrives:g}" if arrives > end else ""
            return f"{words} {source}, which runs until {end:g}{there}."
        follows = task.device(_waits_for(draft, source)) == task.device(source)
        words += f" {source}, which {'comes after' if follows else 'waits for'}"
        action = source
    return f"{words} others before it."


def _waits_for(draft: Draft, action: Action) -> Action:
    """The last to end of what an action needs and what stands before it in its row."""
    row = draft.rows[draft.task.device(action)]
    before = [row[row.index(action) - 1]] if action != row[0] else []
    return max(
        (*before, *draft.task.needs[action]),
        key=lambda a: draft.spans[a][1] + draft.task.way(a, action),
    )


def could_run(draft: Draft, device: int, index: int) -> str:
    """The action that could start in a gap instead, or that only the cap forbids it; "" if none.

    Of several the first is told that would not make the action after the gap start later.
    """
    _, until = gap_reasons(draft, device, index)
    row = draft.rows[device]
    forbidden = ""
    for action in (*row[index + 1 :], *draft.left(device)):
        needs = draft.task.needs[action]
        if any(a not in draft.placed or draft.spans[a][1] >= until for a in needs):
            continue
        try:
            after = draft.without(action).place(action, index, until)
        except Refused as reason:
            if "its cap is" in str(reason):
                forbidden = forbidden or f"{action} could run here, but {reason}."
            continue
        if after.spans[row[index]][0] <= until:
            return f"{action} could run here."
    return forbidden
