"""Who carries out the jobs of a run; here, threads of this process: a worker per device.

Models and functions defined in a notebook just work.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from threading import Barrier, BrokenBarrierError, Event, Thread
from typing import Any, Protocol

from pipelab.runtime.stage import Device
from pipelab.runtime.transport import Aborted, Transport
from pipelab.runtime.worker import Job, Outcome

LOOK = 0.25  # seconds between two looks at how far others are
BEFORE, AFTER = -1, -2  # marks of a rank before its first and after its last action


class RankJob(Protocol):
    """A rank's job: its number, a name for errors, and what its progress marks mean."""

    @property
    def rank(self) -> int: ...
    @property
    def where(self) -> str: ...
    def doing(self, mark: int) -> str: ...


def place(job: RankJob, mark: int) -> str:
    """Where a rank is, by its latest progress mark."""
    known = {BEFORE: "(before the first)", AFTER: "(after the last)"}
    return known.get(mark) or job.doing(mark)


def no_progress(places: Sequence[str], timeout: float) -> str:
    return f"no action ended within {timeout:g} s: {'; '.join(places)}"


class Launcher(AbstractContextManager):
    """Who carries out the jobs: threads of this process, processes, or the ranks of a cluster.

    first  whether this process is the one that writes and judges
    """

    first: bool

    @abstractmethod
    def ranks(self, count: int) -> Sequence[int]:
        """Which of `count` ranks are this process's to do. ValueError if there are not as many."""

    @abstractmethod
    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Do this process's jobs; returns the outcomes of all ranks.

        The first process has all weights and steps, others their own. RunError when a rank fails.
        """

    def agree(self, digests: Callable[[], Mapping[str, str | None]]) -> None:
        """Refuse what was not given alike to all processes, where there are several; all call this.

        digests  gives them by what they are of; None, or no entry, where that is not known here
        """

    @abstractmethod
    def from_first(self, make: Callable[[], Any]) -> Any:
        """The value that the first process makes, in every process."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Everything is done, or has failed."""


class Threads(Launcher):
    """This process does everything."""

    first = True

    def ranks(self, count: int) -> Sequence[int]:
        return range(count)

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        return run_threads(jobs)

    def from_first(self, make: Callable[[], Any]) -> Any:
        return make()


def run_threads(
    jobs: Sequence[Job],
    transports: Sequence[Transport] = (),
    start: Callable[[], float] = time.perf_counter,
    *,
    progress: Callable[[Job], Callable[[int], None] | None] = lambda job: None,
    watch: Callable[[], None] | None = None,
) -> list[Outcome]:
    """Do every job in a thread of its own.

    transports  one per replica; default: mailboxes, which connect jobs of this process alone
    start       is called when all are ready; returns the run's time zero on `time.perf_counter`
    progress    of a job: is told the flat index of each action before it starts
    watch       is called every LOOK seconds, and may raise

    The first worker that raises ends the run, and its error is raised here; so does an interrupt,
    or `watch`: the other workers stop before their next action. No thread is left behind, but one
    that hangs if there is a `watch`.
    """
    crew = _Crew(len(jobs), transports or _mailboxes(jobs[0]))
    # [1] stages are made here: threads start with all that may fail behind them
    homes = [job.home() for job in jobs]
    workers = []
    for job, home in zip(jobs, homes, strict=True):
        given = job, home, job.stages(home), progress(job)
        name = f"pipelab device {job.row}"
        # Daemons: one that hangs in a library's call must not keep the process from ending.
        workers.append(Thread(target=crew.work, args=given, name=name, daemon=True))
    del given  # else the last stages would be kept as long as this frame
    for worker in workers:
        worker.start()
    try:
        # [2] when all have compiled and warmed up, the clock is set
        crew.ready.wait()
        crew.began = start()
        for home in homes:
            home.begin(crew.began)
        crew.ready.wait()
        # [3] until all are done, one has failed, or `watch` raises
        while not crew.over.wait(LOOK if watch else None) and watch:
            watch()
    except BrokenBarrierError:
        pass  # a worker could not start; its error is raised below
    except BaseException:
        crew.end()
        raise
    finally:
        for worker in workers:
            # Where there is a watch a thread may hang in what nothing can break off: it is left
            # behind.
            worker.join(LOOK if watch else None)
    return crew.results()


class _Crew:
    """The state that the workers of a run share.

    ready     all wait here, and then until the clock has been set (`began`)
    over      set when all are done or one has failed
    outcomes  by rank
    """

    def __init__(self, count: int, transports: Sequence[Transport]) -> None:
        self.count, self.transports = count, transports
        self.ready, self.over = Barrier(count + 1), Event()
        self.began = 0.0
        self.outcomes: dict[int, Outcome] = {}
        self.errors: list[BaseException] = []

    def work(
        self, job: Job, home: Device, stages: Any, progress: Callable[[int], None] | None
    ) -> None:
        """The work of a thread."""
        try:
            with home.active():
                job.prepare(stages)
                # First until all are ready, then until the clock has been set: `began` is read
                # after that.
                self.ready.wait()
                self.ready.wait()
                transport = self.transports[job.replica]
                outcome = job.work(stages, home, transport, self.began, progress)
                if progress:
                    progress(AFTER)
            self.outcomes[job.rank] = outcome
        except BaseException as error:
            self.errors.append(error)
            self.end()
        # The last one to end sees the outcomes of all.
        if self.errors or len(self.outcomes) == self.count:
            self.over.set()

    def end(self) -> None:
        """Stop the workers before their next actions."""
        for transport in self.transports:
            transport.abort()
        self.ready.abort()

    def results(self) -> list[Outcome]:
        """The workers' outcomes, or the first error."""
        # What an error or an abort elsewhere has ended says nothing of the cause.
        failures = [e for e in self.errors if not isinstance(e, (Aborted, BrokenBarrierError))]
        try:
            if failures:
                raise failures[0]
            if self.errors:  # all workers were ended: what failed is outside
                raise Aborted
            return [self.outcomes[rank] for rank in sorted(self.outcomes)]
        finally:
            # An error's traceback refers to this frame: if that referred to the error, both would
            # be kept, with all stages, until the next garbage collection.
            self.errors.clear()
            del failures


def _mailboxes(job: Job) -> list[Transport]:
    replicas = [Transport(job.schedule.devices) for _ in range(job.replicas)]
    for transport in replicas:
        transport.replicas = replicas
    return replicas
