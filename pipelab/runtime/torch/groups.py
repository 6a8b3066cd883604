"""How tensors travel between ranks: by torch.distributed, over gloo or, between GPUs, NCCL.

A rank that has slept finds its caches cold, and every line that a message runs then takes several
times as long as in a loop: what every message does is short, and done beforehand where it can be.
"""

import math
import pickle
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from ctypes import memmove, string_at
from datetime import timedelta
from itertools import accumulate
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipelab.runtime.stage import Device
from pipelab.runtime.torch.pipes import Like, as_bytes, dense, like, tensors_of
from pipelab.runtime.transport import Key, Lost, lost
from pipelab.runtime.wire import Ends, Link, Wire, apart, pairs_of_ranks, whole
from pipelab.runtime.worker import Job

FOREVER = timedelta(days=1)  # for torch, which counts a rank's wait for others who work as a hang
HEAD = 256  # bytes of what comes before a message
ALIGN = 64  # bytes, as torch aligns tensors: sums may depend on it
LEAST, MOST = 2**12, 2**22  # bytes asked for beforehand: beyond, to copy takes longer than to ask
AHEAD = 4  # rows asked for beforehand
HEADS, PARTS = 0, 1  # tags: of heads with what fits behind them, and of all else
WAITING = 2**20  # bytes that may wait until their thread looks whether they have left
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


class GroupLink(Link):
    """A link to the rank `other`, by process groups to it and back.

    A message is

        | key, time, number of its skeleton, size if that is new, total | skeleton | tensor | ...

    whose skeleton is all but the numbers in its tensors. It travels once, if it is among the first
    KNOWN. Gloo sends nothing before the receiver has asked for it, and each part wakes threads at
    both ends. So the receiver asks beforehand, for rows as large as the largest message so far
    (MOST at most), and what fits comes in one row: `total` bytes, each part at a multiple of ALIGN.
    What does not, such as a GPU's tensors, comes part by part behind the head.
    """

    def __init__(self, other: int, to: Any, back: Any, device: torch.device) -> None:
        self.to, self.back, self.device = to, back, device
        self.rank = dist.get_group_rank(to, other)  # of the other end, in both groups
        self._sent: dict[Hashable, int] = {}
        self._known: list[Any] = []
        # A tensor has to be kept until it has left, which torch does only for NCCL's. To wake a
        # thread for every one would take longer than to send it.
        self._waiting: list[Any] = []
        self._bytes = 0
        self._leaving: SimpleQueue[Any] = SimpleQueue()
        self._thread = Thread(target=self._keep, name="pipelab sends", daemon=True)
        self._thread.start()
        self._there, self._here = _Rooms(), _Rooms()  # that the other end, and this one, asks for
        self._asked = deque(self._ask_for_head(room) for room in self._here.ahead)

    def write(self, message: Any) -> None:
        key, payload, at = message
        # [1] its skeleton: known to the reader, or told
        tensors: list[Tensor] = []
        form = _form(payload, tensors)
        if form is None:
            form, tensors = apart(payload, tensors_of)
        tensors = [dense(tensor.to(self.device)) for tensor in tensors]
        skeleton = form, *map(like, tensors)
        number, packed = self._sent.get(skeleton), b""
        if number is None:
            number, packed = len(self._sent), pickle.dumps(skeleton)
            if number < KNOWN:
                self._sent[skeleton] = number
        # [2] a row with all that fits, if the reader has asked for one so large
        near = [] if self.device.type == "cuda" else tensors
        places = _places([len(packed), *(tensor.nbytes for tensor in near)])
        total = places[-1]
        head = pickle.dumps((key, at, number, len(packed), total))
        assert len(head) <= HEAD
        if self._there.take(total):
            row = torch.empty(total, dtype=torch.uint8)
            start = row.data_ptr()
            memmove(start, head, len(head))
            memmove(start + HEAD, packed, len(packed))
            for place, tensor in zip(places[1:], near, strict=False):
                memmove(start + place, tensor.data_ptr(), tensor.nbytes)
            self._send(row, HEADS)
            tensors = tensors[len(near) :]
        else:
            self._send(_row_of(head), HEADS)
            if packed:
                self._send(_row_of(packed), PARTS)
        # [3] what does not
        for tensor in tensors:
            if tensor.nbytes:
                self._send(as_bytes(tensor), PARTS)

    def read(self) -> Any:
        row, work = self._asked.popleft()
        if isinstance(work, Lost):
            raise work
        _wait(work)
        start = row.data_ptr()
        key, at, number, size, total = pickle.loads(string_at(start, HEAD))
        fits = self._here.take(total)
        self._asked.append(self._ask_for_head(self._here.ahead[-1]))
        if size:
            packed = string_at(start + HEAD, size) if fits else self._receive_bytes(size)
            form, *alike = pickle.loads(packed)
            sizes = [dtype.itemsize * math.prod(shape) for dtype, shape, _ in alike]
            places = _places(sizes, 0)
            if number < KNOWN:
                self._known.append((form, alike, places))
        else:
            form, alike, places = self._known[number]
        if fits and self.device.type == "cpu":
            # Copies: a view would keep, and count as, the whole row.
            tensors, start = self._empty(alike), start + HEAD + _room(size)
            for tensor, place in zip(tensors, places, strict=False):
                memmove(tensor.data_ptr(), start + place, tensor.nbytes)
        else:
            tensors = self._receive(alike)
        pickled = isinstance(form, bytes)
        return key, whole(form, tensors) if pickled else _filled(form, iter(tensors)), at

    def close(self) -> None:
        """When all that was sent has been read."""
        self._leaving.put(self._waiting)
        self._leaving.put(None)
        self._thread.join()
        for group in (self.to, self.back):
            dist.destroy_process_group(group)

    def _send(self, row: Tensor, tag: int) -> None:
        # The group's own call: torch's isend and irecv look up in which group a rank is which.
        with lost(RuntimeError):
            work = self.to.send([row], self.rank, tag)
        if not row.is_cuda:
            self._waiting.append((work, row))
            self._bytes += HEAD + row.nbytes
            if self._bytes > WAITING:
                self._leaving.put(self._waiting)
                self._waiting, self._bytes = [], 0

    def _ask(self, row: Tensor, tag: int) -> Any:
        with lost(RuntimeError):
            return self.back.recv([row], self.rank, tag)

    def _ask_for_head(self, room: int) -> tuple[Tensor, Any]:
        row = torch.empty(room, dtype=torch.uint8)
        try:
            return row, self._ask(row, HEADS)
        except Lost as gone:  # the other end may be closed after its last message
            return row, gone

    def _receive(self, alike: Sequence[Any]) -> list[Tensor]:
        """Tensors that come part by part."""
        tensors = self._empty(alike)
        for work in [self._ask(as_bytes(tensor), PARTS) for tensor in tensors if tensor.nbytes]:
            _wait(work)
        return tensors

    def _empty(self, alike: Sequence[Like]) -> list[Tensor]:
        return [
            torch.empty_strided(*layout, dtype=dtype, device=self.device)
            for dtype, *layout in alike
        ]

    def _receive_bytes(self, size: int) -> bytes:
        row = torch.empty(size, dtype=torch.uint8)
        _wait(self._ask(row, PARTS))
        return string_at(row.data_ptr(), size)

    def _keep(self) -> None:
        """Keep tensors until they have left."""
        while (leaving := self._leaving.get()) is not None:
            for work, _ in leaving:
                _wait(work)


class _Rooms:
    """Bytes of the rows that a receiver has asked for; both ends count them alike."""

    def __init__(self) -> None:
        self.ahead = deque([LEAST] * AHEAD)

    def take(self, total: int) -> bool:
        """Use up the next row: whether so many bytes fit into it. One more is asked for."""
        fits = total <= self.ahead.popleft()
        self.ahead.append(max(self.ahead[-1], total if total <= MOST else 0))
        return fits


def _form(value: Any, tensors: list[Tensor]) -> Any:
    """A plain payload's form as nested tuples, and its tensors added to `tensors`.

    (tuple, form, ...), (list, form, ...), (float, hexadecimal), (Tensor,), or (NoneType,), also of
    an event, as `tensors_of` has it. None where there is anything else, which is pickled then: that
    takes several times as long.
    """
    kind = type(value)
    if kind is Tensor:
        tensors.append(value)
        return (kind,)
    if kind is float:
        return kind, value.hex()  # -0.0 is not 0.0
    if value is None or isinstance(value, torch.cuda.Event):
        return (type(None),)
    forms = [_form(part, tensors) for part in value] if kind in (tuple, list) else [None]
    return None if None in forms else (kind, *forms)


def _filled(form: Any, tensors: Iterator[Tensor]) -> Any:
    """A payload from its form."""
    kind, *parts = form
    if kind in (tuple, list):
        return kind(_filled(part, tensors) for part in parts)
    if kind is float:
        return float.fromhex(*parts)
    return next(tensors) if kind is Tensor else None


def _places(sizes: Iterable[int], begin: int = HEAD) -> list[int]:
    """Offsets of parts from `begin` on, and of their end."""
    return [*accumulate(map(_room, sizes), initial=begin)]


def _room(size: int) -> int:
    """What a part of so many bytes takes of a row."""
    return -(-size // ALIGN) * ALIGN


def _wait(work: Any) -> None:
    with lost(RuntimeError):
        work.wait()


def _row_of(memory: bytes) -> Tensor:
    return torch.frombuffer(bytearray(memory), dtype=torch.uint8)
