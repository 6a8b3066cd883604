"""The process launcher: one process a device on this machine, from a notebook too.

It never leaves a process, file or port behind.
"""

import io
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Lock
from typing import Any, NoReturn

import cloudpickle
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from pipelab.runtime.launcher import STARTS, Launcher, RankJob, no_progress, place
from pipelab.runtime.orders import Order, Outcome
from pipelab.runtime.torch.child import Connected, Failure, perform, perform_once, rank_process
from pipelab.runtime.torch.copies import Compiled, compile_as, compiled_in
from pipelab.runtime.torch.imported import facts_of
from pipelab.runtime.torch.settings import settings
from pipelab.runtime.worker import RunError

PRELOAD = ["torch._dynamo", "pipelab.runtime.torch.child"]
STARTING = Lock()  # this process has one __main__


class Processes(Launcher):
    """This process starts one for every rank, and does all else itself."""

    def __init__(self, timeout: float) -> None:
        self.timeout, self.all = timeout, ExitStack()

    def start(self, jobs: Sequence[Any]) -> None:
        modules = [module for job in jobs for module in job.modules.values()]
        facts = facts_of(modules, jobs[0].options.loss, jobs[0].options.optimizer)
        self.running = self.all.enter_context(_started(jobs, partial(perform, facts)))

    def submit(self, orders: Sequence[Order]) -> None:
        for rank, order in zip(self.running, orders, strict=True):
            rank.send(order)

    def collect(self, call: str = "a batch's end") -> list[Outcome]:
        return _collect(self.running, self.timeout)

    def stop(self, error: BaseException | None = None) -> None:
        self.all.close()


def run_processes(jobs: Sequence[RankJob], work: Callable[..., Any], timeout: float) -> list:
    """work(job, progress) for every job in its own process, in one torch process group.

    When a rank raises or dies, or no action ends anywhere within `timeout` seconds, all are killed,
    their output is printed in the order of ranks, and one RunError names the device, its action and
    the cause. Jobs are sent with cloudpickle, so models and functions from a notebook's cells work.
    `progress` takes a number, whose meaning the job knows; each call shows progress of the rank.
    """
    with _started(jobs, partial(perform_once, work)) as ranks:
        return _collect(ranks, timeout)


@contextmanager
def _started(
    jobs: Sequence[RankJob], work: Callable[..., Iterator[Any]]
) -> Iterator[list["_Rank"]]:
    """The ranks, until they are killed; each does work(job, connected, orders)."""
    with tempfile.TemporaryDirectory(prefix="pipelab-") as name:
        folder = Path(name)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        ranks = []
        try:
            shared = context.RawArray("q", [STARTS] * len(jobs)), context.RawArray("d", len(jobs))
            connected = Connected(*shared, name, dict(os.environ))
            with _main_hidden():
                _start_server()
                for job in jobs:
                    # It may raise: before the process is there.
                    packed = _dumps((job, work, _registered(), settings()))
                    ranks.append(_start(context, job, connected))
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
        self.sends.submit(self.connection.send_bytes, _dumps(_on_host(order)))

    @property
    def place(self) -> str:
        """Its action, by its progress mark."""
        return place(self.job, self.marks[self.job.rank])

    def receive(self) -> Any:
        """The message it has sent: its outcome, or a Failure. RunError if it has died instead."""
        try:
            return cloudpickle.loads(self.connection.recv_bytes())
        except (EOFError, ConnectionError):
            self.process.join(5)
            code = self.process.exitcode
            how = f"ended with status {code}"
            if code and code < 0:
                how = f"was killed by {signal.Signals(-code).name}"
            text = f"{self.job.where}, action {self.place}: its process {how}"
            raise RunError(text, self.job.row) from None


class _Remote(Exception):
    """The traceback of a rank, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _start_server() -> None:
    """Start what ranks are forked from. Ctrl-C, which comes to it too, would end its imports."""
    resource_tracker.ensure_running()  # the server would start it, and that ends the blocking
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    except OSError as error:
        if "path too long" not in str(error):
            raise
        folder = tempfile.gettempdir()
        raise ValueError(
            f"processes meet at a socket in {folder}, but its path is too long: set TMPDIR to a "
            "shorter path"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(context: Any, job: RankJob, connected: Connected) -> _Rank:
    mine, theirs = context.Pipe()
    arguments = (theirs, job.rank, connected)
    process = context.Process(target=rank_process, args=arguments, name=f"pipelab rank {job.rank}")
    process.start()
    theirs.close()
    return _Rank(job, process, mine, connected.marks)


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
    left: dict[Any, _Rank] = {rank.connection: rank for rank in ranks}
    last, since = ranks[0].marks[:], time.monotonic()
    while left:
        for rank in map(left.pop, wait(left, timeout=0.25)):
            outcome = rank.receive()
            if isinstance(outcome, Failure):
                _blame(outcome, left)
            outcomes[rank.job.rank] = outcome
        now = ranks[0].marks[:]
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > timeout:
            places = [f"{rank.job.where} at {rank.place}" for rank in left.values()]
            row = next(iter(left.values())).job.row
            raise RunError(f"{no_progress(places, timeout)}; the processes were killed", row)
    return [outcomes[rank] for rank in sorted(outcomes)]


def _blame(failure: Failure, others: dict[Any, _Rank]) -> NoReturn:
    """Raise a rank's failure; if it only lost its connection to another, what happened to that."""
    deadline = time.monotonic() + 2
    while failure.secondary and others and time.monotonic() < deadline:
        for rank in map(others.pop, wait(others, timeout=0.1)):
            news = rank.receive()
            if isinstance(news, Failure) and not news.secondary:
                failure = news
    raise failure.error from _Remote(failure.traceback)


class _Pickler(cloudpickle.Pickler):
    """Pickles what torch by itself would refuse, or make far too large."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, nn.Module):
            cls, compiled = type(value), compiled_in(value)
            bare = parametrize.is_parametrized(value)
            if bare or compiled:
                # A parametrized one's class forbids it, since others could not import that:
                # cloudpickle sends it along. No state has what is compiled.
                state: Any = (super(cls, value) if bare else value).__getstate__()
                rest = {name: part for name, part in state.items() if name not in compiled}
                return cls.__new__, (cls,), (rest, compiled), None, None, _restore
        plain = type(value) is Tensor and value.layout is torch.strided and not value.requires_grad
        if plain and value.nbytes < value.untyped_storage().nbytes():
            # A slice, as a micro-batch is of its batch: it would be pickled with all of that.
            return value.clone().__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        return super().reducer_override(value)


def _restore(module: nn.Module, sent: tuple[dict[str, Any], Compiled]) -> None:
    state, compiled = sent
    module.__setstate__(state)
    compile_as(module, compiled)


def _on_host(order: Order) -> Order:
    """The order with its data on the host: a rank would open the GPU that they are on."""

    def moved(data: Any) -> Any:
        return pytree.tree_map_only(Tensor, Tensor.cpu, data)

    microbatches = {
        s: {k: replace(fed, x=moved(fed.x), target=moved(fed.target)) for k, fed in pairs.items()}
        for s, pairs in order.microbatches.items()
    }
    return replace(order, microbatches=microbatches)


def _registered() -> list[Any]:
    """The pytrees of a notebook or script, which no rank runs."""
    nodes = pytree.SUPPORTED_NODES.values()
    return [node for node in nodes if getattr(node.type, "__module__", "") == "__main__"]


def _dumps(value: Any) -> memoryview:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getbuffer()
