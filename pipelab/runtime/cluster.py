"""The launcher of processes that something else has started, and that all make the same call."""

import pickle
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from multiprocessing.connection import Connection, wait
from typing import Any

from pipelab.runtime import clock
from pipelab.runtime.threads import BEFORE, LOOK, Launcher, no_progress, place, run_threads
from pipelab.runtime.transport import Lost
from pipelab.runtime.wire import Wire, connect
from pipelab.runtime.worker import Job, Outcome, RunError, told

LEAVING = 2.0  # seconds that a process which failed waits for the others to hear of it
STARTING = 300.0  # seconds that others may take for what comes before actions, such as compiling


class Peer:
    """Another process of the cluster.

    values  what it has sent and nobody has taken yet
    place   where it is in its rows
    lost    whether its connection ended without one
    word    its last one: (error or None, whether it only lost its connection to another process)
    """

    def __init__(self, number: int, connection: Connection, same_host: bool) -> None:
        self.number, self.connection, self.same_host = number, connection, same_host
        self.values: deque[Any] = deque()
        self.place = f"process {number} (not in this run yet)"
        self.word: tuple[RunError | None, bool] | None = None
        self.lost = False

    def tell(self, what: str, *rest: Any) -> None:
        with suppress(OSError):  # it has ended, which is heard
            self.connection.send_bytes(pickle.dumps((what, rest)))

    def hear(self) -> None:
        """Take the next thing it says; the end of the connection counts as a failure."""
        try:
            what, rest = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            text = f"process {self.number} disconnected; it was at: {self.place}"
            what, rest, self.lost = "last", (RunError(text), False), True
        if what == "value":
            self.values.extend(rest)
        elif what == "at":
            (self.place,) = rest
        else:
            self.word = rest


class Cluster(Launcher):
    """This process, number `me` of `count`. The same in all: ValueError if they call differently.

    Each does its rows in threads. When one fails, or no action ends anywhere within `timeout`
    seconds, all raise one RunError.

    refusal  the error where they are not given the same
    """

    refusal: type[ValueError] = ValueError

    def __init__(self, me: int, count: int, timeout: float, call: str) -> None:
        self.me, self.count, self.timeout = me, count, timeout
        self.first = me == 0
        self.call = sha256(call.encode()).hexdigest()
        self.peers: dict[int, Peer] = {}
        self.wire: Wire | None = None
        self._left = False

    @property
    def others(self) -> Iterable[Peer]:
        return self.peers.values()

    @abstractmethod
    def exchange(self, value: Any) -> list[Any]:
        """The values of all processes, in their order; all call this. JSON."""

    @abstractmethod
    def make_wire(self, jobs: Sequence[Job]) -> Wire:
        """The wire of this process's jobs; all processes call this, which may `share`."""

    def __enter__(self) -> "Cluster":
        try:
            self._meet()
        except Lost as error:
            raise RunError(f"process {self.me} does not hear the others: {error}") from error
        return self

    def _meet(self) -> None:
        hosts, calls = zip(*self.exchange([clock.host(), self.call]), strict=True)
        for number, call in enumerate(calls):
            if call != calls[0]:
                raise ValueError(
                    f"process {number} runs another schedule than process 0: "
                    "call run with the same one in all"
                )
        every = range(self.count)
        pairs = [(a, b) for b in every for a in range(b)]
        for (_, number), socket in connect(self.me, pairs, every, self.exchange).items():
            same_host = hosts[number] == hosts[self.me]
            self.peers[number] = Peer(number, Connection(socket.detach()), same_host)

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        self.wire = self.make_wire(jobs)
        marks = {job.rank: BEFORE for job in jobs}
        known: list[str] = []
        since = time.monotonic()

        def watch() -> None:
            """Say how far this process is, and hear the others. RunError if nobody gets on."""
            nonlocal known, since
            mine = "; ".join(f"{job.where} at {place(job, marks[job.rank])}" for job in jobs)
            if not known or mine != known[self.me]:
                self._tell_all("at", mine)
            self._hear_all()
            places = [self.peers[n].place if n != self.me else mine for n in range(self.count)]
            if places != known:
                known, since = places, time.monotonic()
            elif time.monotonic() - since > self.timeout:
                raise RunError(no_progress(places, self.timeout))

        try:
            watch()
            mine = run_threads(
                jobs,
                [self.wire] * jobs[0].replicas,
                partial(self._start, paced=jobs[0].pace is not None),
                progress=lambda job: partial(marks.__setitem__, job.rank),
                watch=watch,
            )
            if self.first:
                every = mine + [o for peer in self.others for o in self._value(peer, watch)]
                self._tell_all("value", [replace(o, steps={}, weights={}) for o in every])
                return every
            self.peers[0].tell("value", mine)
            own = {(outcome.row, outcome.replica) for outcome in mine}
            others = self._value(self.peers[0], watch)
            return mine + [o for o in others if (o.row, o.replica) not in own]
        except RunError as error:
            agreed = self._agreed(error)
            raise agreed from agreed.__cause__

    def from_first(self, make: Callable[[], Any]) -> Any:
        if not self.first:
            return self._value(self.peers[0])
        value = make()
        self._tell_all("value", value)
        return value

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Say the last word, and wait for the others to say theirs."""
        word = None
        if error and not isinstance(error, RunError):
            text = f"process {self.me}: {told(error)}"
            word = RunError(text.rstrip(": "))
        self._last_words(word, False)
        if self.wire:
            if kind is not None:
                self.wire.abort()
            self.wire.close()
        for peer in self.others:
            peer.connection.close()

    def _start(self, paced: bool) -> float:
        """The run's time zero on this process's clock, at the same moment in all processes."""
        assert self.wire
        watch = self._deadline()
        if self.first:
            # [1] answer who asks for the time, until all are ready
            for peer in self.others:
                for _ in range(0 if peer.same_host else clock.ROUNDS):
                    self._value(peer, watch)
                    peer.tell("value", time.perf_counter())
                self._value(peer, watch)
            # [2] say when
            began = time.perf_counter() + 0.01
            self._tell_all("value", began)
        else:
            zero = self.peers[0]

            def ask() -> float:
                zero.tell("value", "what time is it?")
                return self._value(zero, watch)

            ahead = 0.0 if zero.same_host else clock.behind(ask)
            zero.tell("value", "ready")
            began = self._value(zero, watch) - ahead
        self.wire.began = None if paced else began
        time.sleep(max(0.0, began - time.perf_counter()))
        return began

    # ---- what processes tell each other

    def agree(self, digests: Callable[[], Mapping[str, str | None]]) -> None:
        given = self.share(digests())
        for name in dict.fromkeys(name for of in given for name in of):
            known = {number: of[name] for number, of in enumerate(given) if of.get(name)}
            others = [number for number in known if known[number] != known[min(known)]]
            if others:
                raise self.refusal(
                    f"{name} is not the same in process {min(known)} and process {others[0]}: make "
                    "the same call in all, with start weights of one seed, and whole batches in "
                    "the same order: no shards, one seed for shuffling and for random changes"
                )

    def share(self, value: Any) -> list[Any]:
        """The values of all processes, in their order; all call this."""
        self._tell_all("value", value)
        watch, of_peers = self._deadline(), self.peers.items()
        values = {self.me: value} | {n: self._value(peer, watch) for n, peer in of_peers}
        return [values[n] for n in range(self.count)]

    def _deadline(self) -> Callable[[], None]:
        """A watch over what comes before actions."""
        limit = max(self.timeout, STARTING)
        deadline = time.monotonic() + limit

        def watch() -> None:
            if time.monotonic() > deadline:
                raise RunError(no_progress([p.place for p in self.others], limit))

        return watch

    def _tell_all(self, what: str, *rest: Any) -> None:
        for peer in self.others:
            peer.tell(what, *rest)

    def _value(self, peer: Peer, watch: Callable[[], None] = lambda: None) -> Any:
        """The next value that a process sends; waits for it. RunError if any process fails."""
        while not peer.values:
            if peer.word:
                raise RunError(f"process {peer.number} has left")
            watch()
            if not peer.values:  # heard meanwhile: what follows it is of the next call
                self._hear_all(LOOK)
        return peer.values.popleft()

    def _hear_all(self, seconds: float = 0.0) -> None:
        """Take what others have said, or say within so many seconds. RunError if one failed."""
        self._hear(seconds)
        for peer in self.others:
            if peer.word and peer.word[0]:
                raise peer.word[0]

    def _hear(self, seconds: float) -> bool:
        """Take what others have said; whether there is anybody who may still say something."""
        talking = {p.connection: p for p in self.others if not p.word}
        for connection in wait(list(talking), seconds):
            talking[connection].hear()  # type: ignore[index]
        return bool(talking)

    def _agreed(self, error: RunError) -> RunError:
        """The failure that all raise: of the first process that did not fail by another's."""
        heard = any(peer.word and peer.word[0] is error for peer in self.others)
        secondary = heard or isinstance(error.__cause__, Lost)
        self._last_words(error, secondary)
        words = {n: peer.word for n, peer in self.peers.items() if peer.word}
        words[self.me] = error, secondary
        failures = [words[n] for n in sorted(words) if words[n][0]]
        return next((e for e, secondary in failures if e and not secondary), error)

    def _last_words(self, error: RunError | None, secondary: bool) -> None:
        """Say what this process leaves with, and wait for the others; not long if one failed."""
        if self._left:
            return
        self._left = True
        self._tell_all("last", error, secondary)
        deadline = time.monotonic() + LEAVING
        while self._hear(LOOK):
            failed = error or any(peer.word and peer.word[0] for peer in self.others)
            if failed and time.monotonic() > deadline:
                return
