"""Connections between the processes of a run: how they meet, and messages on a socket.

A message is a pickle, in a block that mostly has room for it, and the bytes of the arrays in it:

    | size of the pickle, pickle, nothing | what had no room | array | array | ...
"""

import io
import os
import pickle
import secrets
import socket
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

import cloudpickle

from pipelab.executors import clock
from pipelab.executors.worker import RunError

MEETING = 30.0  # seconds within which all processes have to have called
HEAD = struct.Struct("=q")
BLOCK = 512  # bytes
PARTS = 512  # of a message that the kernel takes at a time

Fill = Callable[[Any], None]  # fills a writable buffer with the bytes that come next
Exchange = Callable[[Any], list[Any]]  # what every process gives (JSON), in their order


# ---- meeting


class Line(NamedTuple):
    """A connection that two processes, first < second, will have; its name tells it from others."""

    first: int
    second: int
    name: str


def connect(me: int, lines: Sequence[Line], exchange: Exchange) -> dict[Line, Connection]:
    """The connections of process `me`; all processes call this, with the same lines.

    The second process of a line calls, the first one answers. RunError, in all of them, where two
    cannot reach each other.
    """
    mine = [line for line in lines if me in line[:2]]
    # [1] who is there; the key that process 0 draws keeps out others
    networks, keys = zip(*exchange([_network(), secrets.token_hex()]), strict=True)
    key = bytes.fromhex(keys[0])
    # [2] every process opens a port, tells the others, calls those before it, answers the rest
    here = "127.0.0.1" if len(set(networks)) == 1 else _address()
    with Listener((here, 0), backlog=len(mine) + 1, authkey=key) as listener:
        addresses = exchange(listener.address)
        found, problem = _meet(listener, addresses, mine, me, key)
        problems = exchange(problem)
    # [3] go on only if all have found all
    for number, problem in enumerate(problems):
        if problem:
            for connection in found.values():
                connection.close()
            raise RunError(f"the processes cannot reach each other: process {number}: {problem}")
    return found


def _meet(
    listener: Listener, addresses: Sequence[Any], mine: Sequence[Line], me: int, key: bytes
) -> tuple[dict[Line, Connection], str]:
    """This process's connections, and what went wrong, or ""."""
    found: dict[Line, Connection] = {}

    def answer() -> None:
        while len(found) < len(mine):
            with suppress(AuthenticationError, EOFError):  # somebody else
                connection = listener.accept()
                found[Line(*connection.recv())] = connection

    try:
        for line in mine:
            if line.second == me:
                found[line] = Client(tuple(addresses[line.first]), authkey=key)
                found[line].send(tuple(line))
        answering = Thread(target=answer, daemon=True)
        answering.start()
        answering.join(MEETING)
    except Exception as error:
        return found, f"{type(error).__name__}: {error}"[:500]
    missing = [line.second for line in mine if line not in found]
    return found, f"process {min(missing)} has not called within {MEETING:g} s" if missing else ""


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
    found = socket.gethostbyname(socket.gethostname())
    if "MASTER_ADDR" in os.environ or found.startswith("127."):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
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
        with suppress(OSError):  # not every socket is TCP's
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.arrays = arrays
        self._thread = ThreadPoolExecutor(1, "pipelab sends")  # starts when it is first needed
        self._sending: Future[None] | None = None

    def fileno(self) -> int:
        return self.socket.fileno()

    def write(self, message: Any) -> None:
        """Send a message. ConnectionError if this or an earlier one was lost."""
        parts = _packed(message, self.arrays)
        if not self._sending or self._sending.done():
            self.settle()
            parts = self._send_now(parts)
        if parts:
            self._sending = self._thread.submit(self._send, parts)

    def read(self) -> Any:
        """The next message; waits for it. ConnectionError if the other end is closed."""
        block = bytearray(BLOCK)
        self._fill(block)
        rest = bytearray(max(0, HEAD.unpack_from(block)[0] - BLOCK))
        self._fill(rest)
        pickled = io.BytesIO(block + rest)
        pickled.seek(HEAD.size)
        return _Unpickler(pickled, self.arrays, self._fill).load()

    def settle(self) -> None:
        """Wait until the kernel has all messages. ConnectionError if one was lost."""
        if self._sending:
            self._sending.result()

    def end(self) -> None:
        """Let no thread wait on the socket any more, here and at the other end."""
        with suppress(OSError):  # the other end is closed
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._thread.shutdown()
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

    def _fill(self, buffer: Any) -> None:
        left = memoryview(buffer)
        while left:
            count = self.socket.recv_into(left, 0, socket.MSG_WAITALL)
            if not count:
                raise ConnectionResetError("the connection to another rank was closed")
            left = left[count:]


class _Pickler(cloudpickle.Pickler):
    """Pickles all but arrays.

    by_value  whether types of a notebook, which the receiver cannot import, are pickled as a whole.
              By reference it is the receiver's own type, which `isinstance` knows, and quicker
    """

    def __init__(self, arrays: Arrays, by_value: bool) -> None:
        self.file = io.BytesIO()
        self.file.write(bytes(HEAD.size))  # its place
        super().__init__(self.file)
        self.arrays, self.by_value = arrays, by_value
        self.found: list[Any] = []

    def persistent_id(self, value: Any) -> Any:
        described = self.arrays.describe(value)
        if described is not None:
            self.found.append(value)
        return described

    def reducer_override(self, value: Any) -> Any:
        return super().reducer_override(value) if self.by_value else NotImplemented


class _Unpickler(pickle.Unpickler):
    """Builds each array when the pickle comes to its place."""

    def __init__(self, pickled: io.BytesIO, arrays: Arrays, fill: Fill) -> None:
        super().__init__(pickled)
        self.arrays, self.fill = arrays, fill

    def persistent_load(self, described: Any) -> Any:
        return self.arrays.build(described, self.fill)


def _packed(message: Any, arrays: Arrays) -> list[memoryview]:
    """A message's bytes: its size and its pickle, then its arrays."""
    pickler = _Pickler(arrays, by_value=False)
    try:
        pickler.dump(message)
    except (pickle.PicklingError, AttributeError):
        pickler = _Pickler(arrays, by_value=True)
        pickler.dump(message)
    size = pickler.file.tell()
    pickler.file.write(bytes(max(0, BLOCK - size)))
    pickled = pickler.file.getbuffer()
    HEAD.pack_into(pickled, 0, size)
    return [pickled, *map(arrays.content, pickler.found)]
