"""The moments at which a mesh was done with its work: jax returns before it has computed."""

import time
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any

import jax

from pipelab.pipeshard.mesh import MeshDevice, Payload


class Mark:
    """The moment at which some arrays and earlier marks were there, or failed.

    It can be waited for like an array itself.
    """

    __slots__ = ("at", "error", "pending")

    def __init__(self) -> None:
        self.at = 0.0
        self.error: Exception | None = None
        self.pending = Lock()  # held until then by a mark that is not there at once

    def is_ready(self) -> bool:
        return self.at > 0

    def block_until_ready(self) -> None:
        with self.pending:
            pass

    def wait_for(self, arrays: list[Any]) -> None:
        try:
            for array in arrays:
                array.block_until_ready()
        except Exception as error:
            self.error = error
        self.at = time.perf_counter()


class WatchedMesh(MeshDevice):
    """A mesh that is given work before it is done with what it has; only a thread waits.

    A mark is the moment at which all is there that was handed to `wait` or `take` since the last
    mark: at an action's start its input, at its end its results. It may be late by the time that
    the thread takes to wake.
    """

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self._new: list[Any] = []  # since the last mark
        self._last = Mark()
        self._queue: SimpleQueue[tuple[list[Any], Mark] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._asked = self._done = 0  # marks that the thread was, and has, waited for

    def give(self, payload: Payload) -> Any:
        return payload, self._last

    def take(self, parcel: Any) -> Payload:
        payload, made = parcel
        self._new.append(made)
        return self.arrived(payload)

    def wait(self, arrays: Any) -> Any:
        """The arrays at once: the next mark waits for them."""
        self._new += jax.tree.leaves(arrays)
        return arrays

    def now(self) -> Mark:
        mark, arrays = Mark(), self._new
        self._last = mark
        self._new = []
        # Random keys do not tell: they are waited for.
        if self._asked == self._done and all(getattr(x, "is_ready", bool)() for x in arrays):
            mark.wait_for(arrays)
            return mark
        if not self._thread:
            self._thread = Thread(target=self._watch, name="pipelab watch", daemon=True)
            self._thread.start()
        mark.pending.acquire()
        self._asked += 1
        self._queue.put((arrays, mark))
        return mark

    def finish(self) -> None:
        """Wait for all marks; the thread ends."""
        if self._thread:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def failed(self, marks: list[Mark]) -> tuple[int, Exception] | None:
        errors = ((i, mark.error) for i, mark in enumerate(marks))
        return next(((i, error) for i, error in errors if error), None)

    def seconds(self, marks: list[Mark]) -> list[float]:
        return [mark.at - self._began for mark in marks]

    def _watch(self) -> None:
        while item := self._queue.get():
            arrays, mark = item
            mark.wait_for(arrays)
            mark.pending.release()
            self._done += 1
            del item, arrays  # else they would be kept until the next
