"""The process launcher: one process a device on this machine, from a notebook too, and nothing left behind."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from threading import Thread
from typing import Any, NoReturn, Protocol

import cloudpickle

from pipelab.executors.job import Job
from pipelab.executors.result import Outcome
from pipelab.executors.threads import Threads
from pipelab.executors.worker import RunError

PRELOAD = [
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "cloudpickle",
    "pipelab.executors.torch.processes",
    "pipelab.executors.torch.ranks",
]


class Processes(Threads):
    """A `Launcher`: this process starts one for every rank, and keeps the rest to itself."""

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        from pipelab.executors.torch.ranks import perform

        return run_processes(jobs, perform, self.timeout)


class RankJob(Protocol):
    """What a rank is given: its number, a name for errors, and what its progress marks mean."""

    @property
    def rank(self) -> int: ...
    @property
    def where(self) -> str: ...
    def doing(self, mark: int) -> str: ...


def run_processes(
    jobs: Sequence[RankJob],
    work: Callable[[Any, Callable[[int], None]], Any],
    timeout: float = 60.0,
) -> list:
    """work(job, progress) for every job in a process of its own, connected by torch.distributed over loopback.

    A rank that raises, dies or does not end an action within `timeout` seconds ends the run: all are killed, what they
    printed is written out in the order of ranks, and one RunError names the device, its action and the cause. Jobs are
    sent with cloudpickle, so models and functions defined in a notebook's cells work. `progress` takes a number, whose
    meaning the job knows; each call shows that the rank still lives.
    """
    with tempfile.TemporaryDirectory(prefix="pipelab-") as name:
        folder, ranks = Path(name), []
        marks = folder / "progress"
        marks.write_bytes(b"\xff" * 8 * len(jobs))
        try:
            with _main_hidden():
                for job in jobs:
                    ranks.append(_start(job, work, len(jobs), folder))
            return _collect(jobs, ranks, marks, timeout)
        finally:
            for process, connection in ranks:
                process.kill()
                connection.close()
            for process, _ in ranks:
                process.join()
                process.close()
            for log in sorted(folder.glob("log*")):
                sys.stdout.write(log.read_text(errors="replace"))


def _context() -> Any:
    methods = multiprocessing.get_all_start_methods()
    context = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if "forkserver" in methods:
        context.set_forkserver_preload(PRELOAD)
    return context


def _start(job: RankJob, work: Callable, world: int, folder: Path) -> tuple[Any, Connection]:
    context = _context()
    mine, theirs = context.Pipe()
    process = context.Process(
        target=_rank, args=(theirs, job.rank, world, str(folder)), name=f"pipelab rank {job.rank}"
    )
    process.start()
    theirs.close()
    mine.send_bytes(cloudpickle.dumps((job, work)))
    return process, mine


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Keep multiprocessing from running the caller's script again in every process: jobs bring all they need."""
    main = sys.modules["__main__"]
    names: list[str] = [name for name in ("__file__", "__spec__") if name in vars(main)]
    hidden: dict[str, Any] = {name: vars(main).pop(name) for name in names}
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(hidden)


def _collect(
    jobs: Sequence[RankJob], ranks: list[tuple[Any, Connection]], marks: Path, timeout: float
) -> list[Any]:
    outcomes: dict[int, Any] = {}
    last, since = b"", time.monotonic()
    while left := [rank for rank in range(len(ranks)) if rank not in outcomes]:
        wait([ranks[rank][1] for rank in left], timeout=0.25)
        for rank in left:
            if ranks[rank][1].poll():
                outcome = _receive(jobs, ranks, marks, rank)
                if isinstance(outcome, _Failure):
                    _blame(jobs, ranks, marks, outcome, [other for other in left if other != rank])
                outcomes[rank] = outcome
        now = marks.read_bytes()
        if now != last:
            last, since = now, time.monotonic()
        elif time.monotonic() - since > timeout:
            held = "; ".join(f"{jobs[rank].where} at {_action(jobs, marks, rank)}" for rank in left)
            raise RunError(
                f"no action ended within {timeout:g} s: {held}; the processes were killed",
                min(left),
            )
    return [outcomes[rank] for rank in range(len(ranks))]


def _receive(
    jobs: Sequence[RankJob], ranks: list[tuple[Any, Connection]], marks: Path, rank: int
) -> Any:
    """What a rank has sent; RunError if it has died instead."""
    process, connection = ranks[rank]
    try:
        return cloudpickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionError):
        process.join(5)
        code = process.exitcode
        how = (
            f"was killed by {signal.Signals(-code).name}"
            if code and code < 0
            else f"ended with status {code}"
        )
        raise RunError(
            f"{jobs[rank].where}, action {_action(jobs, marks, rank)}: its process {how}", rank
        ) from None


def _blame(
    jobs: Sequence[RankJob],
    ranks: list[tuple[Any, Connection]],
    marks: Path,
    failure: _Failure,
    others: list[int],
) -> NoReturn:
    """Raise a rank's failure; if it only lost its connection to another rank, what happened to that one."""
    deadline = time.monotonic() + 2
    while failure.secondary and others and time.monotonic() < deadline:
        wait([ranks[rank][1] for rank in others], timeout=0.1)
        for rank in [rank for rank in others if ranks[rank][1].poll()]:
            others.remove(rank)
            found = _receive(jobs, ranks, marks, rank)
            if isinstance(found, _Failure) and not found.secondary:
                failure = found
    raise failure.error from _Remote(failure.traceback)


def _action(jobs: Sequence[RankJob], marks: Path, rank: int) -> str:
    index = int.from_bytes(marks.read_bytes()[8 * rank : 8 * rank + 8], "little", signed=True)
    return jobs[rank].doing(index) if index >= 0 else "(before the first)"


class _Remote(Exception):
    """The traceback of a rank, as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _Failure:
    def __init__(self, error: RunError) -> None:
        cause = error.__cause__ or error
        self.traceback = "".join(traceback.format_exception(cause))
        self.secondary = isinstance(cause, ConnectionError)
        self.error = error
        error.__cause__ = None


# ---- in the rank


def _rank(connection: Connection, rank: int, world: int, folder: str) -> None:
    """A rank's process: receive the job, do it, send the outcome or the error; end when the parent does."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with open(os.path.join(folder, f"log{rank:04}"), "w", buffering=1) as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        job, work = cloudpickle.loads(connection.recv_bytes())
        Thread(target=_end_with, args=(connection, folder), daemon=True).start()
        try:
            outcome: Any = _perform(job, work, world, folder)
        except RunError as error:
            outcome = _Failure(error)
        except BaseException as error:
            wrapped = RunError(f"{job.where}: {type(error).__name__}: {error}", rank)
            wrapped.__cause__ = error
            outcome = _Failure(wrapped)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(cloudpickle.dumps(outcome))
        os._exit(0)


def _end_with(parent: Connection, folder: str) -> None:
    """A caller that is killed cannot clean up after itself: its ranks do."""
    try:
        parent.recv_bytes()
    except (EOFError, OSError):
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)


def _perform(job: RankJob, work: Callable, world: int, folder: str) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)  # the ranks share this machine's cores
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    where = f"file://{folder}/rendezvous"
    dist.init_process_group(
        "gloo", init_method=where, world_size=world, rank=job.rank, timeout=timedelta(minutes=30)
    )
    with (
        open(os.path.join(folder, "progress"), "r+b") as file,
        mmap.mmap(file.fileno(), 0) as marks,
    ):

        def progress(mark: int) -> None:
            marks[8 * job.rank : 8 * job.rank + 8] = mark.to_bytes(8, "little", signed=True)

        return work(job, progress)
