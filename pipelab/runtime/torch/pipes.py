"""How tensors travel between processes of one parent: by pipes, which it has made before them."""

import io
import pickle
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from pickle import PickleBuffer
from select import PIPE_BUF, select
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from pipelab.runtime.transport import lost

HEADER = 4  # bytes that a connection puts before a message


class Pipe:
    """A pipe to another rank, and one from it.

    A write does not wait for the reader: what a pipe may not have room for is left to a thread, or
    two ranks that send each other more than that would wait for ever.
    """

    def __init__(self, reader: Connection, writer: Connection) -> None:
        self._reader, self._writer = reader, writer
        self._thread = ThreadPoolExecutor(1, "pipelab sends")
        self._sending: Future[Any] = self._thread.submit(bool)

    def write(self, message: Any) -> None:
        """Send a message. Lost if the other end is closed."""
        packed = dumps(message)
        # What is ready has room for so many bytes.
        small = len(packed) <= PIPE_BUF - HEADER
        if small and self._sending.done() and select([], [self._writer], [], 0)[1]:
            with lost(OSError):
                self._writer.send_bytes(packed)
        else:
            self._sending = self._thread.submit(self._writer.send_bytes, packed)

    def read(self) -> Any:
        """The next message; waits for it. Lost if the other end is closed."""
        with lost(OSError, EOFError, pickle.UnpicklingError):
            return pickle.loads(self._reader.recv_bytes())

    def end(self) -> None:
        """Nobody else in this process waits on it."""

    def close(self) -> None:
        """When the pipe has all that was sent; then the other end can still read it."""
        self._thread.shutdown()
        self._reader.close()
        self._writer.close()


class _Pickler(cloudpickle.Pickler):
    """Pickles tensors by their memory, and by way of the CPU.

    by_value  whether types of a notebook, which the receiver cannot import, are pickled as a whole.
              By reference it is the receiver's own type, which `isinstance` knows, and quicker
    """

    def __init__(self, file: io.BytesIO, by_value: bool) -> None:
        super().__init__(file)
        self.by_value = by_value

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, torch.cuda.Event):  # the copy to the CPU has waited for it
            return type(None), ()
        if isinstance(value, Tensor):
            memory = PickleBuffer(as_bytes(value.cpu()).numpy().data)
            return _restored, (memory, value.dtype, tuple(value.shape))
        return super().reducer_override(value) if self.by_value else NotImplemented


def dumps(message: Any) -> memoryview:
    """A message as bytes; `pickle.loads` reads them."""
    file = io.BytesIO()
    try:
        _Pickler(file, by_value=False).dump(message)
    except (pickle.PicklingError, AttributeError):
        file = io.BytesIO()
        _Pickler(file, by_value=True).dump(message)
    return file.getbuffer()


def _restored(memory: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not memory:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def as_bytes(tensor: Tensor) -> Tensor:
    """Its numbers one after another: the same memory, if they are so already."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # One number may be contiguous with any stride, with which it would be no row of bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
