"""The thread launcher: a worker thread per device, in this process; models and functions of a notebook just work."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from threading import Barrier, BrokenBarrierError
from typing import Any

from pipelab.executors.transport import Aborted, Mailboxes
from pipelab.executors.worker import Pace, Record, Worker
from pipelab.schedule import Schedule


def run_threads(
    schedule: Schedule, stages: Sequence[Mapping[int, Any]], devices: Sequence[Any], pace: Pace | None = None
) -> list[Record]:
    """Run every row in a thread of its own; `stages[d]` are the stage runtimes of device d. One record per device.

    The first worker that raises ends the run, and its error is raised here; so does an interrupt: the other workers stop
    before their next action, and no thread is left behind.
    """
    transport, ready = Mailboxes(schedule.devices), Barrier(schedule.devices + 1)
    began = [0.0]

    def worker(rank: int) -> Record:
        try:
            with devices[rank].active():
                ready.wait()
                ready.wait()  # the clock has been set in between
                return Worker(schedule, rank, stages[rank], devices[rank], transport, began[0], pace).work()
        except BaseException:
            transport.abort()
            ready.abort()
            raise

    with ThreadPoolExecutor(schedule.devices, thread_name_prefix="pipelab device") as pool:
        try:
            futures = [pool.submit(worker, rank) for rank in range(schedule.devices)]
            ready.wait()
            began[0] = time.perf_counter()
            for device in devices:
                device.begin(began[0])
            ready.wait()
            wait(futures, return_when=FIRST_EXCEPTION)
        except BrokenBarrierError:
            pass  # a worker could not start; its error is raised below
        finally:
            transport.abort()
            ready.abort()
    errors = [future.exception() for future in futures]
    for error in errors:
        if error is not None and not isinstance(error, (Aborted, BrokenBarrierError)):
            raise error
    return [future.result() for future in futures]
