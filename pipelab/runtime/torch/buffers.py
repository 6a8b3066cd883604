"""Buffers, which forwards may change: in place, or by putting another tensor there.

A forward that runs again before its backward has to find them as they were before it ran first, and
must not change them a second time. Whether a forward changes a buffer shows only afterwards, and a
change through `.data` shows in no version counter: so they are copied before, and compared by value
with the copies before them. Micro-batches that see the same values share a copy.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pipelab.runtime.batches import kind_of
from pipelab.runtime.torch.ledger import components_of

Buffers = dict[tuple[nn.Module, str], Tensor | None]  # by their places


def buffers_of(parts: Iterable[nn.Module]) -> Buffers:
    """The buffers of these modules now, without those of modules inside them."""
    return {(part, name): buffer for part in parts for name, buffer in part._buffers.items()}


def copies_of_buffers(buffers: Buffers, known: Buffers) -> Buffers:
    """Copies; if equal to the known copies, these. What is one stays one."""
    copies: dict[int, Tensor | None] = {}
    for place, buffer in buffers.items():
        # By identity, as one buffer may stand in several places.
        if buffer is not None and id(buffer) not in copies:
            old = known.get(place)
            copies[id(buffer)] = buffer.detach().clone() if differ(old, buffer) else old
    return {place: copies.get(id(buffer)) for place, buffer in buffers.items()}


@contextmanager
def as_they_were(before: Buffers) -> Iterator[None]:
    """Let the code inside see these values, and restore the buffers afterwards."""
    now = buffers_of({part: None for part, _ in before})
    _put(copies_of_buffers(before, {}))
    try:
        yield
    finally:
        _put(now)


def load_buffers(module: nn.Module, values: Mapping[str, Tensor], device: torch.device) -> None:
    """Put copies of these there, by name, of any shape: forwards may have made them.

    A buffer in several places stays shared.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for part in module.modules():
        for attribute, buffer in part._buffers.items():
            if buffer is not None:
                places.setdefault(id(buffer), []).append((part, attribute))
    for name, value in values.items():
        owner, _, attribute = name.rpartition(".")
        place = module.get_submodule(owner)
        buffer = place._buffers.get(attribute)
        if buffer is not None and kind_of(buffer) == kind_of(value) and _is_plain(buffer):
            buffer.data.copy_(value)  # in place: other attributes may be views of it
            continue
        loaded = value.to(device, copy=True)
        for part, other in (*places.get(id(buffer), ()), (place, attribute)):
            part._buffers[other] = loaded


def _is_plain(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_contiguous()


def _put(buffers: Buffers) -> None:
    for (part, name), buffer in buffers.items():
        part._buffers[name] = buffer


def differ(a: Tensor | None, b: Tensor) -> bool:
    """Whether they have other values, on whatever device, or other types."""
    if a is None or (a.dtype, a.layout, a.shape) != (b.dtype, b.layout, b.shape):
        return True
    return not all(map(torch.equal, components_of(a.to(b.device)), components_of(b)))
