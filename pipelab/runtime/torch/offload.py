"""Activations offloaded to the host's memory between a forward and its backward."""

from collections.abc import Iterable

import torch
from torch import Tensor

from pipelab.runtime.torch.device import CpuDevice
from pipelab.runtime.torch.ledger import Saved


class Offloaded:
    """Tensors on the host: those that autograd saved, and leaves of the input.

    left  those that stay on the device: weights, and all but plain dense tensors

    Whole blocks of memory move, so views stay views. If another stage still holds one, it stays
    alive there; here only the copy counts.
    """

    def __init__(self, saved: Iterable[Saved], inputs: Iterable[Tensor], device: CpuDevice) -> None:
        self.left: list[Tensor] = []
        self._blocks: dict[int, Tensor] = {}  # by the address that it had
        self._moved: list[tuple[Saved | Tensor, int, Tensor]] = []  # the last: a view on the host
        held: list[tuple[Saved | Tensor, Tensor]] = [(x, x.detach()) for x in inputs]
        held += [(one, one.unpack()) for one in saved if one.tensor is not None]
        for owner, tensor in held:
            if not _plain(tensor) or device.ledger.ignores(tensor):
                self.left.append(tensor)
                continue
            storage = tensor.untyped_storage()
            address = storage.data_ptr()
            if address not in self._blocks:
                whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
                self._blocks[address] = device.to_host(whole)
            self._moved.append((owner, address, _view(tensor, self._blocks[address])))
        for owner, _, on_host in self._moved:
            _give(owner, on_host if isinstance(owner, Saved) else owner.new_empty(0))

    def reload(self, device: CpuDevice) -> list[Tensor]:
        """Move them back; returns their memory."""
        blocks = {address: device.from_host(block) for address, block in self._blocks.items()}
        for owner, address, on_host in self._moved:
            _give(owner, _view(on_host, blocks[address]))
        return [*blocks.values()]


def _plain(tensor: Tensor) -> bool:
    odd = tensor.is_conj() or tensor.is_neg() or tensor.is_quantized
    return type(tensor) is Tensor and tensor.layout is torch.strided and not odd


def _view(like: Tensor, memory: Tensor) -> Tensor:
    """The same view of other memory, given as its bytes."""
    empty = torch.empty(0, dtype=like.dtype, device=memory.device)
    return empty.set_(memory.untyped_storage(), like.storage_offset(), like.size(), like.stride())


def _give(owner: Saved | Tensor, tensor: Tensor) -> None:
    # As data: its version goes on to tell of changes by a stage that was given it.
    place = owner.tensor if isinstance(owner, Saved) else owner
    assert place is not None, "given back before its last use"
    place.data = tensor
