"""The launcher of a run's jobs; here, threads of this process: a worker per device.

Models and functions defined in a notebook just work.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from threading import Barrier, BrokenBarrierError, Thread
from typing import Any, NoReturn, Protocol

from pipelab.runtime.stage import Device, Stage
from pipelab.runtime.transport import Aborted, Transport
from pipelab.runtime.worker import Job, Order, Outcome, Worker

LOOK = 0.25  # seconds between two looks at how far others are
Orders = SimpleQueue[Order | None]  # None is the end
Digests = Callable[[], Mapping[str, str | None]]
STARTS, BEFORE, AFTER = -1, -2, -3  # marks of a rank around its actions
LOOKS = "a look at a step"  # a call that only some processes make: the others join them


class Looked(Exception):
    """Another process makes the call LOOKS, which comes first; then repeat the call."""


class RankJob(Protocol):
    """A rank's job: its number, its row, a name for errors, and what its progress marks mean."""

    @property
    def rank(self) -> int: ...
    @property
    def row(self) -> int: ...
    @property
    def where(self) -> str: ...
    def doing(self, mark: int) -> str: ...


def place(job: RankJob, mark: int) -> str:
    """Where a rank is, by its latest progress mark."""
    known = {STARTS: "(starting)", BEFORE: "(before the first)", AFTER: "(after the last)"}
    return known.get(mark) or job.doing(mark)


def no_progress(places: Sequence[str], timeout: float) -> str:
    return f"no action ended within {timeout:g} s: {'; '.join(places)}"


class Threads(AbstractContextManager):
    """The launcher of the jobs: threads of this process, or a subclass's processes.

    Ranks start once, and then take orders until the end. The first worker that raises ends all, and
    whoever waits raises its error. An interrupt of the waiting thread, or `watch`, ends them, too:
    the other workers stop before their next action.

    first  whether this process is the one that writes and checks
    pause  seconds after which whoever waits for the workers calls `watch`; None: it just waits. No
           thread stays behind, except one that hangs under a watch
    """

    first = True
    pause: float | None = None
    workers: Sequence[Thread] = ()

    def ranks(self, count: int) -> Sequence[int]:
        """Those of `count` ranks that this process runs. ValueError if there are not that many."""
        return range(count)

    def agree(self, digests: Digests, call: str = "a batch's data", *, early: bool = False) -> None:
        """ValueError if several processes were given different arguments; all call this.

        digests      returns them by name; None, or no entry, if not known here
        call, early  see `share`
        """

    def share(self, value: Any, call: str = "", *, early: bool = False) -> list[Any]:
        """The values of all processes, in their order; all call this.

        call   its purpose, the same in all; else ValueError
        early  nothing has been done for it yet: it can be repeated, and others have `timeout`;
               raises Looked where others make the call LOOKS
        """
        return [value]

    def from_first(self, make: Callable[[], Any], call: str = "") -> Any:
        """The value that the first process makes, in every process; `call`: see `share`."""
        return make()

    def watch(self) -> None:
        """Look at others; raises if waiting is useless."""

    def start(
        self,
        jobs: Sequence[Job],
        transports: Sequence[Transport] = (),
        marks: Any = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start this process's ranks.

        transports  one per replica; default: mailboxes, which connect only jobs of this process
        marks       takes each rank's latest progress mark, by its number; default: ignored
        clock       is called when all are ready; returns the time zero on `time.perf_counter`, soon
        """
        self.transports = transports or _mailboxes(jobs[0])
        self.marks = {} if marks is None else marks
        # Orders, each with the mark of the caller's work before it; None is the end.
        self.queues: list[SimpleQueue[Any]] = [SimpleQueue() for _ in jobs]
        self.ready, self.began = Barrier(len(jobs) + 1), 0.0  # all wait until the clock is set
        self.done: SimpleQueue[tuple[int, Outcome | None]] = SimpleQueue()  # None: it has failed
        self.outcomes: list[deque[Outcome]] = [deque() for _ in jobs]
        self.errors: list[BaseException] = []
        # Stages are made here: threads start with all that may fail behind them.
        devices = self.devices = [job.make_device() for job in jobs]
        self.workers = [
            # Daemons: one that hangs in a library's call must not keep the process from ending.
            Thread(
                target=self._work,
                args=(i, job, device, _placed(job, device)),
                name=f"pipelab device {job.row}",
                daemon=True,
            )
            for i, (job, device) in enumerate(zip(jobs, devices, strict=True))
        ]
        for worker in self.workers:
            worker.start()
        with self._ended_by_errors():
            try:
                self.ready.wait()
                self.began = clock()
                for transport in self.transports:  # a paced run's messages say when they came
                    transport.began = None if jobs[0].paced else self.began
                time.sleep(max(0.0, self.began - time.perf_counter()))
                for device in devices:
                    device.begin(self.began)
                self.ready.wait()
            except BrokenBarrierError:  # a worker could not start
                self._fail()

    def submit(self, orders: Sequence[Order]) -> None:
        """Give each of this process's ranks its order; does not wait for them."""
        for queue, device, order in zip(self.queues, self.devices, orders, strict=True):
            queue.put((order, device.callers_work(order)))

    def collect(self, call: str = "a batch's end") -> list[Outcome]:
        """The outcomes, from all ranks, of the oldest orders not collected yet.

        `call` is their purpose, see `share`. The first process has all weights and steps, others
        their own. RunError when a rank fails.
        """
        with self._ended_by_errors():
            while not all(self.outcomes):
                try:
                    i, outcome = self.done.get(timeout=self.pause)
                except Empty:
                    self.watch()
                    continue
                if outcome is None:
                    self._fail()
                self.outcomes[i].append(outcome)
            return [of_job.popleft() for of_job in self.outcomes]

    def stop(self, error: BaseException | None = None) -> None:
        """End the ranks after all their orders; after an error, before their next actions."""
        if not self.workers:
            return
        if error:
            self._abort()
        for queue in self.queues:
            queue.put(None)
        for worker in self.workers:
            if worker.ident:
                # Where there is a watch a thread may hang in what nothing can break off.
                worker.join(self.pause)
        self.workers = ()
        # Their tracebacks refer to frames that refer to this: all stages would be kept until the
        # next garbage collection.
        self.errors.clear()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Everything is done, or has failed."""
        self.stop(error)

    def _abort(self) -> None:
        for transport in self.transports:
            transport.abort()
        self.ready.abort()

    def _work(self, i: int, job: Job, device: Device, stages: Any) -> None:
        """The work of a thread."""
        try:
            with device.active():
                job.prepare(stages)
                # First until all are ready, then until the clock has been set: `began` is read
                # after that.
                self.ready.wait()
                self.ready.wait()
                progress = partial(self.marks.__setitem__, job.rank)
                transport = self.transports[job.replica]
                worker = Worker(job, stages, device, transport, self.began, progress)
                while entry := self.queues[i].get():
                    order, before = entry
                    device.wait_for_caller(before)
                    outcome = worker.work(order)
                    progress(AFTER)
                    self.done.put((i, outcome))
                    del entry, order, outcome  # else its data would be kept until the next
        except BaseException as error:
            self.errors.append(error)
            self._abort()
            self.done.put((i, None))

    @contextmanager
    def _ended_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.stop(error)
            raise

    def _fail(self) -> NoReturn:
        """Raise the first error of the workers."""
        failures = [e for e in self.errors if not isinstance(e, (Aborted, BrokenBarrierError))]
        try:
            # If there is none, all workers were ended: what failed is outside.
            raise next(iter(failures), Aborted())
        finally:
            del failures  # as above: the error's traceback refers to this frame


def _placed(job: Job, device: Device) -> Mapping[int, Stage]:
    with device.placing():
        return job.stages(device)


def _mailboxes(job: Job) -> list[Transport]:
    replicas = [Transport(job.schedule.devices) for _ in range(job.replicas)]
    for transport in replicas:
        transport.replicas = replicas
    return replicas
