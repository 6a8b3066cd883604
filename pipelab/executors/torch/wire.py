"""How tensors travel between ranks: by sockets, or by NCCL where every rank has its own GPU."""

from dataclasses import dataclass
from datetime import timedelta
from pickle import PickleBuffer
from socket import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from pipelab.executors.job import Job
from pipelab.executors.transport import lost
from pipelab.executors.wire import Exchange, Link, Wire, connect, pairs_of_ranks

FOREVER = timedelta(days=1)  # for torch, which counts a rank's wait for others who work as a hang


def open_wire(job: Job, device: torch.device, exchange: Exchange) -> Wire:
    """The wire of a rank; all ranks call this."""
    cuda = device.type == "cuda"
    gpus = exchange(str(torch.cuda.get_device_properties(device).uuid) if cuda else "")
    pairs, groups = pairs_of_ranks(job), {}
    if all(gpus) and len({*gpus}) == len(gpus):
        # In one group for both directions an early receive would block what goes the other way.
        for a, b in pairs:
            for ends in ((a, b), (b, a)):
                groups[ends] = dist.new_group(list(ends), timeout=FOREVER, backend="nccl")
    links: dict[tuple[int, int], Link] = {}
    for (me, other), connection in connect(job.rank, pairs, range(len(gpus)), exchange).items():
        if groups:
            to, back = groups[me, other], groups[other, me]
            links[me, other] = GpuLink(connection, device, other, to, back)
        else:
            links[me, other] = Link(connection, reduced)
    for (me, other), link in sorted(links.items()):
        if isinstance(link, GpuLink):
            link.meet(speaks_first=me < other)
    return Wire(job, links)


def reduced(value: Any) -> Any:
    """How a message is pickled: tensors by way of the CPU, and no events.

    The copy to the CPU has waited for them.
    """
    if isinstance(value, torch.cuda.Event):
        return type(None), ()
    if not isinstance(value, Tensor):
        return NotImplemented
    return _restored, (PickleBuffer(_bytes(value.cpu()).numpy()), value.dtype, tuple(value.shape))


def _restored(memory: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    storage = torch.from_numpy(memory).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape)


def _bytes(tensor: Tensor) -> Tensor:
    """Its numbers one after another: the same memory, if they are so already."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.view(-1).view(torch.uint8)


@dataclass(frozen=True)
class Coming:
    """Stands in a message for a tensor that comes by NCCL."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class GpuLink(Link):
    """A link whose tensors go by NCCL, from `device` and to it.

    to, back  the process groups to the other rank and from it
    """

    def __init__(
        self, connection: socket, device: torch.device, other: int, to: Any, back: Any
    ) -> None:
        super().__init__(connection, reduced)
        self.device, self.other, self.to, self.back = device, other, to, back
        self._leaving: list[tuple[Any, Tensor]] = []  # which must live until they have left

    def meet(self, speaks_first: bool) -> None:
        """Send a byte each way; the other rank does so at the same time.

        NCCL connects two ranks at their first message, and both have to call it for that. Later a
        receiver only does when it has read on the socket that a message has been sent.
        """
        byte = torch.zeros(1, dtype=torch.uint8, device=self.device)
        calls = [(dist.send, self.to), (dist.recv, self.back)]
        for call, group in calls if speaks_first else reversed(calls):
            call(byte, self.other, group)

    def write(self, message: Any) -> None:
        super().write(pytree.tree_map_only(Tensor, self._send_tensor, message))

    def read(self) -> Any:
        return pytree.tree_map_only(Coming, self._receive_tensor, super().read())

    def close(self) -> None:
        super().close()
        for group in (self.to, self.back):
            dist.destroy_process_group(group)

    def _send_tensor(self, tensor: Tensor) -> Any:
        if tensor.device.type != self.device.type:
            return tensor
        memory = _bytes(tensor)
        self._leaving = [(work, m) for work, m in self._leaving if not work.is_completed()]
        with lost(RuntimeError):
            self._leaving.append((dist.isend(memory, self.other, self.to), memory))
        return Coming(tensor.dtype, tuple(tensor.shape))

    def _receive_tensor(self, sent: Coming) -> Tensor:
        tensor = torch.empty(sent.shape, dtype=sent.dtype, device=self.device)
        with lost(RuntimeError):
            dist.recv(_bytes(tensor), self.other, self.back)
        return tensor
