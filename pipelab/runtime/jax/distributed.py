"""The launcher of JAX pipelines over the processes of jax.distributed: each does its own rows."""

import atexit
import ctypes
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from signal import SIGABRT
from typing import Any

import jax
from jax._src.distributed import global_state  # no public way to it

from pipelab.runtime.cluster import Cluster
from pipelab.runtime.jax.wire import open_jax_wire
from pipelab.runtime.transport import lost
from pipelab.runtime.wire import Wire
from pipelab.runtime.worker import Job, RunError


class Distributed(Cluster):
    """The processes of jax.distributed; a process does the rows whose device is its own.

    devices  of all rows

    When a process dies, jax's coordination service ends the others too: at once if it was process
    0, where the service is, else when its heartbeat has been missing for long enough (100 s, if
    jax.distributed.initialize is not given another `heartbeat_timeout_seconds`). They raise their
    RunError first. A process that hangs is given up after `timeout`, which therefore has to be the
    shorter one.
    """

    exchanges = 0  # of this process, so far

    def __init__(self, devices: Sequence[jax.Device], timeout: float, call: str) -> None:
        super().__init__(jax.process_index(), jax.process_count(), timeout, call)
        self.owners = [device.process_index for device in devices]
        self._aborts = ExitStack()

    def __enter__(self) -> "Distributed":
        self._aborts.enter_context(late_aborts())
        try:
            super().__enter__()
        except RunError:
            end_alone()
            raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if any(peer.lost or not peer.word for peer in self.others):
            end_alone()
        self._aborts.__exit__(kind, error, trace)

    def exchange(self, value: Any) -> list[Any]:
        """Exchange through the store of jax's coordination service, where each leaves its value."""
        store: Any = global_state.client
        deadline = time.monotonic() + self.timeout
        names = [f"pipelab/{Distributed.exchanges}/{number}" for number in range(self.count)]
        found = []
        with lost(jax.errors.JaxRuntimeError):
            store.key_value_set(names[self.me], json.dumps(value))
            for number, name in enumerate(names):
                left = max(1, int(1000 * (deadline - time.monotonic())))
                try:
                    found.append(json.loads(store.blocking_key_value_get(name, left)))
                except jax.errors.JaxRuntimeError as error:
                    if "DEADLINE_EXCEEDED" not in str(error):
                        raise
                    store.key_value_delete(names[self.me])
                    raise RunError(
                        f"process {number} has not made the call within {self.timeout:g} s: make "
                        "it in all processes, or give it longer (timeout=)"
                    ) from None
        Distributed.exchanges += 1
        return found

    def ranks(self, count: int) -> Sequence[int]:
        return [row for row in range(count) if self.owners[row] == self.me]

    def make_wire(self, jobs: Sequence[Job]) -> Wire:
        return open_jax_wire(jobs[0], self.me, self.owners, self.share)


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


def end_alone() -> None:
    """Let this process end when it has nothing more to do, although others are dead or hang.

    jax would wait for them at its end, until it is aborted. So it forgets its coordination service,
    which is never freed, since that would abort the processes that still refer to it.
    """
    atexit.unregister(_forget)
    atexit.register(_forget)


def _forget() -> None:
    for name in ("preemption_sync_manager", "client", "service"):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(getattr(global_state, name)))
        setattr(global_state, name, None)
