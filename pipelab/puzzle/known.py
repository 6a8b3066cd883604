"""Which schedule a draft is: compared with all that the library has of the same sizes."""

from functools import lru_cache

from pipelab.action import Kind, ScheduleError
from pipelab.puzzle.draft import Draft, Rows
from pipelab.puzzle.task import Task
from pipelab.schedule import Schedule
from pipelab.schedules import SCHEDULES, make, takes

# Of those that a draft can be: its stages are placed in a loop.
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
}


@lru_cache(maxsize=32)
def known_rows(task: Task) -> tuple[tuple[str, Rows], ...]:
    """Titles and rows of the schedules that do this task, whatever its cap."""
    found = []
    for name in dict.fromkeys([*TITLES, *SCHEDULES]):
        if takes(name, "virtual") != (task.virtual > 1):
            continue
        sizes = {"virtual": task.virtual, "batches": task.batches}
        try:
            table = make(name, task.devices, task.microbatches, **sizes)  # type: ignore[arg-type]
        except ScheduleError:
            continue  # it does not come in these sizes
        same = "placement", "per_update", "reads"
        alike = all(getattr(table, key) == getattr(task, key) for key in same)
        if alike and task.split == (Kind.I in table.columns.kind):
            found.append((TITLES.get(name, name), rows_of(task, table)))
            if name == "gpipe" and not task.by_hand:
                found.append(("GPipe (last in, first out)", _last_first(found[-1][1])))
    return tuple(found)


def rows_of(task: Task, table: Schedule) -> Rows:
    """A table's rows as a draft has them: updates that follow by themselves are left out."""
    kept = [[a for a in row if task.by_hand or a.kind is not Kind.U] for row in table.rows]
    return tuple(map(tuple, kept))


def _last_first(rows: Rows) -> Rows:
    """The rows with their backwards in the opposite order."""
    forwards = [[a for a in row if a.kind is Kind.F] for row in rows]
    backwards = [[a for a in reversed(row) if a.kind is Kind.B] for row in rows]
    return tuple((*f, *b) for f, b in zip(forwards, backwards, strict=True))


def recognise(draft: Draft) -> str:
    """In a sentence which schedules a draft is, or could become.

    The numbers of micro-batches do not count where there is a single update: a table is the same
    with other ones.

    >>> task = Task(devices=2, microbatches=2)
    >>> recognise(Draft.of(task, rows_of(task, make("gpipe", 2, 2))))
    'This is GPipe.'
    """
    mine = _renumbered(draft.task, draft.rows)
    if draft.whole:
        names = [title for title, rows in known_rows(draft.task) if rows == mine]
        return (
            f"This is {_either(names)}." if names else "This one is yours: the library has no such."
        )
    if not draft.count:
        return ""
    names = [title for title, rows in known_rows(draft.task) if _begins(rows, mine)]
    return f"This could become {_either(names)}." if names else "This is already one of your own."


def _begins(rows: Rows, first: Rows) -> bool:
    return all(row[: len(part)] == part for row, part in zip(rows, first, strict=True))


def _renumbered(task: Task, rows: Rows) -> Rows:
    """The rows with micro-batches numbered in the order in which the first stage takes them."""
    if task.by_hand:
        return rows
    taken = [a.microbatch for a in rows[0] if a.kind is Kind.F and a.stage == 0]
    others = [k for k in range(task.total) if k not in taken]
    number = {k: new for new, k in enumerate((*taken, *others))}
    return tuple(tuple(a._replace(microbatch=number[a.microbatch]) for a in row) for row in rows)


def _either(names: list[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}" if first else last
