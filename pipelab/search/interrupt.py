"""Ctrl-C where an exception would do harm."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Noted:
    """A context in which Ctrl-C raises no KeyboardInterrupt: `seen` says whether there was one.

    For imports, which may swallow a KeyboardInterrupt or stay half-made, and for work in another
    thread that has to be told to stop.
    """

    seen = False

    def _note(self, *signal_and_frame: object) -> None:
        self.seen = True

    @contextmanager
    def caught(self) -> Iterator[None]:
        """A context in which one that others' handlers raise is noted, too."""
        try:
            yield
        except KeyboardInterrupt:
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
