"""Messages between workers of one process: a queue per row, and a box keyed by what sends.

A queue alone would not do: a consumer may want outputs in another order than they were made.
"""

from collections.abc import Hashable, Iterable, Sequence
from queue import SimpleQueue
from threading import Event
from typing import Any, NamedTuple

from pipelab.runtime.stage import Device

Key = Hashable


class Message(NamedTuple):
    """A payload, and its arrival in seconds since the run began.

    In a paced run, its sending, by the sender's paced clock.
    """

    payload: Any
    at: float


class Lost(ConnectionError):
    """A message to or from another process was lost, usually because that one failed."""


class Aborted(Exception):
    """Another worker failed; this one ends quietly."""


class Transport:
    """Messages between the devices of one pipeline, and sums over its replicas: mailboxes.

    Payloads go by reference, between workers of one process; `wire.Wire` also sends them to other
    processes. Messages, by their keys, which begin with the stage that sends:

        (stage, "output", micro-batch, next stage)        after a forward
        (stage, "gradient", micro-batch, stage before)    after B or I
        (stage, "news", update, other stage)              after its last backward of an update, to
                                                          those whose updates wait for it
        (stage, "buffers", update, copy)                  then, from the first copy to the others
        ((stage, update), replica)                        then, sums to every replica

    began     the run's time zero on time.perf_counter, the origin of arrivals; None if the messages
              carry them (paced)
    ended     set when the run has ended
    replicas  the transports of all replicas of the pipeline, this one's among them, in order
    """

    began: float | None = None

    def __init__(self, rows: int) -> None:
        self._queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in range(rows)]
        self._boxes: list[dict[Key, Message]] = [{} for _ in range(rows)]
        self.ended = Event()
        self.replicas: Sequence[Transport] = [self]

    def send(self, key: Key, row: int, message: Message) -> None:
        """Hand a message to a row; does not wait for the receiver."""
        self._queues[row].put((key, message))

    def receive(self, key: Key, row: int) -> Message:
        """The row's message of that key, in its only thread that receives; waits for it.

        Aborted when the run has ended.
        """
        box = self._boxes[row]
        while key not in box and not self.ended.is_set():
            arrived, message = self._queues[row].get()
            box[arrived] = message
        # Even if the message is there: a run that has ended starts nothing more.
        self.sleep(0)
        # A message has one reader: popped, its arrays live no longer than that one needs them.
        return box.pop(key)

    def sum_over_replicas(self, key: Key, row: int, sums: list[Any], device: Device) -> list[Any]:
        """A row's sums, on its device, added up one by one over all replicas; waits for them."""
        # Everybody sends to everybody, itself too, and adds up in the same order: sums of floats
        # depend on it, and replicas have to stay equal to the last bit.
        me = self.replicas.index(self)
        for replica in self.replicas:
            replica.send((key, me), row, Message(device.give(sums), 0.0))
        received = [self.receive((key, r), row).payload for r in range(len(self.replicas))]
        return add_up(map(device.take, received))

    def from_first_replica(self, key: Key, row: int, payload: Any, device: Device) -> Any:
        """The payload that the first replica gives, on the row's device of each; waits for it."""
        first, *others = self.replicas
        if self is not first:
            return device.take(self.receive(key, row).payload)
        for replica in others:
            replica.send(key, row, Message(device.give(payload), 0.0))
        return payload

    def sleep(self, seconds: float) -> None:
        """Wait, or only check if `seconds` is not positive: Aborted when the run has ended."""
        if self.ended.wait(seconds) if seconds > 0 else self.ended.is_set():
            raise Aborted

    def abort(self) -> None:
        """End the run: present and future waits raise Aborted."""
        # Before anybody is woken: who comes to wait only now sees it as well.
        self.ended.set()
        for queue in self._queues:
            queue.put((None, None))


def add_up(of_replicas: Iterable[list[Any]]) -> list[Any]:
    """The sums of the replicas' one by one, in one order, to be equal in all of them."""
    # From the first on: sum's own 0 would be one more addition of arrays.
    return [sum(same[1:], same[0]) for same in zip(*of_replicas, strict=True)]


class lost:
    """Lost instead of these errors."""

    # No generator, which would take several times as long, three times a message.

    def __init__(self, *errors: type[Exception]) -> None:
        self.errors = errors

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, self.errors):
            raise Lost(f"a message to or from another process was lost: {error!r}") from error
