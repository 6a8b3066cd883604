"""Messages between the processes of a run: how they meet, a socket, and a `Transport` over sockets.

A message is two pickles around the memory of its arrays:

    | sizes of the arrays | array | array | ... | all else |
"""

import io
import os
import pickle
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import cloudpickle
import numpy as np

from pipelab.runtime.stage import Device
from pipelab.runtime.transport import Key, Message, Transport, add_up, lost
from pipelab.runtime.worker import Job, RunError

MEETING = 30.0  # seconds within which a process has to answer, or to call
AT_ONCE = 1e-4  # seconds: a receive that takes less did not wait
PARTS = 512  # of a message that the kernel takes at a time

Exchange = Callable[[Any], list[Any]]  # what every process gives (JSON), in their order
Ends = tuple[int, int]  # of a connection: the own one and the other


# ---- meeting


def connect(
    me: int, pairs: Sequence[Ends], homes: Sequence[int], exchange: Exchange
) -> dict[Ends, socket.socket]:
    """The sockets of process `me`, by their ends (such as ranks); `homes` are the ends' processes.

    All processes call this, with the same pairs. RunError where another cannot be reached.
    """
    both_ways = [*pairs, *((b, a) for a, b in pairs)]
    mine = [(own, other) for own, other in both_ways if homes[own] == me != homes[other]]
    # [1] where all are; a key, which process 0 draws, keeps out strangers
    addresses, keys = zip(*exchange([_address(), secrets.token_hex()]), strict=True)
    here = addresses[me] if len({*addresses}) > 1 else "127.0.0.1"
    found = {}
    with socket.create_server((here, 0), backlog=len(mine) + 1) as server:
        ports = exchange(server.getsockname())
        server.settimeout(MEETING)
        try:
            # [2] call the ends before the own one: that does not wait for the answer
            for own, other in mine:
                if own > other:
                    call = socket.create_connection(tuple(ports[homes[other]]), MEETING)
                    call.sendall(f"{keys[0]}{own:9}{other:9}".encode())
                    found[own, other] = call
            # [3] answer those after it; a stranger says something else, or nothing
            hellos = {f"{keys[0]}{b:9}{a:9}".encode(): (a, b) for a, b in mine if a < b}
            while len(found) < len(mine):
                call, _ = server.accept()
                call.settimeout(MEETING / 10)
                try:
                    found[hellos[call.recv(len(keys[0]) + 18)]] = call
                except (KeyError, OSError):
                    call.close()
        except OSError as error:
            other = min({*mine} - {*found})[1]
            text = f"process {me} cannot reach process {homes[other]}: {error}"
            raise RunError(text) from error
    for call in found.values():
        call.settimeout(None)
        call.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return found


def _address() -> str:
    """This host's address towards others: from which it calls the launcher's, or else anybody."""
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "192.0.2.1"), 1))  # no packet is sent
        return probe.getsockname()[0]
    return "127.0.0.1"


def pairs_of_ranks(job: Job) -> list[Ends]:
    """Ranks that send each other outputs, gradients, news or sums, in one order for all."""
    s, count = job.schedule, job.replicas
    home = s.device_of
    rows = {(home[s.inputs[i]], home[i]) for i in s.crossing}  # type: ignore[index]
    for stage, others in job.partners.items():
        rows |= {(s.placement[stage], s.placement[other]) for other in others}
    pairs = {(a * count + r, b * count + r) for a, b in rows for r in range(count)}
    for row in range(s.devices):
        pairs |= {(row * count + r, row * count + q) for r in range(count) for q in range(r)}
    return sorted({(min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]})


# ---- messages


class Link:
    """A socket to another rank, which nobody else at this end reads or writes.

    A write does not wait for the reader: what the kernel does not take at once is left to a thread,
    or two ranks that send each other more than that would wait for ever.

    reduce  how a library's arrays are pickled: as pickle's reducer_override
    """

    def __init__(self, connection: socket.socket, reduce: Callable[[Any], Any]) -> None:
        self.socket, self._reduce = connection, reduce
        self._file = connection.makefile("rb")  # mostly a message is one system call
        self._thread = ThreadPoolExecutor(1, "pipelab sends")
        self._sending = self._thread.submit(self._send, [])

    def write(self, message: Any) -> None:
        """Send a message. Lost if the other end is closed."""
        parts = _packed(message, self._reduce)
        if self._sending.done():
            with lost(OSError), suppress(BlockingIOError):
                self._send(parts, socket.MSG_DONTWAIT)
        if parts:
            self._sending = self._thread.submit(self._send, parts)

    def read(self) -> Any:
        """The next message; waits for it. Lost if the other end is closed."""
        with lost(OSError, EOFError, pickle.UnpicklingError):
            buffers = [np.empty(size, np.uint8) for size in pickle.load(self._file)]
            for buffer in buffers:
                self._file.readinto(buffer.data)
            return pickle.load(self._file, buffers=buffers)

    def end(self) -> None:
        """Let no thread wait on the socket any more, here and at the other end."""
        with suppress(OSError):  # the other end is closed
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """When the kernel has all that was sent."""
        self._thread.shutdown()
        self._file.close()
        self.socket.close()

    def _send(self, parts: list[memoryview], flags: int = 0) -> None:
        """Send the parts; the list is what has not been sent yet."""
        while parts:
            sent = self.socket.sendmsg(parts[:PARTS], (), flags)
            while parts and sent >= len(parts[0]):
                sent -= len(parts.pop(0))
            if sent:
                parts[0] = parts[0][sent:]


class _Pickler(cloudpickle.Pickler):
    """Puts the memory of arrays aside, uncopied.

    by_value  whether types of a notebook, which the receiver cannot import, are pickled as a whole.
              By reference it is the receiver's own type, which `isinstance` knows, and quicker
    """

    def __init__(self, reduce: Callable[[Any], Any], by_value: bool) -> None:
        self.file = io.BytesIO()
        self.buffers: list[pickle.PickleBuffer] = []
        super().__init__(self.file, buffer_callback=self.buffers.append)
        self.reduce, self.by_value = reduce, by_value

    def reducer_override(self, value: Any) -> Any:
        reduced = self.reduce(value)
        by_value = reduced is NotImplemented and self.by_value
        return super().reducer_override(value) if by_value else reduced


def _packed(message: Any, reduce: Callable[[Any], Any]) -> list[memoryview]:
    """The parts of a message."""
    pickler = _Pickler(reduce, by_value=False)
    try:
        pickler.dump(message)
    except (pickle.PicklingError, AttributeError):
        pickler = _Pickler(reduce, by_value=True)
        pickler.dump(message)
    arrays = [buffer.raw() for buffer in pickler.buffers]
    sizes = pickle.dumps([len(array) for array in arrays])
    return [memoryview(sizes), *arrays, pickler.file.getbuffer()]


# ---- a transport


class Wire(Transport):
    """The transport of one process's rows, which have a mailbox each.

    A row that wants a message of another process reads the link to its sender until it has come, in
    its own thread: the kernel keeps what comes meanwhile, and no other thread has to be woken.

    began  the run's time zero on time.perf_counter, from when on arrivals are timed; None if the
           messages say it (paced)
    """

    began: float | None = None

    def __init__(self, job: Job, links: Mapping[Ends, Any]) -> None:
        """`job` is one of the process's; `links` are by ranks."""
        super().__init__(job.schedule.devices)
        self._job, self._links = job, links

    def close(self) -> None:
        """Close it, when the others can have all that was sent."""
        for link in self._links.values():
            link.close()

    def send(self, key: Key, device: int, message: Message) -> None:
        link = self._link(self._source(key), device)
        if link:
            self._unless_ended(link.write, (key, *message))
        else:
            super().send(key, device, message)

    def receive(self, key: Key, device: int) -> Message:
        link = self._link(device, self._source(key))
        if not link:
            return super().receive(key, device)
        box = self._boxes[device]
        while key not in box:
            asked = time.perf_counter()
            found, payload, at = self._unless_ended(link.read)
            # When it came: if it was not waited for, only the time of sending is known.
            now = time.perf_counter()
            if self.began is not None and now - asked > AT_ONCE:
                at = now - self.began
            box[found] = Message(payload, at)
        return box.pop(key)

    def sum_over_replicas(self, key: Key, device: int, parts: list[Any], home: Device) -> list[Any]:
        # They tell each other the same things in the same order, so that no key is needed.
        first = device * self._job.replicas
        ranks = range(first, first + self._job.replicas)
        links = [self._links.get((first + self._job.replica, other)) for other in ranks]
        own = home.give(parts)
        for link in filter(None, links):
            self._unless_ended(link.write, own)
        return add_up(home.take(self._unless_ended(link.read) if link else own) for link in links)

    def abort(self) -> None:
        super().abort()
        for link in self._links.values():
            link.end()

    def _source(self, key: Any) -> int:
        """The row that sends a message."""
        if isinstance(key, int):
            return self._job.schedule.device_of[key]
        return self._job.schedule.placement[key[0]]

    def _link(self, row: int, other: int) -> Any:
        """From a row of this process to one of another."""
        count, replica = self._job.replicas, self._job.replica
        return self._links.get((row * count + replica, other * count + replica))

    def _unless_ended(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The call's value; if the run has ended meanwhile, nothing else counts."""
        try:
            return call(*arguments)
        finally:
            self.sleep(0)
