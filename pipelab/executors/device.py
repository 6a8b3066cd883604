"""What both wings' devices have in common: a clock, and payloads looked at."""

import math
import time
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from pipelab.executors.stage import Ledger


class Device:
    """A device whose work is done when a call returns, so that a mark of time is just a number."""

    def __init__(self, device: Any, ledger: Ledger) -> None:
        self.device, self.ledger = device, ledger

    def begin(self, began: float) -> None:
        """Tie the device's clock to the run's time zero on `time.perf_counter`."""
        self._began = began

    def active(self) -> AbstractContextManager:
        """What a worker thread runs in."""
        return nullcontext()

    def now(self) -> Any:
        """A mark of this moment in the device's work."""
        return time.perf_counter()

    def on_core(self) -> float:
        """Seconds in which this thread had a core so far; nan where others compute for it."""
        return math.nan

    def finish(self) -> None:
        """Wait for all work so far."""

    def seconds(self, marks: list[Any]) -> list[float]:
        """Marks as seconds since the run began."""
        return [mark - self._began for mark in marks]

    def give(self, payload: Any) -> Any:
        """A payload for another device's `take`."""
        return payload

    def take(self, parcel: Any) -> Any:
        """The payload of another device's `give`, on this device."""
        raise NotImplementedError

    def arrays(self, payload: Any) -> Iterable[Any]:
        """The arrays of a payload, with `dtype`, `shape` and `nbytes`."""
        raise NotImplementedError

    def size(self, payload: Any) -> int:
        """Bytes of a payload's arrays."""
        return sum(array.nbytes for array in self.arrays(payload))

    def describe(self, payload: Any) -> str:
        """Types and shapes of a payload's arrays, for an error."""
        found = [
            f"{str(array.dtype).removeprefix('torch.')} {tuple(array.shape)}"
            for array in self.arrays(payload)
        ]
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        return ", ".join(found[:4]) + more if found else "no tensors"
