"""The thread launcher: a worker thread per device, in this process.

Models and functions defined in a notebook just work.
"""

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from threading import Barrier, BrokenBarrierError, Thread
from typing import Any

from pipelab.executors.job import AFTER, Job, Launcher
from pipelab.executors.result import Outcome
from pipelab.executors.transport import Aborted, Transport

LOOK = 0.25  # seconds between two looks at how far others are


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

    def work(job: Job, home: Any, stages: dict[int, Any]) -> Outcome:
        try:
            if job.core is not None:
                os.sched_setaffinity(0, {job.core})
            with home.active():
                job.prepare(stages)
                ready.wait()
                ready.wait()  # the clock has been set in between
                transport, told = replicas[job.replica], progress(job)
                outcome = job.work(stages, home, transport, began[0], told)
                if told:
                    told(AFTER)
                return outcome
        except BaseException:
            end()
            raise

    outcomes: list[Future[Outcome]] = [Future() for _ in jobs]
    workers = [
        Thread(target=_keep, args=(work, *of), name=f"pipelab device {number}", daemon=True)
        for number, of in enumerate(zip(outcomes, jobs, homes, stages, strict=True))
    ]
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


def _keep(work: Callable[..., Outcome], outcome: Future[Outcome], *arguments: Any) -> None:
    """What a thread does: the work, whose outcome or error is kept."""
    try:
        outcome.set_result(work(*arguments))
    except BaseException as error:
        outcome.set_exception(error)
    del outcome, arguments  # as in `_results`


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
