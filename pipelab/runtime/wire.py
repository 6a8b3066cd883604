"""Messages between the processes of a run: a `Transport` over links, which the launcher makes."""

import io
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import cloudpickle

from pipelab.runtime.transport import Key, Message, Transport
from pipelab.runtime.worker import Job

AT_ONCE = 1e-4  # seconds: a receive that takes less did not wait

Ends = tuple[int, int]  # of a link: the own one and the other, such as ranks


class Link(Protocol):
    """A link to another rank, which nothing else at this end reads, writes or waits on."""

    def write(self, message: tuple[Key, Any, float]) -> None:
        """Send a message; does not wait for the reader. Lost if the other end is closed."""

    def read(self) -> tuple[Key, Any, float]:
        """The next message; waits for it. Lost if the other end is closed."""

    def end(self) -> None:
        """Let no thread wait for it any longer, if possible."""
        return None

    def close(self) -> None:
        """When the other end can have all that was sent."""


def pairs_of_ranks(job: Job) -> list[Ends]:
    """Ranks that send each other outputs, gradients or news, in one order for all."""
    s, count = job.schedule, job.replicas
    row_of = s.device_of
    rows = {(row_of[s.inputs[i]], row_of[i]) for i in s.crossing}  # type: ignore[index]
    for stage, others in job.partners.items():
        rows |= {(s.placement[stage], s.placement[other]) for other in others}
    pairs = {(min(pair), max(pair)) for pair in rows}
    return sorted((a * count + r, b * count + r) for a, b in pairs if a != b for r in range(count))


class _Apart(cloudpickle.Pickler):
    """Puts arrays aside.

    select    what is to be put aside for a value, or NotImplemented; None: it stays here
    by_value  whether types of a notebook, which the receiver cannot import, are pickled as a whole.
              By reference it is the receiver's own type, which `isinstance` knows, and quicker
    """

    def __init__(self, file: io.BytesIO, select: Callable[[Any], Any], by_value: bool) -> None:
        super().__init__(file)
        self.select, self.by_value = select, by_value
        self.arrays: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        array = self.select(value)
        if array is NotImplemented:
            return None
        if array is None:
            return -1
        self.arrays.append(array)
        return len(self.arrays) - 1

    def reducer_override(self, value: Any) -> Any:
        return super().reducer_override(value) if self.by_value else NotImplemented


class _Whole(pickle.Unpickler):
    def __init__(self, skeleton: bytes, arrays: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(skeleton))
        self.arrays = arrays

    def persistent_load(self, number: int) -> Any:
        return self.arrays[number] if number >= 0 else None


def apart(message: Any, select: Callable[[Any], Any]) -> tuple[bytes, list[Any]]:
    """A message as its skeleton, a pickle of all but its arrays, and these."""
    for by_value in (False, True):
        file = io.BytesIO()
        pickler = _Apart(file, select, by_value)
        try:
            pickler.dump(message)
            break
        except (pickle.PicklingError, AttributeError):
            if by_value:
                raise
    return file.getvalue(), pickler.arrays


def whole(skeleton: bytes, arrays: Sequence[Any]) -> Any:
    """A message from its parts."""
    return _Whole(skeleton, arrays).load()


class Wire(Transport):
    """The transport of one process's rows, which have a mailbox each.

    A row that needs a message from another process reads the sender's link in its own thread until
    it arrives: the kernel buffers messages meanwhile, and no other thread needs waking.
    """

    def __init__(self, job: Job, links: Mapping[Ends, Link]) -> None:
        """`job` is one of the process's; `links` are by ranks."""
        super().__init__(job.schedule.devices)
        self._job, self._links = job, links

    def close(self) -> None:
        """Close it, when the others can have all that was sent."""
        for link in self._links.values():
            link.close()

    def send(self, key: Key, row: int, message: Message) -> None:
        link = self._link(self._source(key), row)
        if link:
            self._unless_ended(link.write, (key, *message))
        else:
            super().send(key, row, message)

    def receive(self, key: Key, row: int) -> Message:
        link = self._link(row, self._source(key))
        if not link:
            return super().receive(key, row)
        box = self._boxes[row]
        while key not in box:
            asked = time.perf_counter()
            arrived, payload, at = self._unless_ended(link.read)
            # When it came: if it was not waited for, only the time of sending is known.
            now = time.perf_counter()
            if self.began is not None and now - asked > AT_ONCE:
                at = now - self.began
            box[arrived] = Message(payload, at)
        return box.pop(key)

    def abort(self) -> None:
        super().abort()
        for link in self._links.values():
            link.end()

    def _source(self, key: Any) -> int:
        """The row that sends a message, whose key begins with a stage of it."""
        return self._job.schedule.placement[key[0]]

    def _link(self, row: int, other: int) -> Link | None:
        """From a row of this process to one of another."""
        count, replica = self._job.replicas, self._job.replica
        return self._links.get((row * count + replica, other * count + replica))

    def _unless_ended(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The call's value; if the run has ended meanwhile, nothing else counts."""
        try:
            return call(*arguments)
        finally:
            self.sleep(0)
