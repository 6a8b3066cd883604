"""The thread launcher: a worker thread per device, in this process.

Models and functions defined in a notebook just work.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from threading import Barrier, BrokenBarrierError
from typing import Any

from pipelab.executors.job import Job, Launcher
from pipelab.executors.result import Outcome
from pipelab.executors.transport import Aborted, Mailboxes, Transport


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
) -> list[Outcome]:
    """Do every job in a thread of its own.

    transports  one per replica; default: mailboxes, which connect jobs of this process alone
    start       is called when all are ready; returns the run's time zero on `time.perf_counter`

    The first worker that raises ends the run, and its error is raised here; so does an interrupt:
    the other workers stop before their next action, and no thread is left behind.
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

    def worker(rank: int) -> Outcome:
        try:
            with homes[rank].active():
                jobs[rank].prepare(stages[rank])
                ready.wait()
                ready.wait()  # the clock has been set in between
                return jobs[rank].work(
                    stages[rank], homes[rank], replicas[jobs[rank].replica], began[0]
                )
        except BaseException:
            end()
            raise

    with ThreadPoolExecutor(len(jobs), thread_name_prefix="pipelab device") as pool:
        try:
            futures = [pool.submit(worker, rank) for rank in range(len(jobs))]
            ready.wait()
            began[0] = start()
            for home in homes:
                home.begin(began[0])
            ready.wait()
            wait(futures, return_when=FIRST_EXCEPTION)
        except BrokenBarrierError:
            pass  # a worker could not start; its error is raised below
        finally:
            end()
    errors = list(filter(None, (future.exception() for future in futures)))
    failures = [e for e in errors if not isinstance(e, (Aborted, BrokenBarrierError))]
    try:
        if failures:
            raise failures[0]
        if errors:  # all workers were ended: what failed is outside
            raise Aborted
        return [future.result() for future in futures]
    finally:
        # An error's traceback refers to this frame: referred to from here, it would be kept, with
        # all stages, until the next garbage collection.
        del futures, errors, failures


def _mailboxes(job: Job) -> list[Mailboxes]:
    replicas = [Mailboxes(job.schedule.devices) for _ in range(job.replicas)]
    for transport in replicas:
        transport.replicas = replicas
    return replicas
