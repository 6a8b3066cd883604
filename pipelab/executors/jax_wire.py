"""A pipeline over processes of jax.distributed: sockets say what comes, jax.experimental.transfer brings the arrays."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from itertools import count
from threading import Thread
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from pipelab.executors import clock
from pipelab.executors.jax_peers import Peer, meet
from pipelab.executors.job import Job
from pipelab.executors.result import Outcome
from pipelab.executors.threads import run_threads
from pipelab.executors.transport import Aborted, Key, Mailboxes, Message
from pipelab.executors.worker import RunError
from pipelab.schedule import Schedule

LEAVING = 2.0  # seconds that a process which failed waits for the others to hear of it


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


class Wire(AbstractContextManager):
    """One pipeline over the processes of jax.distributed, each of which makes a `Wire`; its `Transport` at the same time.

    devices  of the schedule's rows. A process does the rows whose device is its own, in threads; messages among them stay in
             its mailboxes. Another process is sent a header, with the shapes of the arrays, which it then fetches straight
             onto the taker's device.

    The first process that fails tells the others, and all raise its RunError; ValueError where they were called differently.
    """

    def __init__(self, schedule: Schedule, devices: Sequence[jax.Device]) -> None:
        self._devices, self._me = devices, jax.process_index()
        self._call = schedule.to_csv()
        self._boxes, self._numbers = Mailboxes(len(devices)), count()
        self._peers: dict[int, Peer] = {}
        self._failure: RunError | None = None
        self._server: Any = None
        self._began, self._paced = 0.0, False

    def __enter__(self) -> Wire:
        home = next(device for device in self._devices if device.process_index == self._me)
        self._server, self._peers = meet(self._call, home.client)
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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: Any
    ) -> None:
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
        number, arrays = (
            next(self._numbers),
            [x for x in jax.tree.leaves(message.payload) if isinstance(x, jax.Array)],
        )
        if arrays:
            self._server.await_pull(
                number, [jax.random.key_data(x) if _is_key(x) else x for x in arrays]
            )
        outline = jax.tree.map(
            lambda x: _Array.of(x) if isinstance(x, jax.Array) else x, message.payload
        )
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
            peer.reader = Thread(
                target=self._listen,
                args=(peer,),
                name=f"pipelab process {peer.number}",
                daemon=True,
            )
            peer.reader.start()
        time.sleep(max(0.0, began - time.perf_counter()))
        return began

    def _tell(self, peer: Peer, what: str, *rest: Any) -> None:
        try:
            peer.tell(what, *rest)
        except OSError:
            if peer.reader:
                peer.reader.join(LEAVING)  # it learns why
            raise self._failure or RunError(f"process {peer.number} is gone") from None

    def _hear(self, peer: Peer, expected: str) -> Any:
        what, rest = peer.hear()
        if what == "failed":
            self._failure = RunError(*rest)
            raise self._failure
        assert what == expected, (what, expected)
        return rest[0] if rest else None

    def _listen(self, peer: Peer) -> None:
        """Take what a process sends until it leaves."""
        while True:
            what, rest = peer.hear()
            if what == "message":
                try:
                    self._take(peer, *rest)
                except Exception as error:  # it died while its arrays were on their way
                    what, rest = (
                        "failed",
                        (f"process {peer.number}: {type(error).__name__}: {error}", None, None),
                    )
            elif what == "value":
                peer.values.put(*rest)
            if what == "failed":
                self._failure = self._failure or RunError(*rest)
                self._boxes.abort()
                for other in self._peers.values():
                    other.values.put(None)
            if what in ("failed", "bye"):
                return

    def _take(
        self, peer: Peer, key: Key, device: int, number: int, outline: Any, at: float
    ) -> None:
        there = SingleDeviceSharding(self._devices[device])
        leaves, spec = jax.tree.flatten(outline, is_leaf=lambda x: isinstance(x, _Array))
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there)
            for x in leaves
            if isinstance(x, _Array)
        ]
        arrays = iter(jax.block_until_ready(peer.server.pull(number, shapes)))
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, _Array):
                leaves[i] = (
                    jax.random.wrap_key_data(next(arrays), impl=leaf.keys)
                    if leaf.keys
                    else next(arrays)
                )
        payload = jax.tree.unflatten(spec, leaves)
        now = time.perf_counter() - self._began
        self._boxes.send(key, device, Message(payload, at if self._paced else now))

    def _share(self, value: Any) -> Any:
        for peer in self._peers.values():
            self._tell(peer, "value", value)
        return value

    def _value(self, peer: Peer) -> Any:
        value = peer.values.get()
        if self._failure:
            raise self._failure
        return value


def _is_key(array: jax.Array) -> bool:
    return jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key)
