"""How tensors travel between ranks: by sockets, or by NCCL where every rank has its own GPU."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pickle import PickleBuffer
from socket import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from pipelab.runtime.transport import lost
from pipelab.runtime.wire import Ends, Exchange, Link, Wire, connect, pairs_of_ranks
from pipelab.runtime.worker import Job

FOREVER = timedelta(days=1)  # for torch, which counts a rank's wait for others who work as a hang


def open_wire(job: Job, exchange: Exchange) -> Wire:
    """The wire of a rank, on the device of its job; all ranks call this."""
    device, gpu = torch.device(job.device), ""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    gpus = exchange(gpu)
    own_gpus = all(gpus) and len({*gpus}) == len(gpus)
    pairs = pairs_of_ranks(job)
    groups = _groups(pairs, job.rank, device) if own_gpus else {}
    links: dict[Ends, Link] = {}
    for ends, connection in connect(job.rank, pairs, range(len(gpus)), exchange).items():
        if own_gpus:
            me, other = ends
            links[ends] = GpuLink(connection, device, other, groups[ends], groups[other, me])
        else:
            links[ends] = Link(connection, reduced)
    return Wire(job, links)


def _groups(pairs: Sequence[Ends], me: int, device: torch.device) -> dict[Ends, Any]:
    """NCCL's process groups by (from, to): in one for both, an early receive would block sends.

    NCCL connects two ranks at their first message, and both have to call it for that: here, where
    all do the same. Later a receiver calls it when it has read that a message has been sent.
    """
    groups = {}
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    for a, b in [ends for pair in pairs for ends in (pair, pair[::-1])]:
        groups[a, b] = group = dist.new_group([a, b], timeout=FOREVER, backend="nccl")
        if me == a:
            dist.send(byte, b, group)
        elif me == b:
            dist.recv(byte, a, group)
    return groups


def reduced(value: Any) -> Any:
    """How a message is pickled: tensors by way of the CPU, and no events.

    The copy to the CPU has waited for them.
    """
    if isinstance(value, torch.cuda.Event):
        return type(None), ()
    if not isinstance(value, Tensor):
        return NotImplemented
    memory = PickleBuffer(_bytes(value.cpu()).numpy().data)
    return _restored, (memory, value.dtype, tuple(value.shape))


def _restored(memory: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    storage = torch.from_numpy(memory).untyped_storage()
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape)  # type: ignore[call-overload]


def _bytes(tensor: Tensor) -> Tensor:
    """Its numbers one after another: the same memory, if they are so already."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # One number may be contiguous with any stride, with which it would be no row of bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


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
        with lost(RuntimeError):
            dist.isend(_bytes(tensor), self.other, self.to)  # torch keeps it until it has left
        return Coming(tensor.dtype, tuple(tensor.shape))

    def _receive_tensor(self, sent: Coming) -> Tensor:
        tensor = torch.empty(sent.shape, dtype=sent.dtype, device=self.device)
        with lost(RuntimeError):
            dist.recv(_bytes(tensor), self.other, self.back)
        return tensor
