"""The process of a rank that `processes` starts: it works until its parent kills it."""

import ctypes
import os
import pickle
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from multiprocessing.util import get_temp_dir
from queue import SimpleQueue
from threading import Thread
from typing import Any, NamedTuple

import cloudpickle
import torch
import torch.distributed as dist
from torch.utils import _pytree as pytree

from pipelab.runtime.launcher import BEFORE, Orders, RankJob
from pipelab.runtime.orders import Outcome
from pipelab.runtime.threads import Threads
from pipelab.runtime.torch import settings
from pipelab.runtime.torch.groups import FOREVER, GroupWire
from pipelab.runtime.torch.imported import Facts, check_same, facts_of
from pipelab.runtime.transport import Lost
from pipelab.runtime.worker import RunError, told

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h


class Connected(NamedTuple):
    """What a rank shares with the others and with their parent.

    marks   of progress, by rank
    ready   when each rank was ready, on the common clock; 0 before
    folder  for files of all; it exists until the ranks are killed
    environment  the caller's now: the server that ranks are forked from may be older
    """

    marks: Any
    ready: Any
    folder: str
    environment: dict[str, str]


class Failure:
    """The message of a rank that fails: its error, with the cause as text.

    secondary  whether it only lost its connection to another rank
    """

    def __init__(self, job: RankJob, error: BaseException) -> None:
        cause = error.__cause__ if isinstance(error, RunError) and error.__cause__ else error
        self.traceback = "".join(traceback.format_exception(cause))
        self.secondary = isinstance(cause, Lost)
        if not isinstance(error, RunError):
            error = RunError(f"{job.where}: {told(error)}", job.row)
        error.__cause__ = None
        self.error = error


def rank_process(connection: Connection, rank: int, connected: Connected) -> None:
    """A rank's process: receive the job, do it, send the outcomes or the error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides
    folder = connected.folder
    os.environ.clear()
    os.environ.update(connected.environment)
    if not os.path.isdir(folder):  # the caller was interrupted while it started this
        os._exit(1)
    with open(os.path.join(folder, f"log{rank:04}"), "w", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        # They are None where the caller's are closed. Else libraries expect them at 1 and 2.
        sys.stdout, sys.stderr = sys.stdout or log, sys.stderr or log
        job, work, registered, values = cloudpickle.loads(_receive(connection, folder))
        for node in registered:
            pytree.register_pytree_node(node.type, node.flatten_fn, node.unflatten_fn)
        orders: Orders = SimpleQueue()
        listener = Thread(target=_listen, args=(connection, folder, orders), daemon=True)
        listener.start()
        threads = torch.get_num_threads()
        settings.use(values)
        if torch.get_num_threads() == threads:  # the caller has set none
            torch.set_num_threads(1)  # the ranks share this machine's cores
        _keep_freed_memory()
        try:
            _join(rank, connected)
            connected.marks[rank] = BEFORE
            for outcome in work(job, connected, orders):
                _send(connection, outcome)
                del outcome
        except BaseException as error:
            try:
                _send(connection, Failure(job, error))
            except OSError:
                listener.join(5)  # the caller was killed: it clears up, and ends this process
        os._exit(0)


# ---- what it does


def perform(facts: Facts, job: Any, connected: Connected, orders: Orders) -> Iterator[Outcome]:
    """Do the orders of this rank's job, in step with the others, until it is killed.

    facts  what the caller has in modules: see `imported`
    """
    own = facts_of([*job.modules.values()], job.options.loss, job.options.optimizer)
    check_same(facts, own)

    def began() -> float:
        connected.ready[job.rank] = time.perf_counter()
        while not all(connected.ready):
            time.sleep(1e-3)
        return max(connected.ready) + 0.01

    wire = GroupWire(job, [""] * len(connected.ready))
    rank = Threads()
    rank.start([job], [wire] * job.replicas, connected.marks, began)
    while order := orders.get():
        rank.submit([order])
        del order  # else its data would be kept until the next
        yield from rank.collect()


def perform_once(
    work: Callable[..., Any], job: RankJob, connected: Connected, orders: Orders
) -> Iterator[Any]:
    """work(job, progress), once, without orders."""
    yield work(job, partial(connected.marks.__setitem__, job.rank))


def _join(rank: int, connected: Connected) -> None:
    """Join the process group of all ranks."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meeting, count = f"file://{connected.folder}/rendezvous", len(connected.ready)
    dist.init_process_group(
        "gloo", init_method=meeting, world_size=count, rank=rank, timeout=FOREVER
    )


# ---- between it and its parent


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
        caller: Any = parent_process()
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
