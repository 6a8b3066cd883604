"""The process launcher: one process a device on this machine, from a notebook too.

Whatever happens, no process, file or port is left behind.
"""

import ctypes
import io
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.util import get_temp_dir
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NamedTuple, NoReturn

import cloudpickle
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from pipelab.runtime.threads import (
    BEFORE,
    Orders,
    RankJob,
    Threads,
    no_progress,
    place,
)
from pipelab.runtime.torch.groups import FOREVER
from pipelab.runtime.torch.pipes import Pipe
from pipelab.runtime.transport import Lost
from pipelab.runtime.wire import Ends, Wire, pairs_of_ranks, pairs_of_replicas
from pipelab.runtime.worker import Job, Order, Outcome, RunError, told

PRELOAD = ["torch._dynamo", "pipelab.runtime.torch.processes"]
STARTING = Lock()  # this process has one __main__
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


@dataclass
class Processes(Threads):
    """This process starts one for every rank, and keeps the rest to itself."""

    timeout: float

    def __post_init__(self) -> None:
        self.all = ExitStack()

    def start(self, jobs: Sequence[Job], *_: Any) -> None:
        pairs = pairs_of_ranks(jobs[0]) + pairs_of_replicas(jobs[0])
        self.running = self.all.enter_context(_started(jobs, perform, pairs))

    def submit(self, orders: Sequence[Order]) -> None:
        for rank, order in zip(self.running, orders, strict=True):
            rank.send(order)

    def collect(self, call: str = "a batch's end") -> list[Outcome]:
        return _collect(self.running, self.timeout)

    def stop(self, error: BaseException | None = None) -> None:
        self.all.close()


class Connected(NamedTuple):
    """What connects a rank to the others.

    pipes   from each other rank, and to it: this rank's ends of them
    ready   when each rank was, on the clock of all processes; 0 before
    folder  of all, for files; there until the ranks are killed
    """

    pipes: dict[int, tuple[Connection, Connection]]
    ready: Any
    folder: str


def perform(
    job: Job, progress: Callable[[int], None], connected: Connected, orders: Orders
) -> Iterator[Outcome]:
    """Do the orders of this rank's job, at the same time as the others, until it is killed."""

    def began() -> float:
        connected.ready[job.rank] = time.perf_counter()
        while not all(connected.ready):
            time.sleep(1e-3)
        return max(connected.ready) + 0.01

    wire = Wire(job, {(job.rank, r): Pipe(*ends) for r, ends in connected.pipes.items()})
    rank = Threads()
    rank.start([job], [wire] * job.replicas, lambda _: progress, began)
    while order := orders.get():
        rank.submit([order])
        del order  # else its data would be kept until the next
        yield from rank.collect()


def run_processes(jobs: Sequence[RankJob], work: Callable[..., Any], timeout: float) -> list:
    """work(job, progress) for every job in a process of its own, connected by torch.distributed.

    When a rank raises or dies, or no action ends anywhere within `timeout` seconds, all are killed,
    what they printed is written out in the order of ranks, and one RunError names the device, its
    action and the cause. Jobs are sent with cloudpickle, so models and functions defined in a
    notebook's cells work. `progress` takes a number, whose meaning the job knows; each call shows
    that the rank gets on.
    """
    with _started(jobs, partial(_in_a_group, work, len(jobs))) as ranks:
        return _collect(ranks, timeout)


def _in_a_group(
    work: Callable[..., Any],
    count: int,
    job: RankJob,
    progress: Callable[[int], None],
    connected: Connected,
    orders: Orders,
) -> Iterator[Any]:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meeting = f"file://{connected.folder}/rendezvous"
    dist.init_process_group(
        "gloo", init_method=meeting, world_size=count, rank=job.rank, timeout=FOREVER
    )
    yield work(job, progress)


@contextmanager
def _started(
    jobs: Sequence[RankJob], work: Callable[..., Iterator[Any]], pairs: Sequence[Ends] = ()
) -> Iterator[list["_Rank"]]:
    """The ranks, until they are killed; each does work(job, progress, connected, orders).

    pairs  of ranks, which are connected by pipes
    """
    with tempfile.TemporaryDirectory(prefix="pipelab-") as name:
        folder = Path(name)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        marks = context.RawArray("q", [BEFORE] * len(jobs))  # of progress, in shared memory
        ranks = []
        try:
            with _main_hidden(), _connected(context, len(jobs), pairs, name) as connected:
                _start_server()
                for job, of_job in zip(jobs, connected, strict=True):
                    # It may raise: before the process is there.
                    packed = _dumps((job, work, _registered()))
                    ranks.append(_start(context, job, marks, of_job))
                    ranks[-1].connection.send_bytes(packed)
            yield ranks
        finally:
            for rank in ranks:
                rank.process.kill()
            for rank in ranks:
                rank.sends.shutdown()  # whoever writes to it does not wait any more
                rank.connection.close()
                rank.process.join()
                rank.process.close()
            for log in sorted(folder.glob("log*")):
                sys.stdout.write(log.read_text(errors="replace"))


@dataclass
class _Rank:
    """A rank as its parent sees it."""

    job: RankJob
    process: Any
    connection: Connection
    marks: Any

    def __post_init__(self) -> None:
        self.sends = ThreadPoolExecutor(1, "pipelab orders")

    def send(self, order: Order) -> None:
        """Does not wait for a rank that hangs."""
        self.sends.submit(self.connection.send_bytes, _dumps(order))

    @property
    def place(self) -> str:
        """Its action, by its progress mark."""
        return place(self.job, self.marks[self.job.rank])

    def receive(self) -> Any:
        """The message it has sent: its outcome, or a _Failure. RunError if it has died instead."""
        try:
            return cloudpickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join(5)
            code = self.process.exitcode
            how = f"ended with status {code}"
            if code and code < 0:
                how = f"was killed by {signal.Signals(-code).name}"
            text = f"{self.job.where}, action {self.place}: its process {how}"
            raise RunError(text, self.job.rank) from None


class _Failure:
    """The message of a rank that fails: its error, with the cause as text.

    secondary  whether it only lost its connection to another rank
    """

    def __init__(self, job: RankJob, error: BaseException) -> None:
        cause = error.__cause__ if isinstance(error, RunError) and error.__cause__ else error
        self.traceback = "".join(traceback.format_exception(cause))
        self.secondary = isinstance(cause, Lost)
        if not isinstance(error, RunError):
            error = RunError(f"{job.where}: {told(error)}", job.rank)
        error.__cause__ = None
        self.error = error


class _Remote(Exception):
    """The traceback of a rank, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


# ---- in the parent


@contextmanager
def _connected(
    context: Any, count: int, pairs: Sequence[Ends], folder: str
) -> Iterator[Sequence[Connected]]:
    """What each rank is connected by; in this process it is open until all have been started."""
    ready = context.RawArray("d", count)
    ranks = [Connected({}, ready, folder) for _ in range(count)]
    with ExitStack() as ends:
        for a, b in pairs:
            (from_b, to_a), (from_a, to_b) = context.Pipe(duplex=False), context.Pipe(duplex=False)
            ranks[a].pipes[b], ranks[b].pipes[a] = (from_b, to_b), (from_a, to_a)
            for end in (from_b, to_b, from_a, to_a):
                ends.enter_context(end)
        yield ranks


def _start_server() -> None:
    """Start what ranks are forked from. Ctrl-C, which comes to it too, would end its imports."""
    resource_tracker.ensure_running()  # the server would start it, and that ends the blocking
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(context: Any, job: RankJob, marks: Any, connected: Connected) -> _Rank:
    mine, theirs = context.Pipe()
    arguments = (theirs, job.rank, marks, connected)
    process = context.Process(target=_rank, args=arguments, name=f"pipelab rank {job.rank}")
    process.start()
    theirs.close()
    return _Rank(job, process, mine, marks)


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Keep multiprocessing from running the caller's script again in every process.

    Jobs bring all that they need. Runs of several threads take turns: none shows it while another
    starts its ranks, or keeps what another has hidden.
    """
    main = sys.modules["__main__"]
    with STARTING:
        hidden: dict[str, Any] = {
            name: vars(main).pop(name) for name in ("__file__", "__spec__") if name in vars(main)
        }
        main.__spec__ = None
        try:
            yield
        finally:
            vars(main).update(hidden)


def _collect(ranks: Sequence[_Rank], timeout: float) -> list[Any]:
    """The outcomes of all ranks. RunError for the first that fails, or if none gets on."""
    outcomes = {}
    left = list(ranks)
    last, since = ranks[0].marks[:], time.monotonic()
    while left:
        wait([rank.connection for rank in left], timeout=0.25)
        for rank in [rank for rank in left if rank.connection.poll()]:
            left.remove(rank)
            outcome = rank.receive()
            if isinstance(outcome, _Failure):
                _blame(outcome, left)
            outcomes[rank.job.rank] = outcome
        now = ranks[0].marks[:]
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > timeout:
            held = no_progress([f"{rank.job.where} at {rank.place}" for rank in left], timeout)
            raise RunError(f"{held}; the processes were killed", left[0].job.rank)
    return [outcomes[rank] for rank in sorted(outcomes)]


def _blame(failure: _Failure, others: list[_Rank]) -> NoReturn:
    """Raise a rank's failure; if it only lost its connection to another, what happened to that."""
    deadline = time.monotonic() + 2
    while failure.secondary and others and time.monotonic() < deadline:
        wait([rank.connection for rank in others], timeout=0.1)
        for rank in [rank for rank in others if rank.connection.poll()]:
            others.remove(rank)
            found = rank.receive()
            if isinstance(found, _Failure) and not found.secondary:
                failure = found
    raise failure.error from _Remote(failure.traceback)


class _Pickler(cloudpickle.Pickler):
    """Pickles what torch by itself would refuse, or make far too large."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, nn.Module) and parametrize.is_parametrized(value):
            # Its class forbids it, since others could not import that: cloudpickle sends it along.
            cls = type(value)
            return cls.__new__, (cls,), super(cls, value).__getstate__()
        plain = type(value) is Tensor and value.layout is torch.strided and not value.requires_grad
        if plain and value.nbytes < value.untyped_storage().nbytes():
            # A slice, as a micro-batch is of its batch: it would be pickled with all of that.
            return value.clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(value)


def _registered() -> list[Any]:
    """The pytrees of a notebook or script, which no rank runs."""
    nodes = pytree.SUPPORTED_NODES.values()
    return [node for node in nodes if getattr(node.type, "__module__", "") == "__main__"]


def _dumps(value: Any) -> memoryview:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getbuffer()


# ---- in the rank


def _rank(connection: Connection, rank: int, marks: Any, connected: Connected) -> None:
    """A rank's process: receive the job, do it, send the outcomes or the error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides
    folder = connected.folder
    if not os.path.isdir(folder):  # the caller was interrupted while it started this
        os._exit(1)
    with open(os.path.join(folder, f"log{rank:04}"), "w", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        # They are None where the caller's are closed. Else libraries expect them at 1 and 2.
        sys.stdout, sys.stderr = sys.stdout or log, sys.stderr or log
        job, work, registered = cloudpickle.loads(_receive(connection, folder))
        for node in registered:
            pytree.register_pytree_node(node.type, node.flatten_fn, node.unflatten_fn)
        orders: Orders = SimpleQueue()
        listener = Thread(target=_listen, args=(connection, folder, orders), daemon=True)
        listener.start()
        torch.set_num_threads(1)  # the ranks share this machine's cores
        _keep_freed_memory()
        try:
            for outcome in work(job, partial(marks.__setitem__, rank), connected, orders):
                _send(connection, outcome)
                del outcome
        except BaseException as error:
            try:
                _send(connection, _Failure(job, error))
            except OSError:
                listener.join(5)  # the caller was killed: it clears up, and ends this process
        os._exit(0)


def _send(parent: Connection, outcome: Any) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    parent.send_bytes(cloudpickle.dumps(outcome))


def _listen(parent: Connection, folder: str, orders: Orders) -> None:
    while True:
        orders.put(pickle.loads(_receive(parent, folder)))


def _receive(parent: Connection, folder: str) -> bytes:
    """The caller's message. One that is killed cannot clean up after itself: its ranks do."""
    try:
        return parent.recv_bytes()
    except (EOFError, OSError):
        shutil.rmtree(folder, ignore_errors=True)
        caller: Any = multiprocessing.parent_process()
        caller.join(1)  # its pipes are closed one by one
        if not caller.is_alive():  # else an interrupt ended the start of this rank
            shutil.rmtree(get_temp_dir(), ignore_errors=True)  # with the fork server's address
        os._exit(1)


def _keep_freed_memory() -> None:
    """Keep freed memory with this process.

    Else malloc gives gradients back to the kernel after every update, and each of their pages costs
    a fault when the next batch needs it: of 4 MB a thousand, which was 5 % of a batch of 80 ms.
    """
    with suppress(AttributeError, TypeError):  # another C library than GNU's
        malloc = ctypes.CDLL(None)
        malloc.mallopt(M_TRIM_THRESHOLD, 2**30)
        malloc.mallopt(M_MMAP_THRESHOLD, 2**25)  # the most that it takes
