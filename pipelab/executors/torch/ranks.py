"""What a rank does: connect to the others, start with them, do its job.

Also the launcher of ranks that torchrun or another program has started.
"""

from __future__ import annotations

import atexit
import os
import pickle
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from threading import Thread
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pipelab.executors import clock
from pipelab.executors.job import Job, Launcher
from pipelab.executors.result import Outcome
from pipelab.executors.torch.wire import Wire, connected
from pipelab.executors.worker import RunError

BEFORE, AFTER = -1, -2  # marks of a rank before its first and after its last action
LOOK = 0.25  # seconds between two looks at how far the ranks are
FOREVER = timedelta(days=1)  # for torch, which counts a rank's wait for others who work as a hang
UNSENT = 9  # tag of a message that nobody sends


class RankJob(Protocol):
    """A rank's job: its number, a name for errors, and what its progress marks mean."""

    @property
    def rank(self) -> int: ...
    @property
    def where(self) -> str: ...
    def doing(self, mark: int) -> str: ...


def place(job: RankJob, mark: int) -> str:
    """Where a rank is, by its latest progress mark."""
    known = {BEFORE: "(before the first)", AFTER: "(after the last)"}
    return known.get(mark) or job.doing(mark)


def no_progress(places: Sequence[str], timeout: float) -> str:
    return f"no action ended within {timeout:g} s: {'; '.join(places)}"


def run_error(job: RankJob, device: int, error: BaseException) -> RunError:
    """What ended a rank, as the error of the run: itself, or with it as its cause."""
    if isinstance(error, RunError):
        return error
    wrapped = RunError(f"{job.where}: {type(error).__name__}: {error}", device)
    wrapped.__cause__ = error
    return wrapped


# ---- a rank's job


def perform(job: Job, progress: Callable[[int], None]) -> Outcome:
    """Do the job of this rank of the default process group, at the same time as the others."""
    home = job.home()
    if home.device.type == "cuda":
        torch.cuda.set_device(home.device)
    stages = job.stages(home)
    # [1] connect, and agree on a moment to begin
    with connected():
        ahead = offset()
        wire = _wire(job, home.device)
    with wire:
        began = torch.tensor([time.perf_counter() + ahead + 0.01], dtype=torch.float64)
        with connected():
            dist.all_reduce(began, dist.ReduceOp.MAX)
        mine = float(began) - ahead
        wire.began = None if job.pace else mine  # a paced message says itself when it is there
        home.begin(mine)
        time.sleep(max(0.0, mine - time.perf_counter()))
        # [2] the row
        with home.active():
            outcome = job.work(stages, home, wire, mine, progress)
        progress(AFTER)
    # [3] nobody leaves while its messages are on their way
    with connected():
        dist.barrier()
    return outcome


def offset(now: Callable[[], float] = time.perf_counter, host: str | None = None) -> float:
    """Seconds to add to this rank's clock `now` to read rank 0's: exactly 0 on its host.

    Every rank has to call it.
    """
    hosts = _gather(host or clock.host())
    mine, message = dist.get_rank(), torch.zeros(1, dtype=torch.float64)

    def ask() -> float:
        dist.send(message, 0)
        dist.recv(message, 0)
        return float(message)

    found = 0.0
    for rank, other in enumerate(hosts):
        if other == hosts[0]:
            continue
        if mine == rank:
            found = clock.behind(ask, now)
        if mine == 0:
            for _ in range(clock.ROUNDS):
                dist.recv(message, rank)
                message[0] = now()
                dist.send(message, rank)
    return found


def _wire(job: Job, device: torch.device) -> Wire:
    """The rank's wire: over NCCL if every rank has a GPU of its own.

    Process groups are made by all ranks in one order: one per direction and replica, since NCCL
    would let an early receive block what goes the other way, and one for the replicas of each
    device.
    """
    s = job.schedule
    devices = _gather((device.type, str(device), os.uname().nodename))
    nccl = all(kind == "cuda" for kind, *_ in devices) and len({*devices}) == len(devices)
    backend = "nccl" if nccl else "gloo"

    def group(places: Sequence[tuple[int, int]]) -> Any:
        """Of ranks by device and replica."""
        ranks = [row * job.replicas + replica for row, replica in places]
        return dist.new_group(ranks, timeout=FOREVER, backend=backend)

    channels, peers = {}, None
    if nccl:
        home = s.columns.device
        edges = {(int(home[s.inputs[i]]), int(home[i])) for i in s.crossing}
        for replica in range(job.replicas):
            for a, b in sorted(edges):
                made = group([(a, replica), (b, replica)])
                if replica == job.replica:
                    channels[a, b] = made
    if job.replicas > 1:
        for row in range(s.devices):
            made = group([(row, replica) for replica in range(job.replicas)])
            peers = made if row == job.row else peers
    return Wire(job, device, channels, peers)


def _gather(value: Any) -> list[Any]:
    """The values of all ranks."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# ---- ranks that look after each other


class _JobThread(Thread):
    """A rank's job in a thread; `mark` says how far it is."""

    def __init__(self, job: Job) -> None:
        super().__init__(daemon=True, name=f"pipelab rank {job.rank}")
        self.job, self.mark = job, BEFORE
        self.outcome: Future[Outcome] = Future()

    def run(self) -> None:
        try:
            self.outcome.set_result(perform(self.job, self._progress))
        except BaseException as error:
            self.outcome.set_exception(error)

    def _progress(self, mark: int) -> None:
        self.mark = mark


class _Board:
    """What ranks say beside their messages: where each of them is, and which failure was the first.

    It hangs in the store by which they have met, on a connection of its own: a store's connection
    is locked while somebody waits on it.
    """

    def __init__(self, rank: int, world: int) -> None:
        store: Any = dist.distributed_c10d._get_default_store()
        self._store = store.clone()
        run = self._store.add(f"pipelab/runs of rank {rank}", 1)  # all ranks make the same calls
        self._places = [f"pipelab/run {run}/rank {r}" for r in range(world)]
        self._mine, self._failure = self._places[rank], f"pipelab/run {run}/failure"
        for r, key in enumerate(self._places):  # where there is nothing yet
            self._store.compare_set(key, "", f"rank {r} (not in this run yet)")

    def places(self, mine: str) -> list[str]:
        """Say where this rank is; returns where all are."""
        with connected():
            self._store.set(self._mine, mine)
            return [text.decode() for text in self._store.multi_get(self._places)]

    def failure(self, mine: RunError | None = None) -> RunError | None:
        """The first failure of any rank: `mine`, if there was none."""
        text = "" if mine is None else pickle.dumps(mine).hex()
        with connected():
            first = self._store.compare_set(self._failure, "", text).decode()
        return mine if first == text else pickle.loads(bytes.fromhex(first))


@dataclass(frozen=True)
class Ranks(Launcher):
    """This process is one of those that torchrun, deepspeed or another has started.

    local  its number on its host
    """

    rank: int
    world: int
    local: int
    timeout: float

    @classmethod
    def here(cls, timeout: float) -> Ranks | None:
        """From the environment that launchers set; None if this process was started alone."""
        if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
            return None
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return cls(rank, world, int(os.environ.get("LOCAL_RANK", 0)), timeout)

    @property
    def first(self) -> bool:
        return self.rank == 0

    def ranks(self, count: int) -> Sequence[int]:
        if self.world != count:
            raise ValueError(
                f"the devices, times the replicas, need {count} ranks, and {self.world} were "
                f"started: start {count} (torchrun --nproc-per-node, --nnodes)"
            )
        return [self.rank]

    def run(self, jobs: Sequence[Job]) -> list[Outcome]:
        """Do this rank's job; the process group stays for the next call.

        All ranks raise the RunError of the first one that fails. When no action has ended anywhere
        for `timeout` seconds, they say where each of them is; so does the one that hangs.
        """
        (job,) = jobs
        if not dist.is_initialized():
            limit = timedelta(seconds=self.timeout)
            store, rank, world = next(dist.rendezvous("env://", timeout=limit))
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=FOREVER
            )
            atexit.register(dist.destroy_process_group)
        thread = _JobThread(job)
        thread.start()
        try:
            outcome = self._watch(thread)
        except BaseException as error:
            _end_waits()
            time.sleep(2 * LOOK)  # the store may end with this process: let others read it
            if isinstance(error, ConnectionError):  # it has ended with another
                raise run_error(job, job.row, error) from error
            raise
        if not self.first:
            dist.send_object_list([outcome], dst=0)
            everyone = share(None)
            everyone[self.rank] = outcome
            return everyone
        everyone = [outcome, *(_object_from(rank) for rank in range(1, self.world))]
        share([replace(o, steps={}, weights={}) for o in everyone])
        return everyone

    def from_first(self, make: Callable[[], Any]) -> Any:
        try:
            value = make() if self.first else None
        except BaseException as error:
            share(RunError(f"rank 0: {type(error).__name__}: {error}"))
            raise
        value = share(value)
        if isinstance(value, RunError):
            raise value
        return value

    def _watch(self, thread: _JobThread) -> Outcome:
        """Wait for the job's outcome; RunError when any of the ranks fails or hangs."""
        job, board = thread.job, _Board(self.rank, self.world)
        known: list[str] = []
        since = time.monotonic()
        while not wait([thread.outcome], LOOK).done:
            # [1] say how far this rank is, and see how far the others are
            places = board.places(f"{job.where} at {place(job, thread.mark)}")
            # [2] there has been no progress for too long, or another rank has failed
            mine = None
            if places != known:
                known, since = places, time.monotonic()
            elif time.monotonic() - since > self.timeout:
                mine = RunError(no_progress(places, self.timeout))
            if failure := board.failure(mine):
                raise failure
        # [3] this rank has failed
        if error := thread.outcome.exception():
            mine = run_error(job, job.row, error)
            raise board.failure(mine) or mine
        return thread.outcome.result()


def _end_waits() -> None:
    """End all waits of this process for others, whose failure another one has told.

    abort does it for NCCL, and nothing for gloo (torch 2.13). But when a receive runs out of time,
    gloo closes all connections of its group.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        group.abort()
        with suppress(RuntimeError, ValueError):
            work: Any = dist.irecv(torch.zeros(1), group=group, tag=UNSENT)
            work.wait(timedelta(milliseconds=1))


def share(value: Any) -> Any:
    """Rank 0's value, on every rank.

    No collective: gloo's threads may drop its tensors when Python has ended already.
    """
    if dist.get_rank():
        return _object_from(0)
    for rank in range(1, dist.get_world_size()):
        dist.send_object_list([value], dst=rank)
    return value


def _object_from(rank: int) -> Any:
    box = [None]
    dist.recv_object_list(box, src=rank)
    return box[0]
