"""The launcher of jobs in threads of this process, one for each rank: a row, in a replica.

Models and functions defined in a notebook just work.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from threading import Barrier, BrokenBarrierError, Thread
from typing import Any, NoReturn

from pipelab.runtime.launcher import AFTER, Launcher
from pipelab.runtime.stage import Device
from pipelab.runtime.transport import Aborted, Transport
from pipelab.runtime.worker import Job, Order, Outcome, Worker


class Threads(Launcher):
    """A thread of this process for each rank.

    The first worker that raises ends all, and whoever waits raises its error. An interrupt of the
    waiting thread, or `watch`, ends them, too: the other workers stop before their next action.

    pause  seconds after which whoever waits for the workers calls `watch`; None: it just waits. No
           thread stays behind, except one that hangs under a watch
    """

    pause: float | None = None
    workers: Sequence[Thread] = ()

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
        self.devices, workers = [job.make_device() for job in jobs], []
        for i, (job, device) in enumerate(zip(jobs, self.devices, strict=True)):
            with device.placing():
                arguments = i, job, device, job.stages(device)
            name = f"pipelab device {job.row}"
            # Daemons: one that hangs in a library's call must not keep the process from ending.
            workers.append(Thread(target=self._work, args=arguments, name=name, daemon=True))
        self.workers = workers
        for worker in workers:
            worker.start()
        with self._ended_by_errors():
            try:
                self.ready.wait()
                self.began = clock()
                for transport in self.transports:  # a paced run's messages say when they came
                    transport.began = None if jobs[0].paced else self.began
                time.sleep(max(0.0, self.began - time.perf_counter()))
                for device in self.devices:
                    device.begin(self.began)
                self.ready.wait()
            except BrokenBarrierError:  # a worker could not start
                self._fail()

    def submit(self, orders: Sequence[Order]) -> None:
        for queue, device, order in zip(self.queues, self.devices, orders, strict=True):
            queue.put((order, device.callers_work(order)))

    def collect(self, call: str = "a batch's end") -> list[Outcome]:
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


def _mailboxes(job: Job) -> list[Transport]:
    replicas = [Transport(job.schedule.devices) for _ in range(job.replicas)]
    for transport in replicas:
        transport.replicas = replicas
    return replicas
