"""The launcher of JAX pipelines over the processes of jax.distributed: each does its own rows."""

import ctypes
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from signal import SIGABRT
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from pipelab.executors.cluster import Cluster
from pipelab.executors.jax.wire import open_wire
from pipelab.executors.job import Job
from pipelab.executors.transport import lost
from pipelab.executors.wire import Wire


class Distributed(Cluster):
    """The processes of jax.distributed; a process does the rows whose device is its own.

    devices  of all rows

    When a process dies, jax's coordination service ends the others too: at once if it was process
    0, where the service is, else when its heartbeat has been missing for long enough (100 s, if
    jax.distributed.initialize is not given another `heartbeat_timeout_seconds`). They raise their
    RunError first. A process that hangs is given up after `timeout`, which therefore has to be the
    shorter one. `shutdown_timeout_seconds` is for how long the others, at their end, wait for it.
    """

    def __init__(self, devices: Sequence[jax.Device], timeout: float, call: str) -> None:
        super().__init__(jax.process_index(), jax.process_count(), timeout, call)
        self.owners = [device.process_index for device in devices]
        self._aborts = ExitStack()

    def __enter__(self) -> "Distributed":
        self._aborts.enter_context(late_aborts())
        super().__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        self._aborts.__exit__(kind, error, trace)

    def exchange(self, value: Any) -> list[Any]:
        padded = json.dumps(value).encode().ljust(1000)
        with lost(jax.errors.JaxRuntimeError):
            rows = multihost_utils.process_allgather(np.frombuffer(padded, np.uint8))
        return [json.loads(bytes(row)) for row in np.asarray(rows)]

    def ranks(self, count: int) -> Sequence[int]:
        return [row for row in range(count) if self.owners[row] == self.me]

    def make_wire(self, jobs: Sequence[Job]) -> Wire:
        return open_wire(jobs[0], self.me, self.owners, self.share)


@contextmanager
def late_aborts() -> Iterator[None]:
    """Whatever aborts this process within, or after an error, does so six seconds later.

    A thread of jax's does, as soon as it hears that another process is dead. Nothing in Python can
    keep it from that, and nobody would learn what has happened to the run. But abort() waits for
    the handler of its signal, which is C's own sleep here: the signal's number, six, is what it
    is given, and takes for seconds. The other threads go on meanwhile.
    """
    c = ctypes.CDLL(None)
    c.signal.argtypes, c.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    before = c.signal(SIGABRT, ctypes.cast(c.sleep, ctypes.c_void_p))
    yield
    c.signal(SIGABRT, before)
