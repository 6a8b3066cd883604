"""The launcher for processes that something else started, and that all make the same call."""

import math
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from hashlib import sha256
from itertools import chain
from threading import Event, Thread
from typing import Any

from pipelab.runtime import clock
from pipelab.runtime.launcher import BEFORE, LOOK, LOOKS, Digests, Looked, no_progress, place
from pipelab.runtime.threads import Threads
from pipelab.runtime.transport import Lost
from pipelab.runtime.wire import Wire
from pipelab.runtime.worker import Job, Outcome, RunError, told

LEAVING = 2.0  # seconds that a process which failed waits for the others to hear of it
READING = "fit", "evaluate"  # calls for the next batch
STARTING = 300.0  # seconds that others may take for what comes before actions, such as compiling


class Cluster(Threads):
    """This process, number `me` of `count`. All must make the same call, else ValueError.

    Each runs its rows in threads. When one fails, or no action ends anywhere within `timeout`
    seconds, all raise one RunError. They exchange values by name, in the store where they met.

    refusal   the error if their arguments differ
    meetings  of this process, so far
    here      says where this process is
    places    where all are, and `since` when; without a change for `patience` seconds, they hang
    failure   of one of them, which all raise
    due       when this process is lost unless it makes another call; never, once it has raised the
              failure
    over      set when this process leaves; then its `threads` end
    """

    several = True
    refusal: type[ValueError] = ValueError
    meetings = 0
    pause = LOOK

    def __init__(self, me: int, count: int, timeout: float, call: str) -> None:
        self.me, self.count, self.timeout = me, count, timeout
        self.first = me == 0
        self.call = sha256(call.encode()).hexdigest()
        self.wire: Wire | None = None
        self.here = lambda: f"process {me} (not in this run yet)"
        self.places: list[str] = []
        self.patience, self.since = timeout, time.monotonic()
        self.failure: RunError | None = None
        self.due = math.inf
        self._told_count = 0  # how many values each has told the others
        self.over = Event()
        self.threads: list[Thread] = []

    # ---- the store; Lost where it is gone

    @abstractmethod
    def give(self, name: str, value: Any) -> None:
        """Leave a value, in place of an older one."""

    @abstractmethod
    def give_first(self, name: str, value: Any) -> Any:
        """Leave a value unless there is one; returns the one that is there."""

    @abstractmethod
    def take(self, names: Sequence[str], seconds: float) -> list[Any]:
        """The values as soon as all are there; None for those that are not there in time.

        After a missing one, the rest may be None, too.
        """

    @abstractmethod
    def look(self, names: Sequence[str], perhaps: str) -> list[Any]:
        """The latest values of these, which must exist, and of one that may exist."""

    @abstractmethod
    def drop(self, name: str) -> None:
        """Remove a value, if it is there."""

    # ---- a run

    @abstractmethod
    def make_wire(self, jobs: Sequence[Job]) -> Wire:
        """The wire of this process's jobs; all processes call this."""

    def __enter__(self) -> "Cluster":
        self.meeting = f"pipelab/{self.meetings}"
        names = [f"{self.meeting}/met/{n}" for n in range(self.count)]
        deadline = time.monotonic() + self.timeout
        met: list[tuple[str, str]] = []
        try:
            self.give(f"{self.meeting}/at/{self.me}", self.here())
            self.give(names[self.me], (clock.host(), self.call))
            for name in names:
                (call,) = self.take([name], max(0.001, deadline - time.monotonic()))
                if call is None:
                    self.drop(names[self.me])
                    raise self._not_called(len(met))
                met.append(call)
            self._look()
        except Lost as error:
            raise self._unheard(error) from error
        Cluster.meetings += 1
        hosts, calls = zip(*met, strict=True)
        for number, call in enumerate(calls):
            if call != calls[0]:
                raise ValueError(
                    f"process {number} runs a different schedule from process 0: call run with the "
                    "same one in all"
                )
        self.far = [n for n in range(self.count) if hosts[n] != hosts[0]]
        self.patience = max(self.timeout, STARTING)
        # In a thread of its own: whoever keeps the store may hang.
        self.threads.append(thread_of(self._keep_looking))
        return self

    def start(self, jobs: Sequence[Job], *_: Any) -> None:
        marks = {job.rank: BEFORE for job in jobs}
        self.here = lambda: "; ".join(f"{j.where} at {place(j, marks[j.rank])}" for j in jobs)
        self.patience = max(self.timeout, STARTING)
        with self._agreeing():
            self._look()
            self.wire = self.make_wire(jobs)
            super().start(jobs, [self.wire] * jobs[0].replicas, marks, self._start)
        self.patience = math.inf

    def collect(self, call: str = "a batch's end") -> list[Outcome]:
        self.since, self.patience = time.monotonic(), self.timeout
        with self._agreeing():
            mine = super().collect(call)
            of_all = self.share([(_short(outcome), _is_short(outcome)) for outcome in mine], call)
            others = chain.from_iterable(of_all[: self.me] + of_all[self.me + 1 :])
            every = [short for short, _ in others]
            if not all(is_all for of_one in of_all for _, is_all in of_one):
                self._tell(None if self.first else mine, call)
                if self.first:  # one by one, as they may be large
                    every = [o for n in range(1, self.count) for o in self._heard([n], call)[0]]
                self.from_first(lambda: None, call)  # all go on once process 0 has everything
        self.patience = math.inf
        return mine + every

    @contextmanager
    def _agreeing(self) -> Iterator[None]:
        """All raise the same failure."""
        starting = max(self.timeout, STARTING)
        self.due = time.monotonic() + starting
        try:
            yield
            self.due = time.monotonic() + (self.timeout if self.wire else starting)
        except (RunError, Lost) as error:
            agreed = self._agreed(error if isinstance(error, RunError) else self._unheard(error))
            self.due = math.inf
            raise agreed from agreed.__cause__

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error:
            text = f"process {self.me}: {told(error)}".rstrip(": ")
            self._agreed(error if isinstance(error, RunError) else RunError(text))
        self.over.set()
        if self.wire and error:
            self.wire.abort()
        self.stop(error)
        if self.wire and not error:
            self.wire.close()
        for thread in self.threads:  # else they would wake up at the end of Python
            thread.join(LEAVING)

    def _start(self) -> float:
        """The run's time zero on this process's clock, at the same moment in all processes."""
        ahead = 0.0
        # [1] process 0 tells the time to those of other hosts
        for number in self.far:
            questions = [f"{self.meeting}/time/{number}/{i}" for i in range(clock.ROUNDS)]
            if self.first:
                for question in questions:
                    self._value(question)
                    self.give(f"{question}/answer", time.perf_counter())
            elif self.me == number:
                ahead = clock.behind(partial(self._ask, iter(questions)))
        # [2] it says when, as soon as all are ready
        self.share(None)
        self._look()
        # Later than process 0 has heard that all know it.
        return self.from_first(lambda: time.perf_counter() + 0.03) - ahead

    def _ask(self, questions: Any) -> float:
        question = next(questions)
        self.give(question, "what time is it?")
        return self._value(f"{question}/answer")

    # ---- what processes tell each other

    def agree(self, digests: Digests, call: str = "a batch's data", *, early: bool = False) -> None:
        self.refuse_others(self.share(digests(), call, early=early))

    def refuse_others(self, answers: Sequence[Mapping[str, str | None]]) -> None:
        for name in dict.fromkeys(name for answer in answers for name in answer):
            known = {number: of[name] for number, of in enumerate(answers) if of.get(name)}
            others = [number for number in known if known[number] != known[min(known)]]
            if others:
                raise self.refusal(
                    f"{name} differs between process {min(known)} and process {others[0]}: make "
                    "the same call in all, with start weights from one seed, and whole batches in "
                    "the same order: no shards, one seed for shuffling and augmentation"
                )

    def share(self, value: Any, call: str = "", *, early: bool = False) -> list[Any]:
        with self._agreeing():
            self._tell(value, call)
            return self._heard(range(self.count), call, early)

    def from_first(self, make: Callable[[], Any], call: str = "") -> Any:
        with self._agreeing():
            self._tell(make() if self.first else None, call)
            # Process 0 waits for all, too: what it drops eight calls later, they have read.
            return self._heard(range(self.count if self.first else 1), call)[0]

    def _tell(self, value: Any, call: str) -> None:
        """Give this process's next value."""
        self._told_count += 1
        self.since = time.monotonic()
        self.give(f"{self.meeting}/{self._told_count}/{self.me}", (call, value))
        # All have read this one: since then, each has waited for process 0, and that one for all.
        self.drop(f"{self.meeting}/{self._told_count - 8}/{self.me}")

    def _heard(self, numbers: Sequence[int], call: str, early: bool = False) -> list[Any]:
        """The values from processes, by their numbers, for this call; waits for them.

        `refusal` if one makes another call. call, early: see `share`.
        """
        names = {n: f"{self.meeting}/{self._told_count}/{n}" for n in numbers}
        seconds = self.timeout if early and self.wire else math.inf
        began, given_up = time.monotonic(), math.inf
        heard: dict[int, Any] = {}
        while True:
            waiting = [n for n in numbers if n not in heard]
            found = zip(waiting, self.take([names[n] for n in waiting], LOOK), strict=True)
            there = {n: given for n, given in found if given is not None}  # and not withdrawn
            heard |= {n: value for n, (their_call, value) in there.items() if their_call == call}
            if len(heard) == len(numbers):
                return [heard[n] for n in numbers]
            others = {n: their_call for n, (their_call, _) in there.items() if n not in heard}
            if early and LOOKS in others.values():
                self._withdraw()
                raise Looked
            if others:
                # An interrupt may have kept the other from its call: it makes this one later, or
                # the same interrupt ends this one here, which then is one that reads.
                patience = LOOK if call in READING else LEAVING
                given_up = min(given_up, time.monotonic() + patience)
                if time.monotonic() > given_up:
                    self._withdraw()
                    number, their_call = next(iter(others.items()))
                    raise self.refusal(
                        f"process {number} is at {their_call}, but process {self.me} at {call}: "
                        "make the same calls in all"
                    )
            else:
                given_up = math.inf
                if time.monotonic() - began > seconds:
                    raise self._not_called(next(n for n in waiting if n not in heard))
            self.watch()
            time.sleep(LOOK / 10)

    def _withdraw(self) -> None:
        """Take this process's last value back, so that it can make another call."""
        # Not dropped: another may be about to read it.
        self.give(f"{self.meeting}/{self._told_count}/{self.me}", None)
        self._told_count -= 1

    def _value(self, name: str) -> Any:
        """What another process gives; waits for it. RunError if any process fails."""
        while (value := self.take([name], LOOK)[0]) is None:
            self.watch()
        return value

    def _not_called(self, number: int) -> RunError:
        return RunError(
            f"process {number} has not made the call within {self.timeout:g} s: make it in all "
            "processes, or allow more time (timeout=)"
        )

    # ---- how far the others are

    def watch(self) -> None:
        """RunError if one has failed, or none makes progress."""
        if self.failure:
            raise self.failure
        if time.monotonic() - self.since > self.patience:
            raise RunError(no_progress(self.places, self.patience))

    def _look(self) -> None:
        """Say where this process is, and hear the others."""
        self.give(f"{self.meeting}/at/{self.me}", self.here())
        names = [f"{self.meeting}/at/{n}" for n in range(self.count)]
        values = self.look(names, f"{self.meeting}/failure")
        places, failures = values[: self.count], values[self.count :]
        if places != self.places:
            self.places, self.since = places, time.monotonic()
        if failures:
            self.failure = self.failure or failures[0]

    def _keep_looking(self) -> None:
        try:
            while not self.over.wait(LOOK):
                self._look()
        except Lost:
            self.failure = self.failure or self._gone(0)  # with which the store is

    def _gone(self, number: int) -> RunError:
        return RunError(f"process {number} disconnected; it was at: {self.places[number]}")

    def _unheard(self, error: Lost) -> RunError:
        return RunError(f"process {self.me} cannot reach the others: {error}")

    def in_time(self, call: Callable[[], None]) -> None:
        """Call the store, but do not wait for a call that hangs."""
        thread_of(call).join(LEAVING)

    def _agreed(self, error: RunError) -> RunError:
        """The failure that all raise: the first that one has told."""

        def tell() -> None:
            if isinstance(error.__cause__, Lost):
                time.sleep(LEAVING / 2)  # who has failed itself says more
            with suppress(Lost):
                self.failure = self.give_first(f"{self.meeting}/failure", error)

        if not self.failure:
            self.in_time(tell)
        # Its own error has its cause, which is not told.
        return self.failure if self.failure and str(self.failure) != str(error) else error


def thread_of(call: Callable[..., None], *arguments: Any) -> Thread:
    """A thread that makes the call, which may hang."""
    thread = Thread(target=call, args=arguments, daemon=True)
    thread.start()
    return thread


def _short(outcome: Outcome) -> Outcome:
    """Without what only process 0 needs."""
    seen = {k: of._replace(output=None) for k, of in outcome.seen.items()}
    return replace(outcome, steps={}, weights={}, states={}, seen=seen)


def _is_short(outcome: Outcome) -> bool:
    """Whether `_short` would leave nothing out."""
    outputs = any(of.output is not None for of in outcome.seen.values())
    return not (any(outcome.steps.values()) or outcome.weights or outcome.states or outputs)
