"""The moments at which a mesh was done with its work: jax returns before it has computed."""

import time
from queue import SimpleQueue
from threading import Thread
from typing import Any

import jax

from pipelab.pipeshard.mesh import MeshDevice


class Mark:
    """The moment at which some arrays were there, or failed."""

    __slots__ = ("at", "error")

    def __init__(self) -> None:
        self.at = 0.0
        self.error: Exception | None = None

    def wait_for(self, arrays: list[jax.Array]) -> None:
        try:
            for array in arrays:
                array.block_until_ready()
        except Exception as error:
            self.error = error
        self.at = time.perf_counter()


class WatchedMesh(MeshDevice):
    """A mesh that is given work before it is done with what it has.

    A mark is when all that was to be waited for before it was there: of an action's start, its
    input and the action before; of its end, its results. A thread waits, as soon as there is
    something to wait for.
    """

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self._new: list[jax.Array] = []  # since the last mark
        self._queue: SimpleQueue[tuple[list[jax.Array], Mark] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._asked = self._done = 0  # marks that the thread was, and has, waited for

    def wait(self, arrays: Any) -> Any:
        self._new += jax.tree.leaves(arrays)
        return arrays

    def now(self) -> Mark:
        mark, arrays = Mark(), self._new
        self._new = []
        # Random keys do not tell: they are waited for.
        if self._asked == self._done and all(getattr(x, "is_ready", bool)() for x in arrays):
            mark.wait_for(arrays)
            return mark
        if not self._thread:
            self._thread = Thread(target=self._watch, name="pipelab watch", daemon=True)
            self._thread.start()
        self._asked += 1
        self._queue.put((arrays, mark))
        return mark

    def finish(self) -> None:
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
            self._done += 1
            del item, arrays  # else they would be kept until the next
