"""What a rank does: connect to the others, start with them, do its job.

Also the launcher of ranks that torchrun or another program has started.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipelab.executors import clock
from pipelab.executors.job import Job
from pipelab.executors.result import Outcome
from pipelab.executors.torch.wire import Wire
from pipelab.executors.worker import RunError


def perform(job: Job, progress: Callable[[int], None] | None = None) -> Outcome:
    """Do the job of this rank of the default process group, starting at the same moment as the others."""
    home = job.home()
    if home.device.type == "cuda":
        torch.cuda.set_device(home.device)
    stages = job.stages(home)
    ahead = offset()  # before the wire listens to the same ranks
    wire = _wire(job, home.device)
    wire.greet()
    began = torch.tensor([time.perf_counter() + ahead + 0.01], dtype=torch.float64)
    dist.all_reduce(began, dist.ReduceOp.MAX)
    mine = float(began) - ahead
    wire.began = None if job.pace else mine  # a paced message says itself when it is there
    home.begin(mine)
    time.sleep(max(0.0, mine - time.perf_counter()))
    with home.active():
        outcome = job.work(stages, home, wire, mine, progress)
        wire.finish()
    dist.barrier()  # nobody leaves while its messages are on their way
    return outcome


def offset(now: Callable[[], float] = time.perf_counter, host: str | None = None) -> float:
    """Seconds to add to this rank's clock `now` to read rank 0's: exactly 0 on its host. Every rank has to call it."""
    hosts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(hosts, host or clock.host())
    mine, message = dist.get_rank(), torch.zeros(1, dtype=torch.float64)

    def ask() -> float:
        dist.send(message, 0)
        dist.recv(message, 0)
        return float(message)

    found = 0.0
    for rank, other in enumerate(hosts):
        if other == hosts[0] or mine not in (0, rank):
            continue
        if mine:
            found = clock.behind(ask, now)
        for _ in range(0 if mine else clock.ROUNDS):
            dist.recv(message, rank)
            message[0] = now()
            dist.send(message, rank)
    return found


def _wire(job: Job, device: torch.device) -> Wire:
    """Process groups are made by all ranks in one order: one per direction and replica, since NCCL would let an early receive
    block what goes the other way, and one for the replicas of each device."""
    s = job.schedule
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (str(device), os.uname().nodename))
    nccl = (
        device.type == "cuda"
        and all(name.startswith("cuda") for name, _ in every)
        and len(set(every)) == len(every)
    )
    backend, channels, peers = "nccl" if nccl else "gloo", {}, None
    if nccl:
        edges = sorted(
            {(int(s.columns.device[s.inputs[i]]), int(s.columns.device[i])) for i in s.crossing}
        )
        for replica in range(job.replicas):
            for a, b in edges:
                group = dist.new_group(
                    [a * job.replicas + replica, b * job.replicas + replica], backend=backend
                )
                if replica == job.replica:
                    channels[a, b] = group
    for row in range(s.devices if job.replicas > 1 else 0):
        group = dist.new_group(
            [row * job.replicas + r for r in range(job.replicas)], backend=backend
        )
        peers = group if row == job.row else peers
    return Wire(
        s,
        job.row,
        job.partners,
        replica=job.replica,
        replicas=job.replicas,
        device=device,
        channels=channels,
        peers=peers,
    )


@dataclass(frozen=True)
class Ranks:
    """A `Launcher`: this process is one of those that torchrun, deepspeed or another has started.

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

        The first rank that fails says so to the others, and all raise its RunError. A rank that
        hangs is given up by the others after `timeout` seconds.
        """
        (job,) = jobs
        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(seconds=self.timeout))
            atexit.register(dist.destroy_process_group)
        try:
            outcome = perform(job)
        except Exception as error:
            if isinstance(error, RunError):
                known, cause = error, error.__cause__
            else:
                known = RunError(f"{job.where}: {type(error).__name__}: {error}", job.row)
                cause = error
            failure = _first_failure(known, cause)
            raise failure from cause if failure is known else None
        if self.rank:
            dist.send_object_list([outcome], dst=0)
            everyone = share(None)
            everyone[self.rank] = outcome
            return everyone
        everyone = [outcome]
        for rank in range(1, self.world):
            dist.recv_object_list(box := [None], src=rank)
            everyone.append(box[0])
        share([replace(o, steps={}, weights={}) for o in everyone])
        return everyone

    def from_first(self, make: Callable[[], Any]) -> Any:
        return share(make() if self.first else None)


def _first_failure(error: RunError, cause: BaseException | None) -> RunError:
    """The error that began it: this one, or if a connection broke, what the rank behind it said."""
    store = dist.distributed_c10d._get_default_store()
    if not isinstance(cause, ConnectionError):
        store.set("pipelab/failure", f"{error.device}\n{error}")
        return error
    try:
        store.wait(["pipelab/failure"], timedelta(seconds=2))
        device, _, text = store.get("pipelab/failure").decode().partition("\n")
    except (RuntimeError, ValueError):  # no rank said anything, or rank 0, with the store, is lost
        return error
    return RunError(text, int(device), error.action)


def share(value: Any) -> Any:
    """Rank 0's value, on every rank.

    No collective: gloo's threads may drop its tensors when Python has ended already.
    """
    if dist.get_rank():
        dist.recv_object_list(box := [None], src=0)
        return box[0]
    for rank in range(1, dist.get_world_size()):
        dist.send_object_list([value], dst=rank)
    return value
