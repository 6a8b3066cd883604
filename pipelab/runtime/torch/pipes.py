"""How tensors travel between processes of one parent: by pipes, which it has made before them."""

import pickle
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pickle import PickleBuffer
from select import select
from typing import Any

import torch
from torch import Tensor

from pipelab.runtime.transport import lost
from pipelab.runtime.wire import Link, apart, whole

# Bytes for which a connection that select calls ready has room: Linux calls it so when three
# quarters of its 208 KiB are free, others when a few kilobytes are.
ROOM = 2**15 if sys.platform == "linux" else 2**9


class Pipe(Link):
    """A pipe between this rank and another, both ways.

    A write does not wait for the reader: what the pipe may not have room for is left to a thread,
    or two ranks that send each other more than that would wait for ever.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._thread = ThreadPoolExecutor(1, "pipelab sends")
        self._sending: Future[Any] = self._thread.submit(bool)

    def write(self, message: Any) -> None:
        skeleton, tensors = apart(message, tensors_of)
        tensors = [dense(tensor.cpu()) for tensor in tensors]
        memory = [PickleBuffer(as_bytes(tensor).numpy().data) for tensor in tensors]
        packed = pickle.dumps((skeleton, [*map(like, tensors)], memory), pickle.HIGHEST_PROTOCOL)
        small = len(packed) < ROOM
        if small and self._sending.done() and select([], [self._connection], [], 0)[1]:
            with lost(OSError):
                self._connection.send_bytes(packed)
        else:
            self._sending = self._thread.submit(self._connection.send_bytes, packed)

    def read(self) -> Any:
        with lost(OSError, EOFError, pickle.UnpicklingError):
            skeleton, alike, memory = pickle.loads(self._connection.recv_bytes())
            return whole(skeleton, [*map(restored, memory, alike)])

    def close(self) -> None:
        """When the pipe has all that was sent; then the other end can still read it."""
        self._thread.shutdown()
        self._connection.close()


def tensors_of(value: Any) -> Any:
    """What of a message is put aside: tensors. Events stay: the copy to the CPU has waited."""
    if isinstance(value, torch.cuda.Event):
        return None
    return value if isinstance(value, Tensor) else NotImplemented


Like = tuple[torch.dtype, tuple[int, ...], tuple[int, ...]]  # a tensor's type, shape and strides


def like(tensor: Tensor) -> Like:
    """What has to be known of a dense tensor to receive it."""
    return tensor.dtype, tuple(tensor.shape), tensor.stride()


def restored(memory: Any, alike: Like) -> Tensor:
    """A tensor of these bytes."""
    dtype, shape, stride = alike
    if not memory:
        return torch.empty_strided(shape, stride, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, stride)


def dense(tensor: Tensor) -> Tensor:
    """The same numbers without gaps, in their order in memory, such as channels last.

    ValueError for what is no plain tensor.
    """
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        kind = (
            "nested" if tensor.is_nested else tensor.dtype if tensor.is_quantized else tensor.layout
        )
        raise ValueError(
            f"a {kind} tensor is sent to no other process: let the stage output a plain one "
            "(to_dense, dequantize, to_padded_tensor)"
        )
    plain = tensor.detach().resolve_conj().resolve_neg()
    # torch has tensors of zeros without memory, such as tangents of what does not depend on x.
    plain = plain if plain.is_contiguous() and not plain._is_zerotensor() else plain.clone()
    if plain.untyped_storage().device.type == "meta":  # also of a FakeTensor
        raise ValueError(f"a {type(tensor).__name__} has no numbers that could be sent")
    return plain


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
