"""How tensors travel between processes.

Pipes connect those of one parent, which has made them before; process groups of torch.distributed
ranks, over gloo or, between GPUs, NCCL.
"""

import io
import pickle
import sys
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from multiprocessing.connection import Connection
from queue import SimpleQueue
from select import select
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipelab.runtime.stage import Device
from pipelab.runtime.transport import Key, Lost, lost
from pipelab.runtime.wire import Ends, Wire, apart, pairs_of_ranks, whole
from pipelab.runtime.worker import Job

# Bytes for which a connection that select calls ready has room: Linux calls it so when three
# quarters of its 208 KiB are free, others when a few kilobytes are.
ROOM = 2**15 if sys.platform == "linux" else 2**9
FOREVER = timedelta(days=1)  # for torch, which counts a rank's wait for others who work as a hang
ROW = 2**18  # bytes of a row that is asked for beforehand
SIZE = 8  # of them say how long the message is
AHEAD = 4  # rows asked for beforehand
HEADS, PARTS = 0, 1  # tags: of rows asked for beforehand, and of all else
WAITING = 2**20  # bytes that may wait until their thread looks whether they have left


# ---- pipes


class Pipe:
    """A pipe between this rank and another, both ways.

    A write does not wait for the reader: what the pipe may not have room for is left to a thread,
    or two ranks that send each other more than that would wait for ever.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._thread = ThreadPoolExecutor(1, "pipelab sends")
        self._sending: Future[Any] = self._thread.submit(bool)

    def write(self, message: Any) -> None:
        """Send a message. Lost if the other end is closed."""
        packed, _ = pack(message)
        small = len(packed) < ROOM
        if small and self._sending.done() and select([], [self._connection], [], 0)[1]:
            with lost(OSError):
                self._connection.send_bytes(packed)
        else:
            self._sending = self._thread.submit(self._connection.send_bytes, packed)

    def read(self) -> Any:
        """The next message; waits for it. Lost if the other end is closed."""
        with lost(OSError, EOFError, pickle.UnpicklingError):
            skeleton, tensors, _ = unpack(self._connection.recv_bytes())
        return whole(skeleton, tensors)

    def end(self) -> None:
        """Nobody else in this process waits on it."""

    def close(self) -> None:
        """When the pipe has all that was sent; then the other end can still read it."""
        self._thread.shutdown()
        self._connection.close()


# ---- process groups


def backend() -> str:
    """Of a process group whose tensors go by their device."""
    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if nccl else "gloo"


class GroupWire(Wire):
    """The wire of a rank; all ranks make theirs at the same time.

    device  from which tensors leave, and at which they arrive: a rank's own GPU, if all have one
    """

    def __init__(self, job: Job, gpus: Sequence[str]) -> None:
        """`gpus` are those of all ranks, by names that no two share; empty for a CPU."""
        own_gpus = all(gpus) and len({*gpus}) == len(gpus)
        self.device = torch.device(job.device if own_gpus else "cpu")
        pairs = pairs_of_ranks(job)
        groups = groups_of(pairs, job.rank, self.device)
        super().__init__(
            job,
            {
                (a, b): GroupLink(b, groups[a, b], groups[b, a], self.device)
                for a, b in groups
                if a == job.rank
            },
        )
        count = job.replicas
        rows = [[row * count + r for r in range(count)] for row in range(job.schedule.devices)]
        self._replicas = [new_group(row) for row in rows][job.row] if count > 1 else None

    def close(self) -> None:
        super().close()
        if self._replicas:
            dist.destroy_process_group(self._replicas)

    def sum_over_replicas(self, key: Key, device: int, parts: list[Any], home: Device) -> list[Any]:
        found = []
        for part in parts:
            total = part.to(self.device, copy=True).contiguous()
            with lost(RuntimeError):
                dist.all_reduce(total, group=self._replicas)
            found.append(total.to(part.device))
        return found


def new_group(ranks: Sequence[int]) -> Any:
    return dist.new_group(ranks, timeout=FOREVER, backend=backend())


def groups_of(pairs: Sequence[Ends], me: int, device: torch.device) -> dict[Ends, Any]:
    """Process groups by (from, to): in one for both, an early receive would block NCCL's sends.

    NCCL connects two ranks at their first message, and both have to call it for that: here, where
    all do the same. Later a receiver calls it when it has read that a message has been sent.
    """
    groups = {}
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    for a, b in [ends for pair in pairs for ends in (pair, pair[::-1])]:
        groups[a, b] = group = new_group([a, b])
        if me == a:
            dist.send(byte, b, group)
        elif me == b:
            dist.recv(byte, a, group)
    return groups


class GroupLink:
    """A link to the rank `other`, by process groups to it and back.

    A message is a row of bytes: its size, then itself. Gloo sends nothing before the receiver has
    asked for it, and each part wakes threads at both ends: so the receiver asks beforehand for rows
    of ROW bytes. A longer message comes behind a row with its size alone, and so do the tensors of
    a GPU, one by one.
    """

    def __init__(self, other: int, to: Any, back: Any, device: torch.device) -> None:
        self.other, self.to, self.back, self.device = other, to, back, device
        self.beside = device.type != "cpu"  # whether tensors travel one by one
        # A tensor has to be kept until it has left, which torch does only for NCCL's. To wake a
        # thread for every one would take longer than to send it.
        self._waiting: list[Any] = []
        self._bytes = 0
        self._leaving: SimpleQueue[Any] = SimpleQueue()
        self._thread = Thread(target=self._keep, name="pipelab sends", daemon=True)
        self._thread.start()
        rows = [torch.empty(ROW, dtype=torch.uint8) for _ in range(AHEAD)]
        self._asked = deque(map(self._ask_for_row, rows))

    def write(self, message: Any) -> None:
        """Send a message; does not wait for the reader. Lost if the other end is closed."""
        packed, tensors = pack(message, self.beside)
        head = len(packed).to_bytes(SIZE, "little")
        short = SIZE + len(packed) <= ROW
        self._send(_row_of(head + packed if short else head), HEADS)
        parts = [as_bytes(tensor.to(self.device)) for tensor in tensors if self.beside]
        for part in [*([] if short else [torch.frombuffer(packed, dtype=torch.uint8)]), *parts]:
            if part.nbytes:
                self._send(part, PARTS)

    def read(self) -> Any:
        """The next message; waits for it. Lost if the other end is closed."""
        row, work = self._asked.popleft()
        if isinstance(work, Lost):
            raise work
        _wait(work)
        packed = row.numpy().data
        size = int.from_bytes(packed[:SIZE], "little")
        packed = packed[SIZE : SIZE + size]
        if len(packed) < size:
            long = torch.empty(size, dtype=torch.uint8)
            self._receive([long])
            packed = long.numpy().data
        skeleton, tensors, alike = unpack(packed)
        self._asked.append(self._ask_for_row(row))  # what was in it has been copied
        if self.beside:
            tensors = [torch.empty(of, dtype=dtype, device=self.device) for dtype, of in alike]
            self._receive([as_bytes(tensor) for tensor in tensors if tensor.nbytes])
        return whole(skeleton, tensors)

    def end(self) -> None:
        """Nothing ends a wait of torch's, but its process."""

    def close(self) -> None:
        """When all that was sent has been read."""
        self._leaving.put(self._waiting)
        self._leaving.put(None)
        self._thread.join()
        for group in (self.to, self.back):
            dist.destroy_process_group(group)

    def _send(self, row: Tensor, tag: int) -> None:
        with lost(RuntimeError):
            work = dist.isend(row, self.other, self.to, tag=tag)
        if not row.is_cuda:
            self._waiting.append((work, row))
            self._bytes += row.nbytes
            if self._bytes > WAITING:
                self._leaving.put(self._waiting)
                self._waiting, self._bytes = [], 0

    def _ask(self, row: Tensor, tag: int) -> Any:
        with lost(RuntimeError):
            return dist.irecv(row, self.other, self.back, tag=tag)

    def _ask_for_row(self, row: Tensor) -> tuple[Tensor, Any]:
        try:
            return row, self._ask(row, HEADS)
        except Lost as gone:  # the other end may be closed after its last message
            return row, gone

    def _receive(self, parts: Sequence[Tensor]) -> None:
        for work in [self._ask(part, PARTS) for part in parts]:
            _wait(work)

    def _keep(self) -> None:
        """Keep tensors until they have left."""
        while (leaving := self._leaving.get()) is not None:
            for work, _ in leaving:
                _wait(work)


def _wait(work: Any) -> None:
    with lost(RuntimeError):
        work.wait()


def _row_of(memory: Any) -> Tensor:
    return torch.frombuffer(bytearray(memory), dtype=torch.uint8)


# ---- messages as bytes


def pack(message: Any, beside: bool = False) -> tuple[memoryview, list[Tensor]]:
    """A message as bytes; its tensors are among them, or travel `beside` it."""
    skeleton, tensors = apart(message, tensors_of)
    alike = [(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    memory = [pickle.PickleBuffer(as_bytes(t.cpu()).numpy().data) for t in tensors if not beside]
    file = io.BytesIO()
    pickle.dump((skeleton, alike, memory), file, pickle.HIGHEST_PROTOCOL)
    return file.getbuffer(), tensors


def unpack(packed: Any) -> tuple[bytes, list[Tensor], list[Any]]:
    """A message's skeleton, the tensors that came with it, and types and shapes of all."""
    skeleton, alike, memory = pickle.loads(packed)
    return skeleton, [*map(_restored, memory, alike)], alike


def tensors_of(value: Any) -> Any:
    """What of a message is put aside: tensors. Events stay: the copy to the CPU has waited."""
    if isinstance(value, torch.cuda.Event):
        return None
    return value if isinstance(value, Tensor) else NotImplemented


def _restored(memory: Any, alike: tuple[torch.dtype, tuple[int, ...]]) -> Tensor:
    """A tensor of these bytes."""
    dtype, shape = alike
    if not memory:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def as_bytes(tensor: Tensor) -> Tensor:
    """Its numbers one after another: the same memory, if they are so already."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # One number may be contiguous with any stride, with which it would be no row of bytes.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)
