"""Widgets: what a notebook shows and lets its reader change.

WIDGETS  name -> the module that holds the class; a room above adds its own
SHARES   rows that a room above adds to the explorer's table: label -> (hint, function), where
         function(schedule, costs, timeline) returns a share
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

WIDGETS = {"Explorer": "pipelab.widgets.explorer"}
SHARES: dict[str, tuple[str, Callable[..., float | None]]] = {}


def __getattr__(name: str) -> Any:
    if name not in WIDGETS:
        raise AttributeError(f"module 'pipelab.widgets' has no attribute {name!r}")
    return getattr(import_module(WIDGETS[name]), name)
