"""A pipeline over processes of jax.distributed: sockets say what comes, jax.experimental.transfer brings the arrays."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from hashlib import sha256
from itertools import count
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils, transfer
from jax.sharding import SingleDeviceSharding

from pipelab.executors import clock
from pipelab.executors.job import Job
from pipelab.executors.result import Outcome
from pipelab.executors.threads import run_threads
from pipelab.executors.transport import Aborted, Key, Mailboxes, Message
from pipelab.executors.worker import RunError
from pipelab.schedule import Schedule

LEAVING = 2.0  # seconds that a process which failed waits for the others to hear of it
MEETING = 30.0  # seconds within which all processes have to have called


class Alone(AbstractContextManager):
    """A process that does all rows itself, on threads."""

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        return run_threads(jobs)

    def from_first(self, make: Callable[[], Any]) -> Any:
        return make()

    def __exit__(self, *_: object) -> None:
        """Nothing is open."""


class _Array(NamedTuple):
    """Stands for an array in a header."""

    shape: tuple[int, ...]
    dtype: np.dtype
    keys: str | None = None  # random keys travel as their words; this is how they are made

    @classmethod
    def of(cls, array: jax.Array) -> _Array:
        if _is_key(array):
            words = jax.eval_shape(jax.random.key_data, array)
            return cls(words.shape, words.dtype, str(jax.random.key_impl(array)))
        return cls(array.shape, array.dtype)


class _Peer:
    """Another process: the connection to it, its transfer server, and what it has told."""

    def __init__(self, number: int, connection: Connection, server: Any, same_host: bool) -> None:
        self.number, self.connection, self.server, self.same_host = number, connection, server, same_host
        self.values: SimpleQueue = SimpleQueue()
        self.reader: Thread | None = None
        self._lock = Lock()

    def tell(self, what: str, *rest: Any) -> None:
        with self._lock:
            self.connection.send((what, rest))

    def hear(self) -> tuple[str, tuple]:
        """The next thing it says; the end of the connection counts as a failure."""
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            return "failed", (f"process {self.number} is gone, without a word", None, None)


class Wire(AbstractContextManager):
    """One pipeline over the processes of jax.distributed, each of which makes a `Wire`; its `Transport` at the same time.

    devices  of the schedule's rows. A process does the rows whose device is its own, in threads; messages among them stay in
             its mailboxes. Another process is sent a header, with the shapes of the arrays, which it then fetches straight
             onto the taker's device.

    The first process that fails tells the others, and all raise its RunError; ValueError where they were called differently.
    """

    def __init__(self, schedule: Schedule, devices: Sequence[jax.Device]) -> None:
        self._devices, self._me = devices, jax.process_index()
        self._call = sha256(schedule.to_csv().encode()).hexdigest()
        self._boxes, self._numbers = Mailboxes(len(devices)), count()
        self._peers: dict[int, _Peer] = {}
        self._failure: RunError | None = None
        self._server: Any = None
        self._began, self._paced = 0.0, False

    def __enter__(self) -> Wire:
        self._connect()
        return self

    @property
    def first(self) -> bool:
        return self._me == 0

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Do this process's jobs; returns all outcomes: in process 0 whole, elsewhere only its own with weights and steps."""
        self._paced = jobs[0].pace is not None
        try:
            mine = run_threads(jobs, [self], self._start)
        except Aborted:
            raise self._failure or RunError("the run was ended") from None
        own = {outcome.row for outcome in mine}
        if not self.first:
            self._tell(self._peers[0], "value", mine)
            return mine + [o for o in self._value(self._peers[0]) if o.row not in own]
        mine += [o for peer in self._peers.values() for o in self._value(peer)]
        self._share([replace(o, steps={}, weights={}) for o in mine])
        return mine

    def from_first(self, make: Callable[[], Any]) -> Any:
        """What process 0 makes, in every process."""
        return self._share(make()) if self.first else self._value(self._peers[0])

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        said: tuple = ("bye",)
        if error is not None:
            known = (
                error
                if isinstance(error, RunError)
                else RunError(f"process {self._me}: {type(error).__name__}: {error}".rstrip(": "))
            )
            said = ("failed", str(known), known.device, known.action)
        for peer in self._peers.values():
            with suppress(OSError):
                peer.tell(*said)
        try:
            for peer in self._peers.values():
                if peer.reader:
                    peer.reader.join(None if error is None else LEAVING)
        finally:
            for peer in self._peers.values():
                if not peer.reader or not peer.reader.is_alive():
                    peer.connection.close()

    # ---- a Transport

    def send(self, key: Key, device: int, message: Message) -> None:
        process = self._devices[device].process_index
        if process == self._me:
            return self._boxes.send(key, device, message)
        number, arrays = next(self._numbers), [x for x in jax.tree.leaves(message.payload) if isinstance(x, jax.Array)]
        if arrays:
            self._server.await_pull(number, [jax.random.key_data(x) if _is_key(x) else x for x in arrays])
        outline = jax.tree.map(lambda x: _Array.of(x) if isinstance(x, jax.Array) else x, message.payload)
        try:
            self._tell(self._peers[process], "message", key, device, number, outline, message.at)
        except RunError:
            raise Aborted from None

    def receive(self, key: Key, device: int) -> Message:
        return self._boxes.receive(key, device)

    def sum_over_replicas(self, key: Key, device: int, parts: list[Any]) -> list[Any]:
        raise NotImplementedError("replicas are not on jax")

    def sleep(self, seconds: float) -> None:
        self._boxes.sleep(seconds)

    def abort(self) -> None:
        self._boxes.abort()

    # ---- between processes

    def _connect(self) -> None:
        """Meet every other process: addresses, and the key that connections ask for, go by a collective of JAX's."""
        told = _exchange([clock.host(), _network(), secrets.token_hex(), self._call])
        hosts, networks, keys, calls = zip(*told, strict=True)
        if other := [number for number, call in enumerate(calls) if call != calls[0]]:
            raise ValueError(f"process {other[0]} runs another schedule than process 0: call run with the same one in all")
        here = "127.0.0.1" if len(set(networks)) == 1 else _address()
        home = next(device for device in self._devices if device.process_index == self._me)
        self._server = transfer.start_transfer_server(home.client, f"{here}:0", [f"{here}:0"])
        with Listener((here, 0), backlog=len(hosts), authkey=bytes.fromhex(keys[0])) as listener:
            addresses, servers = zip(*_exchange([listener.address, self._server.address()]), strict=True)
            connections, problem = _meet(listener, addresses, self._me, bytes.fromhex(keys[0]))
            problems = _exchange(problem)
        for number, connection in sorted(connections.items()):
            server = self._server.connect(servers[number])
            self._peers[number] = _Peer(number, connection, server, hosts[number] == hosts[self._me])
        if any(problems):
            number = next(number for number, problem in enumerate(problems) if problem)
            raise RunError(f"the processes cannot reach each other: process {number}: {problems[number]}")

    def _start(self) -> float:
        """The run's time zero on this process's clock, at the same moment in all processes."""
        if self.first:
            for peer in self._peers.values():
                for _ in range(0 if peer.same_host else clock.ROUNDS):
                    self._hear(peer, "clock")
                    self._tell(peer, "time", time.perf_counter())
                self._hear(peer, "ready")
            began = time.perf_counter() + 0.01
            for peer in self._peers.values():
                self._tell(peer, "begin", began)
        else:
            zero = self._peers[0]

            def ask() -> float:
                self._tell(zero, "clock")
                return self._hear(zero, "time")

            ahead = 0.0 if zero.same_host else clock.behind(ask)
            self._tell(zero, "ready")
            began = self._hear(zero, "begin") - ahead
        self._began = began
        for peer in self._peers.values():
            peer.reader = Thread(target=self._listen, args=(peer,), name=f"pipelab process {peer.number}", daemon=True)
            peer.reader.start()
        time.sleep(max(0.0, began - time.perf_counter()))
        return began

    def _tell(self, peer: _Peer, what: str, *rest: Any) -> None:
        try:
            peer.tell(what, *rest)
        except OSError:
            if peer.reader:
                peer.reader.join(LEAVING)  # it learns why
            raise self._failure or RunError(f"process {peer.number} is gone") from None

    def _hear(self, peer: _Peer, expected: str) -> Any:
        what, rest = peer.hear()
        if what == "failed":
            self._failure = RunError(*rest)
            raise self._failure
        assert what == expected, (what, expected)
        return rest[0] if rest else None

    def _listen(self, peer: _Peer) -> None:
        """Take what a process sends until it leaves."""
        while True:
            what, rest = peer.hear()
            if what == "message":
                try:
                    self._take(peer, *rest)
                except Exception as error:  # it died while its arrays were on their way
                    what, rest = "failed", (f"process {peer.number}: {type(error).__name__}: {error}", None, None)
            elif what == "value":
                peer.values.put(*rest)
            if what == "failed":
                self._failure = self._failure or RunError(*rest)
                self._boxes.abort()
                for other in self._peers.values():
                    other.values.put(None)
            if what in ("failed", "bye"):
                return

    def _take(self, peer: _Peer, key: Key, device: int, number: int, outline: Any, at: float) -> None:
        there = SingleDeviceSharding(self._devices[device])
        leaves, spec = jax.tree.flatten(outline, is_leaf=lambda x: isinstance(x, _Array))
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there) for x in leaves if isinstance(x, _Array)]
        arrays = iter(jax.block_until_ready(peer.server.pull(number, shapes)))
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, _Array):
                leaves[i] = jax.random.wrap_key_data(next(arrays), impl=leaf.keys) if leaf.keys else next(arrays)
        payload = jax.tree.unflatten(spec, leaves)
        now = time.perf_counter() - self._began
        self._boxes.send(key, device, Message(payload, at if self._paced else now))

    def _share(self, value: Any) -> Any:
        for peer in self._peers.values():
            self._tell(peer, "value", value)
        return value

    def _value(self, peer: _Peer) -> Any:
        value = peer.values.get()
        if self._failure:
            raise self._failure
        return value


def _is_key(array: jax.Array) -> bool:
    return jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)


def _meet(listener: Listener, addresses: Sequence[Any], me: int, key: bytes) -> tuple[dict[int, Connection], str]:
    """Connections to all other processes by number, and what went wrong: processes call those before them."""
    found: dict[int, Connection] = {}

    def answer() -> None:
        while len(found) < len(addresses) - 1:
            with suppress(AuthenticationError, EOFError):  # somebody else
                connection = listener.accept()
                found[connection.recv()] = connection

    try:
        for number in range(me):
            found[number] = Client(tuple(addresses[number]), authkey=key)
            found[number].send(me)
        answering = Thread(target=answer, daemon=True)
        answering.start()
        answering.join(MEETING)
        missing = set(range(len(addresses))) - {me, *found}
        return found, f"process {min(missing)} has not called within {MEETING:g} s" if missing else ""
    except Exception as error:
        return found, f"{type(error).__name__}: {error}"[:500]


def _network() -> str:
    """Names this network stack: who shares it meets on loopback. (Containers of one host may share its clock alone.)"""
    namespace = Path("/proc/self/ns/net")
    return clock.host() + (str(namespace.stat().st_ino) if namespace.exists() else "")


def _address() -> str:
    """This host's address towards others: its name's, or where that stands for loopback, the one it would call out from."""
    named = socket.gethostbyname(socket.gethostname())
    if not named.startswith("127."):
        return named
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 1))  # nobody's; no packet is sent
        return probe.getsockname()[0]


def _exchange(value: Any) -> list[Any]:
    """What every process gives, in their order. JSON, of at most 1000 bytes."""
    told = json.dumps(value).encode().ljust(1000)
    found = multihost_utils.process_allgather(np.frombuffer(told, np.uint8))
    return [json.loads(bytes(row)) for row in np.asarray(found)]
