"""The launcher of JAX pipelines over the processes of jax.distributed: each does its own rows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from threading import Thread
from typing import Any

import jax

from pipelab.executors import clock
from pipelab.executors.jax.peers import Peer, meet
from pipelab.executors.jax.wire import Wire
from pipelab.executors.job import Job, Launcher
from pipelab.executors.result import Outcome
from pipelab.executors.threads import run_threads
from pipelab.executors.transport import Aborted
from pipelab.executors.worker import RunError
from pipelab.schedule import Schedule

LEAVING = 2.0  # seconds that a process which failed waits for the others to hear of it


class Distributed(Launcher):
    """One of the processes of jax.distributed, which all make one.

    A process does the rows whose device is its own, in threads. The first process that fails tells
    the others, and all raise its RunError; ValueError where they were called differently.
    """

    def __init__(self, schedule: Schedule, devices: Sequence[jax.Device]) -> None:
        self._call, self._devices, self._me = schedule.to_csv(), devices, jax.process_index()
        self._peers: dict[int, Peer] = {}
        self._failure: RunError | None = None

    def __enter__(self) -> Distributed:
        mine = next(device for device in self._devices if device.process_index == self._me)
        server, self._peers = meet(self._call, mine.client)
        self._wire = Wire(self._devices, server, lambda n, *word: self._tell(self._peers[n], *word))
        return self

    @property
    def first(self) -> bool:
        return self._me == 0

    def ranks(self, count: int) -> Sequence[int]:
        return [row for row in range(count) if self._devices[row].process_index == self._me]

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        paced = jobs[0].pace is not None
        try:
            mine = run_threads(jobs, [self._wire], lambda: self._start(paced))
        except Aborted:
            raise self._failure or RunError("the run was ended") from None
        if self.first:
            every = mine + [o for peer in self._peers.values() for o in self._value(peer)]
            self._share([replace(o, steps={}, weights={}) for o in every])
            return every
        self._tell(self._peers[0], "value", mine)
        own = {outcome.row for outcome in mine}
        return mine + [o for o in self._value(self._peers[0]) if o.row not in own]

    def from_first(self, make: Callable[[], Any]) -> Any:
        return self._share(make()) if self.first else self._value(self._peers[0])

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Say goodbye, or what failed, and wait for the others to say theirs."""
        word: tuple = ("bye",)
        if error is not None:
            text = f"process {self._me}: {type(error).__name__}: {error}".rstrip(": ")
            known = error if isinstance(error, RunError) else RunError(text)
            word = ("failed", str(known), known.device, known.action)
        for peer in self._peers.values():
            with suppress(OSError):
                peer.tell(*word)
        try:
            for peer in self._peers.values():
                if peer.reader:
                    peer.reader.join(None if error is None else LEAVING)
        finally:
            for peer in self._peers.values():
                if not peer.reader or not peer.reader.is_alive():
                    peer.connection.close()

    def _start(self, paced: bool) -> float:
        """The run's time zero on this process's clock, at the same moment in all processes."""
        if self.first:
            # [1] answer who asks for the time, until it is ready
            for peer in self._peers.values():
                for _ in range(0 if peer.same_host else clock.ROUNDS):
                    self._hear(peer, "clock")
                    self._tell(peer, "time", time.perf_counter())
                self._hear(peer, "ready")
            # [2] say when
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
        self._wire.began = None if paced else began
        # [3] from now on a thread hears what each of the others has to say
        for peer in self._peers.values():
            name = f"pipelab process {peer.number}"
            peer.reader = Thread(target=self._listen, args=(peer,), name=name, daemon=True)
            peer.reader.start()
        time.sleep(max(0.0, began - time.perf_counter()))
        return began

    def _tell(self, peer: Peer, what: str, *rest: Any) -> None:
        try:
            peer.tell(what, *rest)
        except OSError:
            if peer.reader:
                peer.reader.join(LEAVING)  # it learns why
            raise self._failure or RunError(f"process {peer.number} has ended") from None

    def _hear(self, peer: Peer, expected: str) -> Any:
        what, rest = peer.hear()
        if what == "failed":
            self._failure = RunError(*rest)
            raise self._failure
        assert what == expected, (what, expected)
        return rest[0] if rest else None

    def _listen(self, peer: Peer) -> None:
        """Take what a process sends until it leaves."""
        what = ""
        while what not in ("failed", "bye"):
            what, rest = peer.hear()
            if what == "message":
                try:
                    self._wire.take(peer, *rest)
                except Exception as error:  # it died while its arrays were on their way
                    text = f"process {peer.number}: {type(error).__name__}: {error}"
                    what, rest = "failed", (text, None, None)
            elif what == "value":
                peer.values.put(*rest)
        if what == "failed":
            self._failure = self._failure or RunError(*rest)
            self._wire.abort()
            for other in self._peers.values():
                other.values.put(None)

    def _share(self, value: Any) -> Any:
        for peer in self._peers.values():
            self._tell(peer, "value", value)
        return value

    def _value(self, peer: Peer) -> Any:
        value = peer.values.get()
        if self._failure:
            raise self._failure
        return value
