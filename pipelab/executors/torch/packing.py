"""A message as bytes, in one tensor:

| end of the pickle, size of all | pickle of everything but tensors | tensor | tensor | ...
"""

import io
import math
import pickle
import struct
from typing import Any

import cloudpickle
import torch
from torch import Tensor

HEAD = struct.Struct("=qq")  # the two numbers
ALIGNED = 64  # bytes: tensors begin there, and a pickle may vary a little without another size


class _Pickler(cloudpickle.Pickler):
    """In the place of a tensor, pickles its dtype, shape and first byte among the tensors.

    by_value  whether types of a notebook, which the receiver cannot import, are pickled as a whole.
              By reference it is the receiver's own type, which `isinstance` knows, and quicker
    """

    def __init__(self, by_value: bool) -> None:
        self.file = io.BytesIO()
        self.file.write(bytes(HEAD.size))  # its place, filled in by `pack`
        super().__init__(self.file)
        self.by_value = by_value
        self.tensors: list[tuple[int, Tensor]] = []
        self.size = 0  # bytes of the tensors

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        first = self.size
        self.tensors.append((first, value.detach()))
        self.size = _aligned(first + value.nbytes)
        return value.dtype, tuple(value.shape), first

    def reducer_override(self, value: Any) -> Any:
        return super().reducer_override(value) if self.by_value else NotImplemented


class _Unpickler(pickle.Unpickler):
    """Makes the tensors views of `content`."""

    def __init__(self, pickled: bytes, content: Tensor) -> None:
        super().__init__(io.BytesIO(pickled))
        self.content = content

    def persistent_load(self, place: Any) -> Tensor:
        dtype, shape, first = place
        end = first + dtype.itemsize * math.prod(shape)
        # .data has a version counter of its own: a stage that changes one tensor in place must not
        # seem to change the others.
        return self.content[first:end].view(dtype).view(shape).data


def pack(message: Any, room: int, device: torch.device) -> tuple[Tensor, int]:
    """A message as bytes, at least `room` of them, and how many it needs."""
    # [1] the pickle, and how large all will be
    pickler = _Pickler(by_value=False)
    try:
        pickler.dump(message)
    except (pickle.PicklingError, AttributeError):
        pickler = _Pickler(by_value=True)
        pickler.dump(message)
    pickled = pickler.file.getbuffer()
    begin = _aligned(len(pickled))
    size = begin + pickler.size
    HEAD.pack_into(pickled, 0, len(pickled), size)
    # [2] everything at its place
    body = torch.empty(max(size, room), dtype=torch.uint8, device=device)
    body[: len(pickled)] = torch.frombuffer(pickled, dtype=torch.uint8)
    for first, tensor in pickler.tensors:
        place = body[begin + first :][: tensor.nbytes]
        place.view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return body, size


def read_head(body: Tensor) -> tuple[int, int]:
    """Where the pickle ends, and the size of all."""
    end, size = HEAD.unpack(body[: HEAD.size].cpu().numpy().tobytes())
    return end, size


def unpack(body: Tensor) -> Any:
    """The message; its tensors share the memory of `body`."""
    end, size = read_head(body)
    pickled = body[HEAD.size : end].cpu().numpy().tobytes()
    return _Unpickler(pickled, body[_aligned(end) : size]).load()


def _aligned(size: int) -> int:
    return math.ceil(size / ALIGNED) * ALIGNED
