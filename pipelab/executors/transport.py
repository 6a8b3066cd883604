"""Messages between workers of one process: a mailbox per device, keyed by the action whose output it is.

A plain queue per pair of devices would not do: a consumer may want outputs in another order than they were made.
"""

from __future__ import annotations

from threading import Condition
from typing import Any, NamedTuple, Protocol


class Message(NamedTuple):
    payload: Any
    at: float  # when it was sent: seconds since the run began (the sender's paced clock in a paced run)


class Aborted(Exception):
    """Another worker failed; this one ends quietly."""


class Transport(Protocol):
    """What the worker needs of a transport. Actions are named by their flat index in the table."""

    def send(self, source: int, device: int, message: Message) -> None:
        """Hand the output of action `source` to `device`; does not wait for the receiver."""

    def receive(self, source: int, device: int) -> Message:
        """The output of action `source`, on `device`; waits for it. Raises Aborted when the run has ended."""

    def abort(self) -> None:
        """End the run: whoever waits, or will wait, gets Aborted."""


class Mailboxes:
    """A `Transport` between threads: payloads go by reference."""

    def __init__(self, devices: int) -> None:
        self._changed = [Condition() for _ in range(devices)]
        self._boxes: list[dict[int, Message]] = [{} for _ in range(devices)]
        self._aborted = False

    def send(self, source: int, device: int, message: Message) -> None:
        with self._changed[device]:
            self._boxes[device][source] = message
            self._changed[device].notify()

    def receive(self, source: int, device: int) -> Message:
        box = self._boxes[device]
        with self._changed[device]:
            self._changed[device].wait_for(lambda: source in box or self._aborted)
            if self._aborted:
                raise Aborted
            return box.pop(source)

    def abort(self) -> None:
        self._aborted = True
        for changed in self._changed:
            with changed:
                changed.notify_all()
