"""Who carries out the jobs of a run; here, threads of this process: a worker per device.

Models and functions defined in a notebook just work.
"""

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import AbstractContextManager
from threading import Barrier, BrokenBarrierError, Thread
from typing import Any, Protocol

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
        """What the first process makes, in every process."""

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
    replicas = transports or _mailboxes(jobs[0])
    ready = Barrier(len(jobs) + 1)
    homes = [job.home() for job in jobs]
    stages = [job.stages(home) for job, home in zip(jobs, homes, strict=True)]
    began = [0.0]

    def end() -> None:
        for transport in replicas:
            transport.abort()
        ready.abort()

    outcomes: list[Future[Outcome]] = [Future() for _ in jobs]
    workers = []
    for outcome, job, home, of_row in zip(outcomes, jobs, homes, stages, strict=True):
        given = job, home, of_row, ready, began, replicas[job.replica], progress(job)
        name = f"pipelab device {job.row}"
        workers.append(Thread(target=_keep, args=(outcome, end, *given), name=name, daemon=True))
    del outcome, given  # as in `_results`
    for worker in workers:
        worker.start()
    try:
        ready.wait()
        began[0] = start()
        for home in homes:
            home.begin(began[0])
        ready.wait()
        while not _over(outcomes, LOOK if watch else None) and watch:
            watch()
    except BrokenBarrierError:
        pass  # a worker could not start; its error is raised below
    except BaseException:
        end()
        raise
    finally:
        for worker in workers:
            worker.join(LOOK if watch else None)
    return _results(outcomes)


def _keep(outcome: Future[Outcome], end: Callable[[], None], *given: Any) -> None:
    """What a thread does: the work, whose outcome or error is kept."""
    try:
        outcome.set_result(_work(*given))
    except BaseException as error:
        end()
        outcome.set_exception(error)
    del outcome, given  # as in `_results`


def _work(
    job: Job,
    home: Any,
    stages: Any,
    ready: Barrier,
    began: list[float],
    transport: Transport,
    progress: Callable[[int], None] | None,
) -> Outcome:
    with home.active():
        job.prepare(stages)
        ready.wait()
        ready.wait()  # the clock has been set in between
        outcome = job.work(stages, home, transport, began[0], progress)
        if progress:
            progress(AFTER)
        return outcome


def _over(outcomes: Sequence[Future], seconds: float | None) -> bool:
    """Whether all are there or one has failed, within so many seconds."""
    done, left = wait(outcomes, seconds, FIRST_EXCEPTION)
    return not left or any(outcome.exception() for outcome in done)


def _results(outcomes: list[Future[Outcome]]) -> list[Outcome]:
    """What the threads have found, or the first error; the list is empty afterwards."""
    errors = [outcome.exception() for outcome in outcomes if outcome.done()]
    failures = [e for e in errors if e and not isinstance(e, (Aborted, BrokenBarrierError))]
    try:
        if failures:
            raise failures[0]
        if any(errors):  # all workers were ended: what failed is outside
            raise Aborted
        return [outcome.result() for outcome in outcomes]
    finally:
        # An error's traceback refers to this frame and the caller's: referred to from there, it
        # would be kept, with all stages, until the next garbage collection.
        outcomes.clear()
        del errors, failures


def _mailboxes(job: Job) -> list[Transport]:
    replicas = [Transport(job.schedule.devices) for _ in range(job.replicas)]
    for transport in replicas:
        transport.replicas = replicas
    return replicas
