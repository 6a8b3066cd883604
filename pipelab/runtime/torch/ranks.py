"""The ranks of torch.distributed, started by torchrun, deepspeed or another launcher."""

import atexit
import os
import pickle
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipelab.runtime.cluster import Cluster
from pipelab.runtime.torch.groups import FOREVER, GroupWire, backend
from pipelab.runtime.transport import lost
from pipelab.runtime.wire import Wire
from pipelab.runtime.worker import Job, RunError

# Of torchrun, Slurm's srun, Open MPI and MPICH.
LOCAL = "LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"
MOST = 2**22  # bytes of a value; the store takes twice as many


class Ranks(Cluster):
    """The ranks started by a launcher; this one is number `local` on its host, if it says so.

    They exchange values in the store where they met.
    """

    def __init__(self, timeout: float, call: str) -> None:
        """Read the launcher's environment."""
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        super().__init__(rank, world, timeout, call)
        self._long: set[str] = set()  # names of its values that came in several pieces
        known = (os.environ[name] for name in LOCAL if name in os.environ)
        self.local = next(map(int, known), None)

    def __enter__(self) -> "Ranks":
        if not dist.is_initialized():
            store, rank, world = self._meet()
            dist.init_process_group(
                backend(), store=store, rank=rank, world_size=world, timeout=FOREVER
            )
            atexit.register(dist.destroy_process_group)
        self.store: Any = dist.distributed_c10d._get_default_store()
        super().__enter__()
        return self

    def _meet(self) -> tuple[Any, int, int]:
        """The store, this rank, and the number of all."""
        limit = timedelta(seconds=self.timeout)
        # torchrun's own store is there from the beginning, and torch tries for up to three times as
        # long to find it: if torchrun has been killed, the ranks shall end in time.
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            limit /= 3
        try:
            return next(dist.rendezvous("env://", timeout=limit))
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            raise RunError(f"process {self.me} cannot find the others: {first}") from error

    def ranks(self, count: int) -> Sequence[int]:
        if self.count != count:
            raise ValueError(
                f"devices times replicas need {count} ranks, but {self.count} were started: start "
                f"{count} (torchrun --nproc-per-node, --nnodes)"
            )
        return [self.me]

    def make_wire(self, jobs: Sequence[Job]) -> Wire:
        device, gpu = torch.device(jobs[0].device), ""
        if device.type == "cuda":
            torch.cuda.set_device(device)
            # NCCL tells hosts apart by that variable, if there is one.
            gpu = os.environ.get("NCCL_HOSTID", "")
            gpu += str(torch.cuda.get_device_properties(device).uuid)
        return GroupWire(jobs[0], self.share(gpu))

    # ---- the store

    def give(self, name: str, value: Any) -> None:
        packed = pickle.dumps(value)
        with lost(RuntimeError):
            self._drop_rest(name)
            if len(packed) >= MOST:
                self._long.add(name)
            for i in range(MOST, len(packed) + 1, MOST):
                self.store.append(f"{name}/rest", packed[i : i + MOST])
            self.store.set(name, packed[:MOST])

    def give_first(self, name: str, value: Any) -> Any:
        with lost(RuntimeError):
            return pickle.loads(self.store.compare_set(name, b"", pickle.dumps(value)))

    def take(self, names: Sequence[str], seconds: float) -> list[Any]:
        pause, deadline, there = 1e-4, time.monotonic() + seconds, [*names]
        with lost(RuntimeError):
            # A wait of the store's own would write a warning whenever it ends without the values.
            while not self.store.check(there):
                if time.monotonic() > deadline:
                    there = [name for name in names if self.store.check([name])]
                    break
                time.sleep(pause)
                pause = min(2 * pause, 0.01)
            found = dict(zip(there, self._get(there), strict=True))
        return [found.get(name) for name in names]

    def look(self, names: Sequence[str], perhaps: str) -> list[Any]:
        with lost(RuntimeError):
            return self._get([*names, perhaps] if self.store.check([perhaps]) else names)

    def _get(self, names: Sequence[str]) -> list[Any]:
        """Values that are there."""
        packed = self.store.multi_get([*names]) if names else []
        for i, name in enumerate(names):
            if len(packed[i]) == MOST:
                packed[i] += self.store.get(f"{name}/rest")
        return [pickle.loads(value) for value in packed]

    def drop(self, name: str) -> None:
        with lost(RuntimeError):
            self.store.delete_key(name)
            self._drop_rest(name)

    def _drop_rest(self, name: str) -> None:
        if name in self._long:
            self._long.remove(name)
            self.store.delete_key(f"{name}/rest")
