"""How tensors travel between ranks: by torch.distributed, over gloo or, between GPUs, NCCL."""

import pickle
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from io import BytesIO
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipelab.runtime.stage import Device
from pipelab.runtime.torch.pipes import as_bytes, like, tensors_of
from pipelab.runtime.transport import Key, lost
from pipelab.runtime.wire import Ends, Wire, apart, pairs_of_ranks, whole
from pipelab.runtime.worker import Job

FOREVER = timedelta(days=1)  # for torch, which counts a rank's wait for others who work as a hang
HEAD = 4096  # bytes of what comes before a message
BODY = HEAD - 256  # bytes of skeleton and tensors that travel in it
WAITING = 64  # tensors that may wait until their thread looks whether they have left
KNOWN = 1000  # skeletons that are kept: some have a norm or a count in them, which comes once


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

    A message is

        | key, time, number of its skeleton, size if that is new | skeleton | tensor | tensor | ...

    whose skeleton is a pickle of all but the numbers in its tensors. It travels once, if it is
    among the first KNOWN. What fits travels in the first part: each part wakes threads of gloo's
    at both ends.
    """

    def __init__(self, other: int, to: Any, back: Any, device: torch.device) -> None:
        self.other, self.to, self.back, self.device = other, to, back, device
        self._sent: dict[bytes, int] = {}
        self._known: list[Any] = []
        # A tensor has to be kept until it has left, which torch does only for NCCL's. To wake a
        # thread for every small one would take longer than to send it.
        self._waiting: list[Any] = []
        self._leaving: SimpleQueue[Any] = SimpleQueue()
        self._thread = Thread(target=self._keep, name="pipelab sends", daemon=True)
        self._thread.start()
        # Gloo sends nothing before the receiver has asked: it asks for the next message beforehand.
        self._head = torch.empty(HEAD, dtype=torch.uint8)
        self._coming = self._ask(self._head)

    def write(self, message: Any) -> None:
        """Send a message; does not wait for the reader. Lost if the other end is closed."""
        key, payload, at = message
        skeleton, tensors = apart(payload, tensors_of)
        skeleton = pickle.dumps((skeleton, [*map(like, tensors)]))
        new = skeleton not in self._sent
        number = self._sent.get(skeleton, len(self._sent))
        if number < KNOWN:
            self._sent[skeleton] = number
        rows = [_row_of(skeleton)] if new else []
        rows += [as_bytes(tensor.to(self.device)) for tensor in tensors]
        inside = None
        if self.device.type == "cpu" and sum(row.nbytes for row in rows) <= BODY:
            inside, rows = b"".join(row.numpy().data for row in rows), []
        head = pickle.dumps((key, at, number, len(skeleton) if new else 0, inside))
        for row in (_row_of(head.ljust(HEAD)), *rows):
            self._send(row)

    def read(self) -> Any:
        """The next message; waits for it. Lost if the other end is closed."""
        _wait(self._coming)
        key, at, number, size, inside = pickle.loads(self._head.numpy().data)
        fill = self._receive if inside is None else partial(_copy, BytesIO(inside))
        if size:
            row = torch.empty(size, dtype=torch.uint8)
            fill(row)
            skeleton, alike = pickle.loads(row.numpy().data)
            if number < KNOWN:
                self._known.append((skeleton, alike))
        else:
            skeleton, alike = self._known[number]
        tensors = [torch.empty(shape, dtype=dtype, device=self.device) for dtype, shape in alike]
        for tensor in tensors:
            fill(as_bytes(tensor))
        self._coming = self._ask(self._head)
        return key, whole(skeleton, tensors), at

    def end(self) -> None:
        """Nothing ends a wait of torch's, but its process."""

    def close(self) -> None:
        """When all that was sent has been read."""
        self._leaving.put(self._waiting)
        self._leaving.put(None)
        self._thread.join()
        for group in (self.to, self.back):
            dist.destroy_process_group(group)

    def _send(self, row: Tensor) -> None:
        with lost(RuntimeError):
            work = dist.isend(row, self.other, self.to)
        if not row.is_cuda:
            self._waiting.append((work, row))
            if row.nbytes > HEAD or len(self._waiting) > WAITING:
                self._leaving.put(self._waiting)
                self._waiting = []

    def _ask(self, row: Tensor) -> Any:
        with lost(RuntimeError):
            return dist.irecv(row, self.other, self.back)

    def _receive(self, row: Tensor) -> None:
        _wait(self._ask(row))

    def _keep(self) -> None:
        """Keep tensors until they have left."""
        while (leaving := self._leaving.get()) is not None:
            for work, _ in leaving:
                _wait(work)


def _wait(work: Any) -> None:
    with lost(RuntimeError):
        work.wait()


def _copy(source: BytesIO, row: Tensor) -> None:
    source.readinto(row.numpy().data)


def _row_of(memory: bytes) -> Tensor:
    return torch.frombuffer(bytearray(memory), dtype=torch.uint8)
