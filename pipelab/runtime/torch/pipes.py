"""How tensors travel between processes of one parent: by pipes, which it has made before them."""

import fcntl
import os
import pickle
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from io import BufferedReader, FileIO
from itertools import islice
from multiprocessing.connection import Connection
from select import select
from typing import Any

import torch
from torch import Tensor

from pipelab.runtime.transport import lost
from pipelab.runtime.wire import Link, apart, whole

ROOM = 2**20  # bytes of a pipe, as many as Linux gives whoever asks: by itself it has 2**16
AT_ONCE = 1000  # parts, of the 1024 that writev takes


class Pipe(Link):
    """A pipe from another rank, and one to it.

    A write does not wait for the reader: what the pipe has no room for is left to a thread, or two
    ranks that send each other more than that would wait for ever. The thread is not woken for the
    rest: it and this one would take the interpreter, and a core, from each other.
    """

    def __init__(self, reader: Connection, writer: Connection) -> None:
        self._reader, self._writer = reader, writer
        self._file = BufferedReader(FileIO(reader.fileno(), closefd=False))
        os.set_blocking(writer.fileno(), False)
        with suppress(AttributeError, OSError):  # another system than Linux; a user with too many
            fcntl.fcntl(writer.fileno(), fcntl.F_SETPIPE_SZ, ROOM)
        self._thread = ThreadPoolExecutor(1, "pipelab sends")
        self._sending: Future[Any] = self._thread.submit(bool)

    def write(self, message: Any) -> None:
        skeleton, tensors = apart(message, tensors_of)
        tensors = [dense(tensor.cpu()) for tensor in tensors]
        head = pickle.dumps((skeleton, [*map(like, tensors)]))
        parts = deque([memoryview(head), *filter(len, map(memory_of, tensors))])
        if self._sending.done():
            with lost(OSError):
                self._write(parts)
        if parts:
            # A copy: what was sent may be written again before the reader takes it.
            rest = deque([memoryview(b"".join(parts))])
            self._sending = self._thread.submit(self._write_all, rest)

    def read(self) -> Any:
        with lost(OSError, EOFError, pickle.UnpicklingError):
            skeleton, alike = pickle.load(self._file)
            tensors = [empty(one) for one in alike]
            for memory in filter(len, map(memory_of, tensors)):
                if self._file.readinto(memory) < len(memory):
                    raise EOFError
            return whole(skeleton, tensors)

    def close(self) -> None:
        """When the pipe has all that was sent; then the other end can still read it."""
        self._thread.shutdown()
        self._file.close()
        self._reader.close()
        self._writer.close()

    def _write(self, parts: deque[memoryview]) -> None:
        """Write as much as there is room for; what is left stays in `parts`."""
        while parts:
            try:
                written = os.writev(self._writer.fileno(), [*islice(parts, AT_ONCE)])
            except BlockingIOError:
                return
            while parts and written >= len(parts[0]):
                written -= len(parts.popleft())
            if written:
                parts[0] = parts[0][written:]

    def _write_all(self, parts: deque[memoryview]) -> None:
        while parts:
            select([], [self._writer], [])
            self._write(parts)


def tensors_of(value: Any) -> Any:
    """What of a message is put aside: tensors. Events stay: the copy to the CPU has waited."""
    if isinstance(value, torch.cuda.Event):
        return None
    return value if isinstance(value, Tensor) else NotImplemented


Like = tuple[str, tuple[int, ...], tuple[int, ...]]  # a tensor's type, shape and strides
NAMES = {value: name for name, value in vars(torch).items() if isinstance(value, torch.dtype)}


def like(tensor: Tensor) -> Like:
    """What has to be known of a dense tensor to receive it."""
    return NAMES[tensor.dtype], tuple(tensor.shape), tensor.stride()


def empty(like: Like, device: torch.device | str = "cpu") -> Tensor:
    """A tensor like that, to receive it in."""
    dtype, shape, strides = like
    return torch.empty_strided(shape, strides, dtype=getattr(torch, dtype), device=device)


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
    plain = tensor.detach() if tensor.requires_grad else tensor
    # torch has tensors of zeros without memory, such as tangents of what does not depend on x.
    if not plain.is_contiguous() or plain.is_conj() or plain.is_neg() or plain._is_zerotensor():
        plain = plain.resolve_conj().resolve_neg().clone()
    if type(plain) is not Tensor and plain.untyped_storage().device.type == "meta":
        raise ValueError(f"a {type(tensor).__name__} has no numbers that could be sent")
    return plain


def memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a dense tensor on the CPU, which it keeps."""
    return as_bytes(tensor).numpy().data


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
