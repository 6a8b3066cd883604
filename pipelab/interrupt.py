"""Ctrl-C at moments where an exception would do harm."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def noted() -> Iterator[Callable[[], bool]]:
    """Within, Ctrl-C raises nothing; what this gives says whether there was one.

    For imports, which may swallow a KeyboardInterrupt or stay half-made, and for work in another
    thread that has to be told to stop.
    """
    seen = False

    def note(*signal_and_frame: object) -> None:
        nonlocal seen
        seen = True

    if threading.current_thread() is not threading.main_thread():  # none arrives here
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: seen
    finally:
        signal.signal(signal.SIGINT, before)


def end_with_one_line() -> None:
    """Ctrl-C while the command `pipelab` is still being imported ends it with one line.

    In another program whoever imports the library gets its KeyboardInterrupt.
    """
    given = {os.path.basename(part) for part in sys.orig_argv[1:]}
    # `-m` stands there until Python has found what it is to run.
    is_command = "pipelab" in given and os.path.basename(sys.argv[0]) in ("pipelab", "-m")
    main = threading.current_thread() is threading.main_thread()
    if is_command and main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def _end(*signal_and_frame: object) -> None:
    os.write(2, b"pipelab: interrupted\n")
    os._exit(130)


@contextmanager
def raised() -> Iterator[None]:
    """Within, Ctrl-C is a KeyboardInterrupt also in a command; behind, it ends that as before."""
    ends = signal.getsignal(signal.SIGINT) is _end
    if ends:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        if ends:
            signal.signal(signal.SIGINT, _end)
