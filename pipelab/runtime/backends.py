"""The libraries that runs compute with, by the names of their backends.

A room above adds its own to `BACKENDS`. Only runs that need a library import it, since others may
not be installed.
"""

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

from pipelab.show.interrupt import imports_whole

if TYPE_CHECKING:
    from pipelab.runtime.backend import Backend

# its name -> the module, and the class there
BACKENDS = dict.fromkeys(
    (None, "threads", "processes"), ("pipelab.runtime.torch.backend", "TorchBackend")
)


@cache  # an import takes its care but once
def backend_of(backend: str | None) -> "type[Backend]":
    """The library's part in a run. ValueError for an unknown backend."""
    if backend not in BACKENDS:
        names = ", ".join(filter(None, BACKENDS))
        raise ValueError(f"backend={backend!r}: give one of {names}")
    module, name = BACKENDS[backend]
    with imports_whole():
        return getattr(import_module(module), name)
