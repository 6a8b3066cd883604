"""Messages between the rows of several processes: a `Transport` over sockets."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipelab.executors.job import Job
from pipelab.executors.links import Arrays, Exchange, Line, Link, connect
from pipelab.executors.transport import Key, Mailboxes, Message
from pipelab.schedule import Schedule

AT_ONCE = 1e-4  # seconds: a receive that takes less did not wait


class Wire(Mailboxes):
    """The transport of one process's rows, which have a mailbox each.

    A row that wants a message of another process reads the link to its sender until it has come, in
    its own thread: the kernel keeps what comes meanwhile, and no other thread has to be woken.

    began  the run's time zero on time.perf_counter, from when on arrivals are timed; None if the
           messages say it (paced)
    """

    began: float | None = None

    def __init__(self, schedule: Schedule, links: Mapping[tuple[int, int], Link]) -> None:
        """`links` by (own row, other row)."""
        super().__init__(schedule.devices)
        self._schedule, self._links = schedule, links

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Close it, when nobody needs a message of this process any more."""
        if kind is not None:
            self.abort()
        for link in self._links.values():
            link.close()

    def send(self, key: Key, device: int, message: Message) -> None:
        link = self._links.get((self._source(key), device))
        if not link:
            super().send(key, device, message)
            return
        try:
            link.write((key, message))
        finally:
            self.sleep(0)  # if the run has ended, nothing else counts

    def receive(self, key: Key, device: int) -> Message:
        link = self._links.get((device, self._source(key)))
        if not link:
            return super().receive(key, device)
        box = self._boxes[device]
        while key not in box:
            asked = time.perf_counter()
            try:
                found, message = link.read()
            finally:
                self.sleep(0)  # if the run has ended, nothing else counts
            # When it came: if it was not waited for, only the time of sending is known.
            now = time.perf_counter()
            if self.began is not None and now - asked > AT_ONCE:
                message = message._replace(at=now - self.began)
            box[found] = message
        return box.pop(key)

    def settle(self) -> None:
        """Wait until all that was sent has left. Lost if it cannot."""
        for link in self._links.values():
            link.settle()

    def abort(self) -> None:
        super().abort()
        for link in self._links.values():
            link.end()

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
