"""Ctrl-C at moments where an exception would do harm.

Imports only what Python has loaded at its start, or nearly: until then an interrupt is a traceback.
"""

import os
import signal
import sys


class Noted:
    """A context in which Ctrl-C raises nothing, and `seen` says whether there was one.

    For imports, which may swallow a KeyboardInterrupt or stay half-made, and for work in another
    thread that has to be told to stop.
    """

    seen = False

    def _note(self, *signal_and_frame: object) -> None:
        self.seen = True

    def __enter__(self) -> "Noted":
        try:
            self.before = signal.signal(signal.SIGINT, self._note)
        except ValueError:  # not the main thread, where it arrives
            self.before = None
        return self

    def __exit__(self, *error: object) -> None:
        if self.before is not None:
            signal.signal(signal.SIGINT, self.before)


class Raised:
    """A context in which Ctrl-C is a KeyboardInterrupt, also in the command `pipelab`."""

    def __enter__(self) -> None:
        self.ends = signal.getsignal(signal.SIGINT) is _end
        if self.ends:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __exit__(self, *error: object) -> None:
        if self.ends:
            signal.signal(signal.SIGINT, _end)


def end_with_one_line() -> None:
    """From now on Ctrl-C ends the command `pipelab` with one line, also while it is imported.

    In another program whoever imports the library gets its KeyboardInterrupt.
    """
    given = {os.path.basename(part) for part in sys.orig_argv[1:]}
    # `-m` stands there until Python has found what it is to run.
    is_command = "pipelab" in given and os.path.basename(sys.argv[0]) in ("pipelab", "-m")
    if is_command and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def _end(*signal_and_frame: object) -> None:
    os.write(2, b"pipelab: interrupted\n")
    os._exit(130)
