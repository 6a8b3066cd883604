"""Ctrl-C where an exception would do harm."""

import signal


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
