"""Messages between the rows of several processes: a `Transport` over sockets."""

import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from selectors import EVENT_READ, DefaultSelector
from threading import Event
from typing import Any

from pipelab.executors.device import Device
from pipelab.executors.job import Job
from pipelab.executors.links import Arrays, Exchange, Line, Link, connect
from pipelab.executors.transport import Key, Message, Transport
from pipelab.schedule import Schedule

AT_ONCE = 1e-4  # seconds: a receive that takes less did not wait
RINGS = 4096  # of a bell that are heard at once


class Wire(Transport):
    """The transport of one process's rows.

    A row that wants a message reads its own links until it has come, in its own thread: the kernel
    keeps what comes meanwhile, and no other thread has to be woken first.

    began  the run's time zero on time.perf_counter, from when on arrivals are timed; None if the
           messages say it (paced)
    """

    began: float | None = None

    def __init__(
        self, schedule: Schedule, rows: Sequence[int], links: Mapping[tuple[int, int], Link]
    ) -> None:
        """`links` by (own row, other row)."""
        self._schedule, self._links = schedule, links
        self._here: dict[int, dict[Key, Message]] = {row: {} for row in rows}  # and not yet taken
        self.ended = Event()
        self._readable = {row: DefaultSelector() for row in rows}
        # Rows of this process hand over by reference, and wake each other by a byte.
        self._bells = {row: socket.socketpair() for row in rows if len(rows) > 1}
        for row, (ear, mouth) in self._bells.items():
            mouth.setblocking(False)
            self._readable[row].register(ear, EVENT_READ)
        for (row, _), link in links.items():
            self._readable[row].register(link, EVENT_READ, link)

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Close it, when nobody needs a message of this process any more."""
        if kind is not None:
            self.abort()
        for link in self._links.values():
            link.close()
        for pair in self._bells.values():
            for end in pair:
                end.close()
        for selector in self._readable.values():
            selector.close()

    def send(self, key: Key, device: int, message: Message) -> None:
        source = self._source(key)
        if device in self._here:
            self._here[device][key] = message
            if device != source:
                self._ring(device)
            return
        try:
            self._links[source, device].write((key, message))
        finally:
            self.sleep(0)  # if the run has ended, nothing else counts

    def receive(self, key: Key, device: int) -> Message:
        here = self._here[device]
        while key not in here:
            try:
                self._read(device)
            finally:
                self.sleep(0)  # if the run has ended, nothing else counts
        return here.pop(key)

    def _read(self, device: int) -> None:
        """Wait until something has come for a row, and put it with what is here."""
        asked = time.perf_counter()
        for found, _ in self._readable[device].select():
            if found.data is None:  # the bell; the message is here already
                found.fileobj.recv(RINGS)  # type: ignore[union-attr]
                continue
            key, message = found.data.read()
            # When it came: if it was not waited for, only the time of sending is known.
            now = time.perf_counter()
            if self.began is not None and now - asked > AT_ONCE:
                message = message._replace(at=now - self.began)
            self._here[device][key] = message

    def sum_over_replicas(self, key: Key, device: int, parts: list[Any], home: Device) -> list[Any]:
        raise NotImplementedError("replicas")

    def settle(self) -> None:
        """Wait until all that was sent has left. Lost if it cannot."""
        for link in self._links.values():
            link.settle()

    def abort(self) -> None:
        self.ended.set()
        for link in self._links.values():
            link.end()
        for row in self._bells:
            self._ring(row)

    def _ring(self, row: int) -> None:
        with suppress(BlockingIOError):  # so often that it is heard anyway
            self._bells[row][1].send(b"!")

    def _source(self, key: Any) -> int:
        """The row that sends a message."""
        if isinstance(key, int):
            return int(self._schedule.columns.device[key])
        return self._schedule.placement[key[0]]


def open_links(
    job: Job,
    me: int,
    processes: Sequence[int],
    exchange: Exchange,
    arrays: Callable[[int, int], Arrays],
) -> dict[tuple[int, int], Link]:
    """This process's links by (own row, other row), for all rows that tell each other anything.

    processes  of all ranks, see `Job.rank`
    arrays     (own row, other row) -> how they travel

    All processes call this.
    """
    ends = {}
    for replica in range(job.replicas):
        for a, b in pairs_of_rows(job):
            at = [processes[row * job.replicas + replica] for row in (a, b)]
            if at[0] != at[1]:
                ends[Line(min(at), max(at), f"{a}-{b} of replica {replica}")] = (a, b, at[0])
    links = {}
    for line, connection in connect(me, list(ends), exchange).items():
        a, b, of_a = ends[line]
        rows = (a, b) if of_a == me else (b, a)
        links[rows] = Link(connection, arrays(*rows))
    return links


def pairs_of_rows(job: Job) -> list[tuple[int, int]]:
    """Pairs of rows that send each other outputs, gradients or news."""
    s = job.schedule
    home = s.columns.device
    pairs = {(int(home[s.inputs[i]]), int(home[i])) for i in s.crossing}
    for stage, others in enumerate(job.partners):
        pairs |= {(s.placement[stage], s.placement[other]) for other in others}
    return sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]})
