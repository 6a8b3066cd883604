"""Connections between the processes of a run: how they meet, and messages on a socket.

A message is two pickles, with the bytes of its arrays between them:

    | what the arrays are | array | array | ... | the message, with numbers for its arrays |
"""

import io
import os
import pickle
import secrets
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, answer_challenge, deliver_challenge
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import cloudpickle

from pipelab.executors import clock
from pipelab.executors.transport import Lost
from pipelab.executors.worker import RunError

MEETING = 30.0  # seconds within which all processes have to have called
PARTS = 512  # of a message that the kernel takes at a time

Fill = Callable[[Any], None]  # fills a writable buffer with the bytes that come next
Exchange = Callable[[Any], list[Any]]  # what every process gives (JSON), in their order


# ---- meeting


class Line(NamedTuple):
    """A connection that two processes, first < second, will have; its name tells it from others."""

    first: int
    second: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} of processes {self.first} and {self.second}"


def connect(me: int, lines: Sequence[Line], exchange: Exchange) -> dict[Line, Connection]:
    """The connections of process `me`; all processes call this, with the same lines.

    The second process of a line calls, the first one answers. RunError, in all of them, where two
    cannot reach each other within MEETING seconds.
    """
    mine = [line for line in lines if me in line[:2]]
    # [1] who is there; the key that process 0 draws keeps out others
    networks, keys = zip(*exchange([_network(), secrets.token_hex()]), strict=True)
    here = "127.0.0.1" if len(set(networks)) == 1 else _address()
    # [2] every process opens a port, tells the others, calls those before it, answers the rest
    with socket.create_server((here, 0), backlog=len(mine) + 1) as server:
        addresses = exchange(server.getsockname())
        found, trouble = _meet(server, addresses, mine, me, bytes.fromhex(keys[0]))
    # [3] go on only if all have found all
    for number, problem in enumerate(exchange(trouble)):
        if problem:
            for connection in found.values():
                connection.close()
            raise RunError(f"the processes cannot reach each other: process {number}: {problem}")
    return found


def _meet(
    server: socket.socket, addresses: Sequence[Any], mine: Sequence[Line], me: int, key: bytes
) -> tuple[dict[Line, Connection], str]:
    """This process's connections, and what went wrong, or "".

    Whoever calls or is called may be anybody, or hang: each has a thread of its own.
    """
    found: dict[Line, Connection] = {}
    problems: list[str] = []

    def call(line: Line) -> None:
        try:
            connection = Client(tuple(addresses[line.first]), authkey=key)
            connection.send(tuple(line))
            found[line] = connection
        except Exception as error:
            problems.append(f"{type(error).__name__}: {error}")

    def answer(connection: Connection) -> None:
        with suppress(AuthenticationError, EOFError, OSError):  # else it is somebody else
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            found[Line(*connection.recv())] = connection

    for line in mine:
        if line.second == me:
            Thread(target=call, args=(line,), daemon=True).start()
    server.settimeout(0.01)
    deadline = time.monotonic() + MEETING
    while len(found) < len(mine) and not problems and time.monotonic() < deadline:
        with suppress(TimeoutError):
            called, _ = server.accept()
            called.setblocking(True)
            Thread(target=answer, args=(Connection(called.detach()),), daemon=True).start()
    missing = {*mine} - {*found}
    if missing and not problems:
        problems = [f"{min(missing)} is not connected within {MEETING:g} s"]
    return found, "; ".join(problems)


def _network() -> str:
    """Names this network stack: who shares it meets on loopback.

    Containers of one host may share its clock alone.
    """
    namespace = Path("/proc/self/ns/net")
    return clock.host() + (str(namespace.stat().st_ino) if namespace.exists() else "")


def _address() -> str:
    """This host's address towards others.

    The one from which it calls the launcher's MASTER_ADDR; without that its name's, or where that
    stands for loopback, the one from which it calls out.
    """
    found = "127.0.0.1"
    with suppress(OSError):  # it has no name
        found = socket.gethostbyname(socket.gethostname())
    if "MASTER_ADDR" in os.environ or found.startswith("127."):
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ.get("MASTER_ADDR", "192.0.2.1"), 1))  # no packet is sent
            found = probe.getsockname()[0]
    return found


# ---- messages


class Arrays(ABC):
    """How a library's arrays travel on a link."""

    @abstractmethod
    def describe(self, value: Any) -> Any:
        """What the pickle has in the place of an array; None if the value is none."""

    @abstractmethod
    def content(self, array: Any) -> memoryview:
        """Its bytes, in host memory."""

    @abstractmethod
    def build(self, described: Any, fill: Fill) -> Any:
        """The array, whose bytes come next."""


class Link:
    """A socket to another device, which nobody else at this end reads or writes.

    A write does not wait for the reader: what the kernel does not take at once is left to a thread.
    """

    def __init__(self, connection: Connection, arrays: Arrays) -> None:
        self.socket = socket.socket(fileno=os.dup(connection.fileno()))
        connection.close()
        self.socket.setblocking(True)  # whatever the default is
        with suppress(OSError):  # not every socket is TCP's
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.arrays = arrays
        self._file = self.socket.makefile("rb")  # mostly a message is one system call
        # Starts when it is first needed.
        self._thread = ThreadPoolExecutor(1, "pipelab sends", initializer=_leave_core)
        self._sending: Future[None] | None = None

    def write(self, message: Any) -> None:
        """Send a message. Lost if this or an earlier one is."""
        parts = _packed(message, self.arrays)
        if not self._sending or self._sending.done():
            self.settle()
            with _lost():
                parts = self._send_now(parts)
        if parts:
            self._sending = self._thread.submit(self._send, parts)

    def read(self) -> Any:
        """The next message; waits for it. Lost if the other end is closed."""
        with _lost():
            described = pickle.load(self._file)
            arrays = [self.arrays.build(each, self._fill) for each in described]
            unpickler = pickle.Unpickler(self._file)
            unpickler.persistent_load = arrays.__getitem__  # type: ignore[method-assign]
            return unpickler.load()

    def settle(self) -> None:
        """Wait until the kernel has all messages. Lost if one is."""
        if self._sending:
            with _lost():
                self._sending.result()

    def end(self) -> None:
        """Let no thread wait on the socket any more, here and at the other end."""
        with suppress(OSError):  # the other end is closed
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._thread.shutdown()
        self._file.close()
        self.socket.close()

    def _send_now(self, parts: list[memoryview]) -> list[memoryview]:
        """Send what can be sent without waiting; returns what is left."""
        try:
            sent = self.socket.sendmsg(parts[:PARTS], (), socket.MSG_DONTWAIT)
        except BlockingIOError:
            return parts
        while parts and sent >= len(parts[0]):
            sent -= len(parts.pop(0))
        return [parts[0][sent:], *parts[1:]] if parts else []

    def _send(self, parts: list[memoryview]) -> None:
        for part in parts:
            self.socket.sendall(part)

    def _fill(self, buffer: memoryview) -> None:
        if self._file.readinto(buffer) < len(buffer):
            raise EOFError


def _leave_core() -> None:
    """Use this process's cores, and not the one that the worker which starts this is pinned to."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, os.sched_getaffinity(os.getpid()))


@contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except (EOFError, pickle.UnpicklingError):  # within a message, or before it
        raise Lost("the connection to another process was closed") from None
    except OSError as error:
        raise Lost(f"a message to or from another process was lost: {error}") from error


class _Pickler(cloudpickle.Pickler):
    """Pickles all but arrays, which it finds.

    by_value  whether types of a notebook, which the receiver cannot import, are pickled as a whole.
              By reference it is the receiver's own type, which `isinstance` knows, and quicker
    """

    def __init__(self, arrays: Arrays, by_value: bool) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file)
        self.arrays, self.by_value = arrays, by_value
        self.found: list[Any] = []
        self.described: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        described = self.arrays.describe(value)
        if described is None:
            return None
        self.found.append(value)
        self.described.append(described)
        return len(self.found) - 1

    def reducer_override(self, value: Any) -> Any:
        return super().reducer_override(value) if self.by_value else NotImplemented


def _packed(message: Any, arrays: Arrays) -> list[memoryview]:
    """A message's bytes: what its arrays are, its arrays, and the rest."""
    pickler = _Pickler(arrays, by_value=False)
    try:
        pickler.dump(message)
    except (pickle.PicklingError, AttributeError):
        pickler = _Pickler(arrays, by_value=True)
        pickler.dump(message)
    described = memoryview(pickle.dumps(pickler.described))
    return [described, *map(arrays.content, pickler.found), pickler.file.getbuffer()]
