"""The ranks of torch.distributed: what one does, and those that torchrun or another has started."""

import atexit
import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipelab.runtime.cluster import Cluster
from pipelab.runtime.threads import run_threads
from pipelab.runtime.torch.wire import FOREVER, open_wire
from pipelab.runtime.transport import lost
from pipelab.runtime.wire import Wire
from pipelab.runtime.worker import Job, Outcome


def perform(job: Job, progress: Callable[[int], None]) -> Outcome:
    """Do the job of this rank of the default process group, at the same time as the others.

    All are on this host, so that they have one clock.
    """
    with open_wire(job, exchange) as wire:

        def start() -> float:
            began = torch.tensor([time.perf_counter() + 0.01], dtype=torch.float64)
            with lost(RuntimeError):
                dist.all_reduce(began, dist.ReduceOp.MAX)
            wire.began = None if job.pace else float(began)
            time.sleep(max(0.0, float(began) - time.perf_counter()))
            return float(began)

        (outcome,) = run_threads([job], [wire] * job.replicas, start, progress=lambda _: progress)
        with lost(RuntimeError):
            dist.barrier()  # nobody closes the wire while others read
    return outcome


def exchange(value: Any) -> list[Any]:
    """The values of all ranks, by the store in which they have met.

    Lost if one has not given its own within the store's timeout.
    """
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    with lost(RuntimeError):
        number = store.add(f"pipelab/{rank}", 1)  # all ranks make the same calls
        store.set(f"pipelab/{number}/{rank}", json.dumps(value))
        names = [f"pipelab/{number}/{r}" for r in range(dist.get_world_size())]
        return [json.loads(store.get(name)) for name in names]


class Ranks(Cluster):
    """The ranks that torchrun, deepspeed or another has started, this one number `local` on its
    host."""

    def __init__(self, timeout: float, call: str) -> None:
        """From the environment that the launcher has set."""
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        super().__init__(rank, world, timeout, call)
        self.local = int(os.environ.get("LOCAL_RANK", 0))

    def __enter__(self) -> "Ranks":
        if not dist.is_initialized():
            limit = timedelta(seconds=self.timeout)
            store, rank, world = next(dist.rendezvous("env://", timeout=limit))
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=world, timeout=FOREVER
            )
            atexit.register(dist.destroy_process_group)
        super().__enter__()
        return self

    exchange = staticmethod(exchange)

    def ranks(self, count: int) -> Sequence[int]:
        if self.count != count:
            raise ValueError(
                f"the devices, times the replicas, need {count} ranks, and {self.count} were "
                f"started: start {count} (torchrun --nproc-per-node, --nnodes)"
            )
        return [self.me]

    def make_wire(self, jobs: Sequence[Job]) -> Wire:
        return open_wire(jobs[0], self.share)
