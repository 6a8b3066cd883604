"""The moments at which a mesh was done with its work: jax returns before it has computed."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from pipelab.pipeshard.mesh import MeshDevice, Payload

Mark = Future[float]  # the moment at which some arrays and earlier marks were there, or an error


class WatchedMesh(MeshDevice):
    """A mesh that is given work before it is done with what it has; only a thread waits.

    A mark is the moment at which all is there that was handed to `wait` or `take` since the last
    mark: at an action's start its input, at its end its results. It may be late by the time that
    the thread takes to wake.
    """

    def __init__(self, *of: Any) -> None:
        super().__init__(*of)
        self._new: list[Any] = []  # since the last mark
        self._pool = ThreadPoolExecutor(1, "pipelab watch")
        self._last = self._at_once([])

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
        arrays, self._new = self._new, []
        there = self._last.done() and all(map(_is_there, arrays))
        self._last = self._at_once(arrays) if there else self._pool.submit(_moment, arrays)
        return self._last

    def finish(self) -> None:
        """Wait for all marks; the thread ends."""
        self._pool.shutdown()

    def failed(self, marks: list[Any]) -> tuple[int, Exception] | None:
        errors = ((i, mark.exception()) for i, mark in enumerate(marks))
        return next(((i, error) for i, error in errors if error), None)

    def seconds(self, marks: list[Mark]) -> list[float]:
        return [mark.result() - self._began for mark in marks]

    def _at_once(self, arrays: list[Any]) -> Mark:
        """The mark of what is there: the thread, which takes a while to wake, need not."""
        mark = Mark()
        try:
            mark.set_result(_moment(arrays))
        except Exception as error:
            mark.set_exception(error)
        return mark


def _is_there(x: Any) -> bool:
    if isinstance(x, Future):
        return x.done()
    # Random keys do not tell: they are waited for.
    return getattr(x, "is_ready", bool)()


def _moment(of: list[Any]) -> float:
    """The moment at which arrays and marks are there."""
    for x in of:
        x.result() if isinstance(x, Future) else x.block_until_ready()
    return time.perf_counter()
