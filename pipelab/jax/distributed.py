"""The launcher of JAX pipelines over the processes of jax.distributed: each does its own rows."""

import atexit
import ctypes
import os
import pickle
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from itertools import count, takewhile
from secrets import randbits
from signal import SIGABRT
from socket import AF_INET, SOCK_DGRAM, socket
from typing import Any

import jax
import numpy as np
from jax._src.distributed import global_state  # no public way to it
from jax.errors import JaxRuntimeError
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from pipelab.jax.host import words
from pipelab.runtime.cluster import LEAVING, Cluster, thread_of
from pipelab.runtime.launcher import LOOK
from pipelab.runtime.transport import Lost, lost
from pipelab.runtime.wire import Ends, Wire, apart, pairs_of_ranks, whole
from pipelab.runtime.worker import Job, RunError


class Distributed(Cluster):
    """The processes of jax.distributed; a process does the rows whose device is its own.

    owners  processes of all rows
    alone   whether another one is dead or hangs
    stored  whether process 0, which has the store, is alive

    When a process dies, jax's coordination service ends the others too: at once if it was process
    0, where the service is, else when its heartbeat has been missing for long enough (100 s, if
    jax.distributed.initialize is not given another `heartbeat_timeout_seconds`). They raise their
    RunError first. A process that hangs ends the run after `timeout`, which must therefore be the
    shorter one. If it hangs in its caller's code, it says so and ends on its own.
    """

    def __init__(self, devices: Sequence[jax.Device], timeout: float, call: str) -> None:
        super().__init__(jax.process_index(), jax.process_count(), timeout, call)
        self.owners = [device.process_index for device in devices]
        self.store: Any = global_state.client
        self.alone, self.stored = False, True
        self._aborts = ExitStack()
        self.connections: dict[int, Any] = {}

    def __enter__(self) -> "Distributed":
        self._aborts.enter_context(late_aborts())
        try:
            super().__enter__()
            self._connect()
        except RunError:
            self.over.set()
            if self.first:  # the store ends with it, and others wait a little longer than it did
                time.sleep(LEAVING)
            end_alone()
            raise
        atexit.unregister(_forget)  # whoever left alone once is here again
        return self

    def _connect(self) -> None:
        hosts = self.share(own_address())
        self.server = server_at(hosts[self.me] if len({*hosts}) > 1 else "127.0.0.1")
        addresses = enumerate(self.share(self.server.address()))
        self.connections = {n: self.server.connect(a) for n, a in addresses if n != self.me}
        self.threads += [thread_of(self._outlive, *other) for other in self.connections.items()]

    def _outlive(self, number: int, connection: Any) -> None:
        """Hear when a process ends: it is asked for what it never offers."""
        try:
            pull(connection, randbits(62), [((), np.int32)], jax.local_devices()[0])
        except Lost:
            if self.over.is_set():
                return
            failed = self.failure
            self.alone, gone = True, self._gone(number)
            if number == 0:
                self.failure, self.stored = self.failure or gone, False
            self.failure = self.failure or self._agreed(gone)
            if failed:
                self._end_unheard(failed)

    def _end_unheard(self, failed: RunError) -> None:
        """End this process if it is lost, and never hears of a failure: jax would abort it later.

        One that is only slow comes to its next call, and raises it there.
        """
        while not self.over.wait(LOOK):
            if time.monotonic() > self.due:
                sys.stderr.write(f"{type(failed).__name__}: {failed}\n")
                sys.stderr.flush()
                os._exit(1)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.over.set()
        for connection in self.connections.values():
            end_pulls(connection)
        super().__exit__(kind, error, trace)
        if error and not self.alone:
            self.alone = True
            thread_of(self._leave).join(2 * LEAVING)
        if self.alone:
            end_alone()
        self._aborts.__exit__(kind, error, trace)

    def _leave(self) -> None:
        """After a failure: all together, if no process is dead, or comes later than the others."""
        self._say_left()
        with suppress(Lost):
            deadline, together = time.monotonic() + LEAVING, True
            for number in range(self.count):
                seconds = max(0.001, deadline - time.monotonic())
                together &= self._take(f"{self.meeting}/left/{number}", seconds) is not None
            # At its end jax waits for all: the first to know says whether there will be all.
            self.alone = not self.give_first(f"{self.meeting}/together", together)

    def _say_left(self) -> None:
        with suppress(Lost):
            self.give(f"{self.meeting}/left/{self.me}", True)

    def ranks(self, count: int) -> Sequence[int]:
        return [row for row in range(count) if self.owners[row] == self.me]

    def make_wire(self, jobs: Sequence[Job]) -> Wire:
        return self.wire_between(pairs_of_ranks(jobs[0]), jobs)

    def wire_between(self, pairs: Iterable[Ends], jobs: Sequence[Job]) -> Wire:
        """A wire of pairs of rows."""
        names, links = f"{self.meeting}/wire/{self._told_count}", {}
        devices = {job.row: job.make_device().device for job in jobs}
        for a, b in [ends for pair in pairs for ends in (pair, pair[::-1])]:
            other = self.owners[b]
            if self.owners[a] == self.me != other:
                to, back = f"{names}/{a}-{b}", f"{names}/{b}-{a}"
                ends = self.server, self.connections[other]
                links[a, b] = TransferLink(self, to, back, *ends, devices[a])
        return Wire(jobs[0], links)

    # ---- the store of jax's coordination service

    def give(self, name: str, value: Any) -> None:
        with lost(JaxRuntimeError):
            self._request("key_value_set_bytes", name, pickle.dumps(value), allow_overwrite=True)

    def give_first(self, name: str, value: Any) -> Any:
        with suppress(JaxRuntimeError):  # there is one
            self._request("key_value_set_bytes", name, pickle.dumps(value))
        if (given := self._take(name, LEAVING)) is None:
            raise Lost(f"{name} is not in the store")
        return given

    def take(self, names: Sequence[str], seconds: float) -> list[Any]:
        # Each name may take so long: a large value is slow to arrive.
        found = [*takewhile(lambda v: v is not None, (self._take(n, seconds) for n in names))]
        return found + [None] * (len(names) - len(found))

    def _take(self, name: str, seconds: float) -> Any:
        with lost(JaxRuntimeError):
            try:
                patience = max(1, int(1000 * seconds))
                found = self._request("blocking_key_value_get_bytes", name, patience)
            except JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" in str(error):
                    return None
                raise
        return pickle.loads(found)

    def look(self, names: Sequence[str], perhaps: str) -> list[Any]:
        with lost(JaxRuntimeError):
            found = [self._request("key_value_try_get_bytes", name) for name in names]
            with suppress(JaxRuntimeError):
                found.append(self._request("key_value_try_get_bytes", perhaps))
        return [pickle.loads(value) for value in found]

    def drop(self, name: str) -> None:
        with lost(JaxRuntimeError):
            self._request("key_value_delete", name)

    def _request(self, call: str, *given: Any, **options: Any) -> Any:
        """The result of a call to the store; Lost if process 0, which has it, has ended.

        In a thread: the one that would bring the answer may be the one that aborts (`late_aborts`).
        """
        answer: list[Any] = []

        def ask() -> None:
            try:
                answer.append(getattr(self.store, call)(*given, **options))
            except Exception as error:
                answer.append(error)

        thread = thread_of(ask)
        while thread.is_alive() and self.stored:
            thread.join(LOOK)
        if not answer:
            raise Lost("process 0 is gone")
        if isinstance(answer[0], Exception):
            raise answer[0]
        return answer[0]


@contextmanager
def late_aborts() -> Iterator[None]:
    """An abort of this process within, or after an error, comes six seconds later.

    A thread of jax's aborts as soon as it hears that another process is dead. Python cannot prevent
    that, and the run's error would be lost. But abort() waits for the handler of its signal, which
    sleeps here. The other threads continue meanwhile, unless they wait for what that thread holds:
    then the abort is the only end. (jax_enable_recoverability, which must be set before
    jax.distributed.initialize, prevents the abort only if the dead process is not process 0.)
    """
    c = ctypes.CDLL(None)
    c.signal.argtypes, c.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    # A handler in C, since none in Python can run there. It is called with the signal's number, and
    # SIGABRT is 6: C's own `sleep`, as the handler, is called as sleep(6), and sleeps six seconds.
    sleeps_six_seconds = ctypes.cast(c.sleep, ctypes.c_void_p)
    before = c.signal(SIGABRT, sleeps_six_seconds)
    yield
    c.signal(SIGABRT, before)  # after an error it stays: the abort may still come


def end_alone() -> None:
    """Let this process end when it is done, although others are dead or hang.

    jax would wait for them at its end, until it is aborted. So it forgets its coordination service,
    which is never freed, since that would abort the processes that still refer to it.
    """
    atexit.unregister(_forget)
    atexit.register(_forget)


def _forget() -> None:
    # Python ends without giving these references back; a list of ours it would empty, which frees.
    for name in ("preemption_sync_manager", "client", "service"):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(getattr(global_state, name)))
        setattr(global_state, name, None)


# ---- how arrays travel: by jax's transfer servers, one of each process (experimental in jax)


def own_address() -> str:
    """This host's address for others: the one from which it calls process 0."""
    with suppress(OSError), socket(AF_INET, SOCK_DGRAM) as probe:
        coordinator, _, port = str(global_state.coordinator_address).rpartition(":")
        probe.connect((coordinator, int(port)))  # no packet is sent
        return probe.getsockname()[0]
    return "127.0.0.1"


@cache
def server_at(address: str) -> Any:
    """This process's server; there is no way to close it."""
    client = jax.local_devices()[0].client
    return transfer.start_transfer_server(client, f"{address}:0", [f"{address}:0"] * 2)


def pull(connection: Any, number: int, shapes: Sequence[Any], device: jax.Device) -> list[Any]:
    """The arrays that another process offers by a number; waits for them. Lost if it has ended."""
    home = SingleDeviceSharding(device)
    wanted = [jax.ShapeDtypeStruct(shape, dtype, sharding=home) for shape, dtype in shapes]
    with lost(JaxRuntimeError):
        return jax.block_until_ready(connection.pull(number, wanted))


def end_pulls(connection: Any) -> None:
    """Stop waiting for the other process: at this one's end, that would abort it."""
    connection._poison_connection()


class TransferLink:
    """A link of a row to one of another process: arrays by the servers, all else by the store.

    store       the cluster, which has it
    to, back    begin the names of messages to the other row, and from it
    connection  to the other process's server
    device      from which arrays leave, and at which they arrive
    """

    def __init__(
        self, store: Any, to: str, back: str, server: Any, connection: Any, device: jax.Device
    ) -> None:
        self.store, self.server, self.connection = store, server, connection
        self.names = (f"{to}/{n}" for n in count()), (f"{back}/{n}" for n in count())
        self.device, self.ended = device, False

    def write(self, message: Any) -> None:
        """Send a message; does not wait for the reader. Lost if the store is."""
        skeleton, arrays = apart(message, arrays_of)
        shapes = [(array.shape, array.dtype) for array in arrays]
        number = randbits(62)  # nobody else can guess it
        if arrays:
            self.server.await_pull(number, jax.device_put(arrays, self.device))
        self.store.give(next(self.names[0]), (skeleton, number, shapes))

    def read(self) -> Any:
        """The next message; waits for it. Lost if the other process has ended, or the run."""
        name = next(self.names[1])
        while not self.ended:
            (message,) = self.store.take([name], LOOK)
            if message:
                skeleton, number, shapes = message
                self.store.drop(name)
                arrays = pull(self.connection, number, shapes, self.device) if shapes else []
                return whole(skeleton, arrays)
        raise Lost("the run has ended")

    def end(self) -> None:
        self.ended = True

    def close(self) -> None:
        """All that was sent has been read, when the run has ended."""


def arrays_of(value: Any) -> Any:
    """What of a message is put aside; what is special about other arrays, jax's pickle keeps."""
    # An empty one would never come.
    plain = isinstance(value, jax.Array) and words(value) is value and not value.weak_type
    return value if plain and value.size else NotImplemented
