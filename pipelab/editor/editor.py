"""The schedule editor: make a table by hand, with as much help as you like, and run it."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import unquote

import anywidget
import traitlets

from pipelab.editor.board import (
    RUNGS,
    about_level,
    advice,
    board,
    board_legend,
    numbers,
    par_rows,
    tells,
    trial_rows,
    waiting,
)
from pipelab.editor.puzzle import Draft, Level, Task, finish, level_of, prove, recognise, stamp
from pipelab.editor.puzzle.levels import LEVELS
from pipelab.editor.puzzle.link import read, read_task, task_of, write_task
from pipelab.editor.puzzle.recognise import NEW, known_rows
from pipelab.predict.timeline import Timeline
from pipelab.table.action import Action, ScheduleError
from pipelab.table.schedule import Schedule
from pipelab.widgets.assets import read_assets

if TYPE_CHECKING:
    from pipelab.editor.try_out import TryOut

HERE = Path(__file__).parent
MARK = "#pipelab="  # before a table in an address


class Score(NamedTuple):
    """How a table compares with par; passed is None until the table is whole."""

    passed: bool | None
    text: str

    def __repr__(self) -> str:
        return self.text


class Moment(NamedTuple):
    """A state that undo can return to.

    helped  whether the coach or the table of par helped
    """

    level: Level
    draft: Draft
    helped: bool


class Editor(anywidget.AnyWidget):
    """A table to make by hand: a level, or one of your own sizes.

    table  a level's name ("first", "gpipe", "cap", ...), a `link`, a `Schedule` to change, a
           `Task`, or nothing: then `sizes` are those of `Task` (devices, microbatches, cap, ...)
    help   "free": anything goes, and the table says what is wrong with it; "legal": an impossible
           move is rejected with the reason; "ready": it also shows what can come next; "coach":
           and what should

    `schedule` is the table once it is whole, `feedback` compares it with par, and `run()` runs it.
    The methods do what keys and buttons do in the browser.

    >>> editor = Editor("first")
    >>> editor.place("0F0")
    >>> editor.place("1B0")
    Traceback (most recent call last):
    pipelab.editor.puzzle.draft.Refused: 1B0 needs 1F0 first, which is not placed yet
    >>> editor.finish()
    >>> editor.feedback
    Par: 9. This is 1F1B (PipeDream-Flush) or eager 1F1B.
    """

    _esm = read_assets("tools.js", HERE / "editor.js")
    _css = read_assets("explorer.css", HERE / "editor.css")
    view = traitlets.Dict().tag(sync=True)  # what the browser shows
    draft: Draft  # what is placed so far
    helped: bool  # whether the coach or the table of par helped
    won: dict[str, str]  # levels at par: "own", or "helped"
    _level: Level
    _past: list[Moment]  # for undo
    _future: list[Moment]  # for redo
    _left: dict[str, tuple[Draft, bool]]  # each level's board and `helped` when it was left
    trial: "TryOut | None"  # the last run of this table, if there was one

    def __init__(
        self, table: str | Schedule | Task | None = None, *, help: str = "legal", **sizes: Any
    ) -> None:
        super().__init__()
        self.won = {}
        self._past, self._future, self._left = [], [], {}
        self._marks = {"critical": False, "par": False}
        self._help = _rung(help)
        if table is not None and sizes:
            raise ScheduleError(f"the given table has its own sizes: omit {', '.join(sizes)}")
        if isinstance(table, str):
            self._open(*(_linked(table) if MARK in table else (level_of(table), None)))
        elif isinstance(table, Schedule):
            task = task_of(table)
            self._open(_sandbox(task), read(task, table.to_csv()))
        else:
            self._open(_sandbox(table or Task(**{"devices": 4, "microbatches": 8} | sizes)))
        self.on_msg(self._hear)

    # ---- what there is

    @property
    def schedule(self) -> Schedule:
        """The table. ScheduleError, with the reason, until it is whole and can run."""
        return self.draft.schedule

    @property
    def timeline(self) -> Timeline:
        """The whole table's simulation."""
        _ = self.schedule  # raises if there is none
        return self.draft.timeline

    @property
    def link(self) -> str:
        """The level or the sizes, and the table: for `load`, or for the end of a page's address."""
        level = self._level
        address = f"level={level.name}" if level.name else write_task(level.task)
        return f"{MARK}{address}&table={self.draft}"

    @property
    def feedback(self) -> Score:
        """How the table compares with par."""
        draft, par = self.draft, self._level.par
        if draft.problem:
            return Score(False, f"This cannot run: {draft.problem}")
        if not draft.whole:
            return Score(None, f"{draft.count} of {draft.size} actions are placed.")
        took = draft.timeline.makespan
        known = recognise(draft)
        if known == NEW and not self.helped:
            known = f"This one is yours. {NEW}"
        if took <= par * (1 + 1e-9):
            return Score(True, f"Par: {took:g}. {known}")
        return Score(False, f"It takes {took:g}, par is {par:g}. {known}")

    # ---- moves

    def place(self, action: str, index: int | None = None, until: float | None = None) -> None:
        """Place an action, such as "0F3", at the end of its row or at `index` of it.

        Raises `Refused` with the reason, unless `help` is "free".
        """
        cell = Action.parse(action)
        if self._help == "free":
            self._change(self.draft.put(cell, index))
        else:
            self._change(self.draft.place(cell, index, until))

    def remove(self, action: str) -> None:
        """Remove an action and, unless `help` is "free", all that needs it."""
        cell = Action.parse(action)
        if cell not in self.draft.placed:
            raise ScheduleError(f"{cell} cannot be removed: it is not placed")
        after = self._allowed(self.draft.without(cell))
        more = self.draft.count - after.count - 1
        self._change(
            after, f"{cell} is removed, and so is what needs it: {more} more." if more else ""
        )

    def step(self) -> None:
        """Place what the coach would place."""
        found = advice(self.draft)
        ties = f" As good: {', '.join(map(str, found.ties))}." if found.ties else ""
        text = f"{found.move}, {found.reason}: {found.makespan:g} can still be reached.{ties}"
        self._change(self.draft.place(found.move), text, helped=True)

    def finish(self) -> None:
        """Place all that is left, in the best order found."""
        self._change(finish(self.draft), helped=True)

    def prove(self) -> None:
        """Say why nobody ends before par; `Refused` where that is not known."""
        self._refresh(prove(self._level.task, self._level.par))

    def stamp(self, microbatch: int = 0, interval: float | None = None) -> None:
        """Repeat this micro-batch's block for all, each `interval` after the one before."""
        self._change(stamp(self.draft, microbatch, interval))

    def clear(self) -> None:
        """Start again."""
        self._change(Draft.of(self.draft.task))

    def undo(self) -> None:
        """Take back the last change."""
        self._back_to(self._past, self._future)

    def redo(self) -> None:
        """Make the change again that undo took back."""
        self._back_to(self._future, self._past)

    def load(self, text: str) -> None:
        """Open a `link`, or the text of `to_csv`; unless `help` is "free", drop what cannot run."""
        if MARK in text or "table=" in text:
            self._open(*_linked(text))
        else:
            self._change(self._allowed(read(self.draft.task, text)))

    # ---- what is shown

    def open_level(self, name: str) -> None:
        """Open a level, as it was left."""
        level = level_of(name)
        self._open(level, *self._left.get(name, ()))

    def open_task(self, **sizes: Any) -> None:
        """Begin with other sizes; those not given stay, but a cap and slices do not."""
        self._open(_sandbox(self.draft.task.resized(**sizes)))

    def set_help(self, help: str) -> None:
        """Change the help. When "free" ends, what cannot run is dropped."""
        self._help = _rung(help)
        self._change(self._allowed(self.draft))

    def show(self, **marks: bool) -> None:
        """Show or hide the table of par below yours (par) and the critical path (critical)."""
        if unknown := sorted(set(marks) - set(self._marks)):
            raise ScheduleError(f"{unknown[0]}= is not known: there are {', '.join(self._marks)}")
        self._marks = self._marks | marks
        self._refresh()

    def run(self, paced: bool = True) -> "TryOut":
        """Run the table on worker threads, and show the measured times below the planned ones.

        Paced, its actions take as long as their costs say. The result, printed, gives the verdict.
        """
        from pipelab.editor.try_out import try_out  # only a run needs it

        self.trial = try_out(self.schedule, self.draft.task.stage_costs, paced)
        self._refresh()
        return self.trial

    # ---- inside

    def _open(self, level: Level, draft: Draft | None = None, helped: bool = False) -> None:
        known_rows(level.task)  # cached: every move is compared with them
        opened = self._allowed(draft or Draft.of(level.task))
        if hasattr(self, "draft"):
            self._left[self._level.name] = self.draft, self.helped
            self._past.append(self._now)
            self._future.clear()
        self._show(Moment(level, opened, helped))
        self._marks = self._marks | {"par": False}
        self._refresh()

    @property
    def _now(self) -> Moment:
        return Moment(self._level, self.draft, self.helped)

    def _show(self, moment: Moment) -> None:
        self._level, self.draft, self.helped = moment
        self.trial = None

    def _allowed(self, draft: Draft) -> Draft:
        return draft if self._help == "free" else draft.settled()

    def _change(self, draft: Draft, text: str = "", helped: bool = False) -> None:
        if draft.rows != self.draft.rows:
            self._past.append(self._now)
            self._future.clear()
            shown = helped or self.helped or self._help == "coach" or self._marks["par"]
            self._show(Moment(self._level, draft, shown and draft.count > 0))
        self._refresh(text)

    def _back_to(self, kept: list[Moment], others: list[Moment]) -> None:
        if kept:
            others.append(self._now)
            if kept[-1].level != self._level:
                self._marks = self._marks | {"par": False}
            self._show(kept.pop())
        self._refresh()

    def _hear(self, _widget: Any, message: dict[str, Any], _buffers: Any) -> None:
        """Call the method that the browser asks for; an error is shown as one line."""
        try:
            words = {**message}
            do = words.pop("do", None)
            if do not in HEARD:
                raise ScheduleError(f"{do} is not a move")
            getattr(self, do)(**words)
        except Exception as error:
            said = str(error).partition("\n")[0] or type(error).__name__
            self._refresh(said, refused=True)

    def _refresh(self, text: str = "", refused: bool = False) -> None:
        feedback = self.feedback
        if feedback.passed:
            if not self.helped:
                self.won[self._level.name] = "own"
            self.won.setdefault(self._level.name, "helped")
        whole = self.draft.whole or self.draft.problem
        said = text or (feedback.text if whole else waiting(self.draft) or recognise(self.draft))
        mood = "refused" if refused else "won" if feedback.passed else ""
        count = self.view.get("said", {}).get("count", 0) + 1
        self.view = {
            "said": {"text": said, "mood": mood, "count": count},
            "level": about_level(self._level),
            "levels": [[n, level.title, self.won.get(n, "")] for n, level in LEVELS.items()],
            "helped": self.helped,
            "help": self._help,
            "rungs": list(RUNGS.items()),
            "marks": self._marks,
            "rows": board(self.draft, self._help, self._marks["critical"]),
            "legend": board_legend(self.draft.task),
            "par": par_rows(self._level) if self._marks["par"] else {},
            "trial": trial_rows(self.trial) if self.trial else {},
            "numbers": numbers(self.draft, self._level.par, tells(self._help)),
            "undo": bool(self._past),
            "redo": bool(self._future),
            "whole": self.draft.whole and not self.draft.problem,
            "link": self.link,
            "file": self.draft.to_csv(),
            "summary": self._summary(),
        }

    def __repr__(self) -> str:
        return f"{self._summary()} Run this cell to play."

    def _summary(self) -> str:
        what = f"level {self._level.name}" if self._level.name else "a table of your own"
        task = self._level.task
        sizes = f"p={task.devices}, m={task.microbatches}"
        return f"Editor of {what}, {sizes}: {self.feedback.text}"


HEARD = {  # what the browser may ask for
    *("place", "remove", "step", "finish", "prove", "stamp", "clear", "undo", "redo", "load"),
    *("open_level", "open_task", "set_help", "show", "run"),
}


def _rung(help: str) -> str:
    if help not in RUNGS:
        raise ScheduleError(f"help={help!r}: use one of {', '.join(RUNGS)}")
    return help


def _linked(text: str) -> tuple[Level, Draft]:
    """The level and the table of a link."""
    task, _, table = unquote(text).rpartition(MARK)[2].rpartition("table=")
    name = task.rstrip("&").removeprefix("level=")
    level = level_of(name) if task.startswith("level=") else _sandbox(read_task(name))
    return level, read(level.task, table)


def _sandbox(task: Task) -> Level:
    """A level without a name, whose par is the best that the coach finds."""
    par = finish(Draft.of(task)).timeline.makespan
    return Level("", "Design your own", "", "Par is the best that the coach finds.", task, par)
