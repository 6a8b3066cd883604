"""The wire of torch ranks: tensors over sockets, or over NCCL where every rank has its own GPU."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipelab.executors.device import Device
from pipelab.executors.job import Job
from pipelab.executors.links import Arrays, Exchange, Fill
from pipelab.executors.transport import Key, Lost
from pipelab.executors.wire import Wire, open_links, pairs_of_rows

FOREVER = timedelta(days=1)  # for torch, which counts a rank's wait for others who work as a hang
UNSENT = 9  # tag of a message that nobody sends


class Tensors(Arrays):
    """Tensors by way of the CPU. Of an event nothing is sent: the copy has waited for it."""

    def describe(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.dtype, tuple(value.shape)
        return () if isinstance(value, torch.cuda.Event) else None

    def content(self, array: Any) -> memoryview:
        if not isinstance(array, Tensor):
            return memoryview(b"")
        return _bytes(_plain(array.cpu()))

    def build(self, described: Any, fill: Fill) -> Any:
        if not described:
            return None
        dtype, shape = described
        tensor = torch.empty(shape, dtype=dtype)
        fill(_bytes(tensor))
        return tensor


class GpuTensors(Tensors):
    """Those of a GPU over NCCL, from `device` and to it: only what they are goes by the socket.

    groups  the process groups to and from the other rank: one for each direction, since NCCL would
            let an early receive block what goes the other way
    """

    def __init__(self, device: torch.device, other: int, groups: tuple[Any, Any]) -> None:
        self.device, self.other, self.groups = device, other, groups
        self.leaving: list[tuple[Any, Tensor]] = []  # which must live until they have left

    def describe(self, value: Any) -> Any:
        described = super().describe(value)
        return ("cuda", *described) if described and value.is_cuda else described

    def content(self, array: Any) -> memoryview:
        if not isinstance(array, Tensor) or not array.is_cuda:
            return super().content(array)
        tensor = _flat(_plain(array))
        self.leaving = [(work, t) for work, t in self.leaving if not work.is_completed()]
        with connected():
            self.leaving.append((dist.isend(tensor, self.other, self.groups[0]), tensor))
        return memoryview(b"")

    def build(self, described: Any, fill: Fill) -> Any:
        if described[:1] != ("cuda",):
            return super().build(described, fill)
        _, dtype, shape = described
        tensor = torch.empty(shape, dtype=dtype, device=self.device)
        with connected():
            dist.recv(_flat(tensor), self.other, self.groups[1])
        return tensor

    def meet(self, speaks_first: bool) -> None:
        """Send a byte each way; the other rank does so at the same time.

        NCCL connects two ranks at their first message, and both have to call it for that. Later a
        receiver only does when it has read on the socket that a message has been sent.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        to, back = self.groups
        with connected():
            if speaks_first:
                dist.send(byte, self.other, to)
            dist.recv(byte, self.other, back)
            if not speaks_first:
                dist.send(byte, self.other, to)


def _plain(tensor: Tensor) -> Tensor:
    """Its numbers as they are, one after another."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _bytes(tensor: Tensor) -> memoryview:
    """Its memory."""
    return _flat(tensor).numpy().data


def _flat(tensor: Tensor) -> Tensor:
    """The same memory as bytes, which NCCL sends whatever they are."""
    return tensor.view(-1).view(torch.uint8)


class TorchWire(Wire):
    """The wire of a rank; all ranks make one."""

    def __init__(self, job: Job, device: torch.device, exchange: Exchange) -> None:
        me, world = dist.get_rank(), dist.get_world_size()
        places = exchange([device.type, str(device), os.uname().nodename])
        own = len({*map(tuple, places)}) == world
        self._groups: list[Any] = []
        self._nccl = own and all(kind == "cuda" for kind, *_ in places)
        over = self._over_nccl(job, device)
        links = open_links(job, me, range(world), exchange, lambda a, b: over.get(b, Tensors()))
        super().__init__(job.schedule, links)
        # The process group of this device in all replicas.
        self._peers: Any = None
        for row in range(job.schedule.devices if job.replicas > 1 else 0):
            made = self._group(job, [(row, replica) for replica in range(job.replicas)])
            self._peers = made if row == job.row else self._peers

    def _over_nccl(self, job: Job, device: torch.device) -> dict[int, Tensors]:
        """By row, how tensors travel to those with which this one has groups of NCCL."""
        found: dict[int, Tensors] = {}
        for replica in range(job.replicas if self._nccl else 0):
            for a, b in pairs_of_rows(job):
                groups = [self._group(job, [(a, replica), (b, replica)]) for _ in range(2)]
                if replica == job.replica and job.row in (a, b):
                    other = a + b - job.row
                    both = groups if job.row == a else groups[::-1]
                    link = GpuTensors(device, other * job.replicas + replica, (*both,))
                    link.meet(speaks_first=job.row == a)
                    found[other] = link
        return found

    def _group(self, job: Job, places: Sequence[tuple[int, int]]) -> Any:
        """A process group of ranks by row and replica; all ranks make all, in one order."""
        ranks = [row * job.replicas + replica for row, replica in places]
        backend = "nccl" if self._nccl else "gloo"
        self._groups.append(dist.new_group(ranks, timeout=FOREVER, backend=backend))
        return self._groups[-1]

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        for group in self._groups:
            if group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)

    def sum_over_replicas(self, key: Key, device: int, parts: list[Any], home: Device) -> list[Any]:
        sums = [part.contiguous() for part in parts]
        with connected():
            works = [dist.all_reduce(part, group=self._peers, async_op=True) for part in sums]
            for work in works:
                work.wait()
        return sums

    def abort(self) -> None:
        super().abort()
        if self._peers:
            # abort ends waits for NCCL, and nothing for gloo (torch 2.13). But when a receive runs
            # out of time, gloo closes all connections of its group.
            self._peers.abort()
            with suppress(RuntimeError, ValueError):
                work: Any = dist.irecv(torch.zeros(1), group=self._peers, tag=UNSENT)
                work.wait(timedelta(milliseconds=1))


@contextmanager
def connected() -> Iterator[None]:
    """Lost where torch.distributed fails: that is mostly another rank's fault."""
    try:
        yield
    except RuntimeError as error:
        raise Lost(f"a message to or from another rank was lost: {error}") from error
