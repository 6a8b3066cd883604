"""Widgets: what a notebook shows and lets its reader change.

The puzzle is plain Python, for a browser without a server, too: nothing else is loaded with it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelab.editor.editor import Editor
    from pipelab.widgets.explorer import Explorer

__all__ = ["Editor", "Explorer"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'pipelab.widgets' has no attribute {name!r}")
    return getattr(import_module(f"pipelab.widgets.{name.lower()}"), name)
