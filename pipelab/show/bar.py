"""A progress bar in a terminal or a notebook."""

import os
import sys
import time
from types import TracebackType
from typing import Any


def seen() -> bool:
    """Whether a bar is visible: in a terminal or a notebook, unless TQDM_DISABLE is set."""
    # A bar in a notebook does not heed that.
    looks = sys.stderr.isatty() or "ipykernel" in sys.modules
    return looks and not os.environ.get("TQDM_DISABLE")


class Bar:
    """A bar of steps, in one or several phases; it disappears at the end.

    text   what is done
    total  steps; each phase may add some
    delay  seconds without a bar: an immediate one would stay in a notebook's stored outputs
    shown  default: if it is visible
    """

    def __init__(
        self, text: str, total: int = 0, delay: float = 0.0, shown: bool | None = None
    ) -> None:
        self.text, self.total, self.delay = text, total, delay
        self.shown = seen() if shown is None else shown
        self.done, self._bar, self._began = 0, None, time.monotonic()

    def phase(self, text: str, steps: int = 1) -> None:
        """Begin another phase, of this many steps."""
        self.text, self.total = text, self.total + steps
        self.step(0)

    def step(self, steps: int = 1) -> None:
        """This many more steps are done."""
        self.done += steps
        if self._bar is not None:
            self._bar.total = self.total
            self._bar.set_description(self.text, refresh=False)
            self._bar.update(steps)
            self._bar.refresh()
        elif self.shown and time.monotonic() - self._began >= self.delay:
            from tqdm.auto import tqdm  # only for who looks

            look: Any = dict(unit="step", leave=False)
            self._bar = tqdm(total=self.total, initial=self.done, desc=self.text, **look)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar, self.shown = None, False  # steps after its end are not shown
