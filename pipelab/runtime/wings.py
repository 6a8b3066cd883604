"""The libraries that runs compute with, by the names of their backends.

A room above adds its own to `WINGS`. Only runs that need a library import it, since others may not
be installed.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from pipelab.show.interrupt import imports_whole

if TYPE_CHECKING:
    from pipelab.runtime.session import Wing

# backend -> the module of its wing, and the class there
WINGS = dict.fromkeys((None, "threads", "processes"), ("pipelab.runtime.torch.wing", "TorchWing"))


@cache  # an import takes its care but once
def wing_of(backend: str | None) -> "type[Wing]":
    """The library's part in a run. ValueError for an unknown backend."""
    if backend not in WINGS:
        names = ", ".join(filter(None, WINGS))
        raise ValueError(f"backend={backend!r}: give one of {names}")
    module, name = WINGS[backend]
    with imports_whole():
        return getattr(import_module(module), name)
