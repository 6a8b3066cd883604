"""The thread launcher: a worker thread per device, in this process; models and functions of a notebook just work."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from threading import Barrier, BrokenBarrierError, Thread
from typing import Any

from pipelab.executors.transport import Aborted, Mailboxes
from pipelab.executors.worker import Pace, Record, work
from pipelab.schedule import Schedule


def run_threads(
    schedule: Schedule, stages: Sequence[Mapping[int, Any]], devices: Sequence[Any], pace: Pace | None = None
) -> list[Record]:
    """Run every row in a thread of its own; `stages[d]` are the stage runtimes of device d. One record per device.

    The first worker that raises ends the run, and its error is raised here; so does an interrupt. No thread is left
    behind, as long as its current action ends.
    """
    transport, start = Mailboxes(schedule.devices), Barrier(schedule.devices + 1)
    records: list[Record | None] = [None] * schedule.devices
    errors: list[BaseException] = []
    began = [0.0]

    def worker(rank: int) -> None:
        try:
            with devices[rank].active():
                start.wait()
                start.wait()  # the clock has been set in between
                records[rank] = work(schedule, rank, stages[rank], devices[rank], transport, began[0], pace)
        except (Aborted, BrokenBarrierError):
            pass
        except BaseException as error:  # handed to the caller below
            errors.append(error)
            transport.abort()
            start.abort()

    threads = [Thread(target=worker, args=(rank,), name=f"pipelab device {rank}") for rank in range(schedule.devices)]
    try:
        for thread in threads:
            thread.start()
        start.wait()
        began[0] = time.perf_counter()
        for device in devices:
            device.begin(began[0])
        start.wait()
        for thread in threads:
            thread.join()
    except BrokenBarrierError:
        pass  # a worker could not start; its error is raised below
    finally:
        start.abort()
        transport.abort()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]
    return [record for record in records if record is not None]
