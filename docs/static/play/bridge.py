"""The kernel's part in a page: widgets that the browser shows and changes, and answers checked.

`answer` takes a request and gives its reply, both JSON. What a page has no use for of anywidget and
traitlets, two libraries with a notebook around them, is left out: here a widget is a Python object
whose synced values are told when they change.
"""

import ast
import json
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from types import ModuleType
from typing import Any


class Trait:
    """A value of a widget that its page knows, too."""

    empty: Callable[[], Any]

    def tag(self, **_: Any) -> "Trait":
        return self

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, widget: Any, owner: type) -> Any:
        return widget.values.get(self.name, self.empty())

    def __set__(self, widget: Any, value: Any) -> None:
        if self.name in widget.values and widget.values[self.name] == value:
            return
        widget.values[self.name] = value
        widget.changed.add(self.name)
        for react in [*widget.observers.get(self.name, [])]:
            react({"name": self.name, "new": value})


class Dict(Trait):
    empty = dict


class Unicode(Trait):
    empty = str


class AnyWidget:
    """A widget without a notebook: `changed` names the values that its page does not know yet."""

    values: dict[str, Any]
    changed: set[str]
    observers: dict[str, list[Callable]]
    hear: Callable

    def __new__(cls, *_: Any, **__: Any) -> "AnyWidget":
        widget = super().__new__(cls)
        widget.values, widget.changed, widget.observers = {}, set(), {}
        return widget

    def __init__(self, **values: Any) -> None:
        for name, value in values.items():
            setattr(self, name, value)

    def observe(self, react: Callable, name: str) -> None:
        self.observers.setdefault(name, []).append(react)

    def unobserve(self, react: Callable, name: str) -> None:
        self.observers[name].remove(react)

    def on_msg(self, hear: Callable) -> None:
        self.hear = hear

    @contextmanager
    def hold_sync(self) -> Iterator[None]:
        yield  # a reply has all that a request changed

    def news(self) -> dict[str, Any]:
        """What changed since it was asked last."""
        changed, self.changed = self.changed, set()
        return {name: self.values[name] for name in changed}


sys.modules["anywidget"] = ModuleType("anywidget")
sys.modules["anywidget"].AnyWidget = AnyWidget  # type: ignore[attr-defined]
sys.modules["traitlets"] = ModuleType("traitlets")
vars(sys.modules["traitlets"]).update(Dict=Dict, Unicode=Unicode)

from pipelab.editor import editor  # noqa: E402
from pipelab.table.action import ScheduleError  # noqa: E402
from pipelab.widgets import explorer  # noqa: E402

IN_LAB = 'this page has no torch: "Copy link", then run Editor("the link").run() in JupyterLab'
YOURS = "your answer"
WIDGETS: dict[str, Any] = {}


class Editor(editor.Editor):
    def run(self, paced: bool = True) -> Any:
        raise ScheduleError(IN_LAB)


def opened(kind: str, state: dict[str, Any]) -> Any:
    """A widget that shows what a page shows: the settings of one, the table of the other."""
    if kind == "explorer":
        shown = explorer.Explorer()
        shown.settings = shown.settings | state
        return shown
    shown = Editor(state["table"], help=state["help"])
    shown.won |= {name: mark for name, mark in state["won"].items() if name in editor.LEVELS}
    shown.helped = state["helped"]
    shown.show()
    return shown


def checked(before: str, cell: str) -> dict[str, Any]:
    """What a notebook says of a cell that ends with a check, run after the code before it."""
    *given, last = ast.parse(cell, YOURS).body or [ast.parse("None").body[0]]
    if not isinstance(last, ast.Expr):
        return {"passed": None, "text": "Keep the last line as it was: it checks your answer."}
    scope: dict[str, Any] = {"__name__": "__main__"}
    with redirect_stdout(StringIO()) as printed:
        exec(before, scope)
        exec(compile(ast.Module(given, []), YOURS, "exec"), scope)
        found = eval(compile(ast.Expression(last.value), YOURS, "eval"), scope)
    passed, folded = getattr(found, "passed", None), getattr(found, "folded", "")
    return {"passed": passed, "text": f"{printed.getvalue()}{found!r}", "folded": folded}


def done(do: str, widget: str = "", **words: Any) -> dict[str, Any]:
    """The reply to a request."""
    if do == "check":
        return checked(**words)
    if do == "open":
        WIDGETS[widget] = opened(**words)
        return {"state": WIDGETS[widget].news()}
    shown = WIDGETS[widget]
    if do == "set":
        for name, value in words["values"].items():
            setattr(shown, name, value)
            shown.changed.discard(name)  # which the page knows: it said so
        return {"state": shown.news()}
    if do == "send":
        shown.hear(shown, words["content"], [])
        return {"state": shown.news()}
    if words["kind"] == "csv":
        return {"text": shown.timeline.schedule.to_csv()}
    from pipelab.measure.trace import to_trace  # a room that only a download needs

    return {"text": json.dumps(to_trace(shown.timeline))}


def answer(request: str) -> str:
    """The reply to a request; what Python refuses is in `failed`."""
    try:
        return json.dumps(done(**json.loads(request)))
    except BaseException as error:  # an answer may also leave, or interrupt
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == YOURS]
        told = str(error)
        if isinstance(error, SyntaxError) and error.filename == YOURS:
            lines, told = [error.lineno], error.msg
        where = f"line {lines[-1]}: " if lines else ""
        return json.dumps({"failed": f"{where}{type(error).__name__}: {told}"})
