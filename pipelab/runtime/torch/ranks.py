"""The ranks of torch.distributed: what one does, and those that torchrun or another has started."""

import atexit
import json
import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pipelab.runtime.cluster import Cluster
from pipelab.runtime.torch.wire import FOREVER, open_wire
from pipelab.runtime.transport import lost
from pipelab.runtime.wire import Wire
from pipelab.runtime.worker import Job


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
