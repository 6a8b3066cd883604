"""Ctrl-C where an exception would do harm, and other signals that end a command.

The package imports this module first. For the command line, Ctrl-C then ends the process at once,
without a traceback of imports, until the command calls `allow`.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Noted:
    """A context in which Ctrl-C raises no KeyboardInterrupt: `seen` says whether there was one.

    For imports, which may swallow a KeyboardInterrupt or stay half-made, and for work in another
    thread that must be told to stop.

    once  whether a second one is raised
    """

    seen = False

    def __init__(self, once: bool = False) -> None:
        self.once = once

    def _note(self, *signal_and_frame: object) -> None:
        if self.seen and self.once:
            raise KeyboardInterrupt
        self.seen = True

    def __enter__(self) -> "Noted":
        # Elsewhere than in the main thread it does not arrive, and others' handlers stay.
        in_main_thread = threading.current_thread() is threading.main_thread()
        usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._taken = in_main_thread and usual
        if self._taken:
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        if self._taken:
            signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def imports_whole() -> Iterator[None]:
    """A context for imports: Ctrl-C meanwhile is raised when they are done.

    An interrupted import leaves modules half-made, and a traceback of dozens of lines.
    """
    with Noted() as interrupts:
        yield
    if interrupts.seen:
        raise KeyboardInterrupt


# ---- a command that is still being loaded


def leave(*signal_and_frame: object) -> None:
    """End the process at once: there is nothing yet to clean up."""
    os._exit(130)


def allow() -> None:
    """Let Ctrl-C raise KeyboardInterrupt again, once the command is loaded.

    So do `kill` and the end of a terminal: the command can clean up.
    """
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if _IS_COMMAND and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Do as Ctrl-C does here; where it is ignored, as in a script's background, as it would."""
    handler = signal.getsignal(signal.SIGINT)
    (handler if callable(handler) else signal.default_int_handler)(number, frame)


# `python -m pipelab` calls itself "-m" while its package is being imported.
_PROGRAM = os.path.basename(sys.argv[0]) if sys.argv else ""
_IS_COMMAND = _PROGRAM == "pipelab" or (_PROGRAM == "-m" and "pipelab" in sys.orig_argv)
if _IS_COMMAND and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, leave)
