"""How tensors travel between ranks: by torch.distributed, over gloo or, between GPUs, NCCL.

A rank that has slept finds its caches cold, and code then takes several times as long as in a loop:
so the code per message is short.
"""

import pickle
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from ctypes import c_char, memmove
from datetime import timedelta
from queue import SimpleQueue
from struct import Struct
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipelab.runtime.stage import Device
from pipelab.runtime.torch.packing import as_bytes, dense, empty, like, tensors_of
from pipelab.runtime.torch.streams import receiving_on
from pipelab.runtime.transport import Key, Lost, lost
from pipelab.runtime.wire import Ends, Link, Wire, apart, pairs_of_ranks, whole
from pipelab.runtime.worker import Job

FOREVER = timedelta(days=1)  # for torch, which counts a rank's wait for others who work as a hang
START = Struct("qq")  # of a message: bytes of its head, and of all that comes in one parcel
LEAST, MOST = 2**12, 2**22  # bytes asked for beforehand: beyond, to copy takes longer than to ask
AHEAD = 4  # parcels asked for beforehand
FIRST, MORE = 0, 1  # tags: of parcels that were asked for beforehand, and of all else
BUCKET = 2**25  # bytes of gradients that replicas add up in one call
WAITING = 2**20  # bytes that may wait until their thread looks whether they have left
OWN = 2**8  # bytes that a tensor takes beside its numbers, about
TORCH_FAILS = lost(RuntimeError)
TENSOR = ...  # in a form, for a tensor
PLAIN = {float, int, bool, str, type(None)}  # of what no part has to be put aside


def backend() -> str:
    """Of a process group whose tensors go by their device."""
    nccl = torch.cuda.is_available() and dist.is_nccl_available()
    return "cpu:gloo,cuda:nccl" if nccl else "gloo"


class GroupWire(Wire):
    """The wire of a rank; all ranks make theirs at the same time.

    device  where tensors leave and arrive: a rank's own GPU, if all have one
    """

    def __init__(self, job: Job, gpus: Sequence[str]) -> None:
        """`gpus` are those of all ranks, by unique names; empty for a CPU."""
        own_gpus = all(gpus) and len({*gpus}) == len(gpus)
        self.device = torch.device(job.device if own_gpus else "cpu")
        pairs = pairs_of_ranks(job)
        groups = groups_of(pairs, job.rank, self.device)
        # In one order in all ranks: NCCL may end a group only when both have come to it.
        mine = (group for ends, group in groups.items() if job.rank in ends)
        self._groups = [*dict.fromkeys(mine)]
        super().__init__(
            job,
            {
                (a, b): GroupLink(b, groups[a, b], groups[b, a], self.device)
                for a, b in groups
                if a == job.rank
            },
        )
        self._replicas = None
        if (count := job.replicas) > 1:
            firsts = range(0, count * job.schedule.devices, count)  # all ranks make all groups
            self._replicas = [new_group(range(a, a + count)) for a in firsts][job.row]
            # NCCL connects a group at its first call, for seconds: not in a measured update.
            dist.all_reduce(torch.zeros(1, device=self.device), group=self._replicas)

    def close(self) -> None:
        super().close()
        for group in self._groups:
            dist.destroy_process_group(group)
        if self._replicas:
            dist.destroy_process_group(self._replicas)

    def sum_over_replicas(
        self, key: Key, row: int, tensors: list[Any], device: Device
    ) -> list[Any]:
        sums: dict[int, Tensor] = {}
        for bucket in _buckets(tensors):
            total = torch.cat([tensors[i].reshape(-1) for i in bucket]).to(self.device)
            with TORCH_FAILS:
                dist.all_reduce(total, group=self._replicas)
            pieces = total.to(tensors[0].device).split([tensors[i].numel() for i in bucket])
            sums |= {i: t.view_as(tensors[i]) for i, t in zip(bucket, pieces, strict=True)}
        return [sums[i] for i in range(len(tensors))]

    def from_first_replica(self, key: Key, row: int, payload: Any, device: Device) -> Any:
        """As one parcel of bytes, with its length and that of its head before it."""
        tensors: list[Tensor] = []
        form = _form(payload, tensors)
        tensors = [dense(tensor.to(self.device)) for tensor in tensors]
        head = _parcel_of(pickle.dumps((form, [*map(like, tensors)]))).to(self.device)
        parcel = torch.cat([head, *(as_bytes(tensor) for tensor in tensors if tensor.nbytes)])
        sizes = torch.tensor([len(head), len(parcel)], device=self.device)
        first = self._job.replica == 0
        with TORCH_FAILS:
            dist.broadcast(sizes, group=self._replicas, group_src=0)
            size, total = sizes.tolist()
            parcel = parcel if first else parcel.new_empty(total)
            dist.broadcast(parcel, group=self._replicas, group_src=0)
        if first:
            return payload
        form, alike = pickle.loads(bytes(parcel[:size].tolist()))
        tensors = [empty(one, self.device) for one in alike]
        for tensor in filter(lambda t: t.nbytes, tensors):
            as_bytes(tensor).copy_(parcel[size : size + tensor.nbytes])
            size += tensor.nbytes
        return _filled(form, iter([tensor.to(device.device) for tensor in tensors]))


def _buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """The tensors' numbers, those of one type together, until they have about BUCKET bytes."""
    full: list[list[int]] = []
    filling: dict[torch.dtype, list[int]] = {}
    filled: Counter[torch.dtype] = Counter()
    for i, tensor in enumerate(tensors):
        filling.setdefault(tensor.dtype, []).append(i)
        filled[tensor.dtype] += tensor.nbytes
        if filled[tensor.dtype] >= BUCKET:
            full.append(filling.pop(tensor.dtype))
            del filled[tensor.dtype]
    return [*full, *filling.values()]


def new_group(ranks: Sequence[int]) -> Any:
    return dist.new_group(ranks, timeout=FOREVER, backend=backend())


def groups_of(pairs: Sequence[Ends], me: int, device: torch.device) -> dict[Ends, Any]:
    """Process groups by (from, to).

    On a CPU two for all: gloo has a thread and a connection for each, and what goes up shall not
    wait for what goes down. Between GPUs an early receive would block NCCL's sends in a common one.
    NCCL connects two ranks at their first message, which both must call: here, where all do the
    same. Later, a receiver calls it once it reads that a message was sent.
    """
    both_ways = [ends for pair in pairs for ends in (pair, pair[::-1])]
    if device.type == "cpu":
        ranks = sorted({rank for pair in pairs for rank in pair})
        up, down = (new_group(ranks) if ranks else None for _ in range(2))
        return {(a, b): up if a < b else down for a, b in both_ways}
    groups = {}
    byte = torch.zeros(1, dtype=torch.uint8, device=device)
    for a, b in both_ways:
        groups[a, b] = group = new_group([a, b])
        if me == a:
            dist.send(byte, b, group)
        elif me == b:
            dist.recv(byte, a, group)
    return groups


class GroupLink(Link):
    """A link to the rank `other`, by process groups to it and back.

    A message is

        | bytes of the head, and of all | head | tensor | tensor | ...

    and its head is key, time, the payload's form, and what its tensors are like.

    Gloo sends nothing before the receiver has asked for it, and each part wakes threads at both
    ends. So the receiver asks beforehand, for parcels as large as the largest message so far (MOST
    at most), and what fits comes in one parcel. What does not comes part by part behind the two
    numbers, and a GPU's tensors behind the head.
    """

    def __init__(self, other: int, to: Any, back: Any, device: torch.device) -> None:
        self.to, self.back, self.device = to, back, device
        self.on_cpu = device.type == "cpu"
        # NCCL receives behind what the current stream computes: of one of its own that is nothing.
        self.receiving = None if self.on_cpu else receiving_on(device, f"rank {other}")
        self.rank = dist.get_group_rank(to, other)  # of the other end, in both groups
        # A tensor has to be kept until it has left, which torch does only for NCCL's. To wake a
        # thread for every one would take longer than to send it.
        self._waiting: list[Any] = []
        self._bytes = 0
        self._leaving: SimpleQueue[Any] = SimpleQueue()
        self._thread = Thread(target=self._keep, name="pipelab sends", daemon=True)
        self._thread.start()
        self._there, self._here = _Rooms(), _Rooms()  # that the other end, and this one, asks for
        self._asked: deque[Any] = deque()  # parcels, and when they will be there
        for room in self._here.ahead:
            self._ask_for_parcel(_Parcel(room))

    def write(self, message: Any) -> None:
        key, payload, at = message
        tensors: list[Tensor] = []
        try:
            form = _form(payload, tensors)
        except NotImplementedError:
            form, tensors = apart(payload, tensors_of)
        tensors = [dense(tensor.to(self.device)) for tensor in tensors]
        head = pickle.dumps((key, at, form, [*map(like, tensors)]))
        chunks = [head, *map(_memory, tensors)] if self.on_cpu else [head]
        total = START.size + sum(map(len, chunks))
        start = START.pack(len(head), total)
        fits = self._there.take(total)
        if fits:
            self._send(_parcel_of(start, *chunks), FIRST)
        else:
            self._send(_parcel_of(start), FIRST)
            self._send(_parcel_of(head), MORE)
        if not (fits and self.on_cpu):
            for tensor in tensors:
                if tensor.nbytes:
                    # On a CPU a copy: it may be written again before the reader asks for it.
                    chunk = as_bytes(tensor)
                    self._send(chunk.clone() if self.on_cpu else chunk, MORE)

    def read(self) -> Any:
        parcel, work = self._asked.popleft()
        if isinstance(work, Lost):
            raise work
        _wait(work)
        size, total = START.unpack_from(parcel.memory)
        if not size:
            raise Lost("a message from another process was lost: the run has ended there")
        fits = self._here.take(total)
        head = parcel.memory[START.size :] if fits else self._receive(size)
        key, at, form, alike = pickle.loads(head)  # which says itself where it ends
        with torch.cuda.stream(self.receiving) if self.receiving else nullcontext():
            tensors = [empty(one, self.device) for one in alike]
            if fits and self.on_cpu:
                # Copies: a view would keep, and count as, the whole parcel.
                place = parcel.tensor.data_ptr() + START.size + size
                for tensor in tensors:
                    memmove(tensor.data_ptr(), place, tensor.nbytes)
                    place += tensor.nbytes
            else:
                chunks = [as_bytes(tensor) for tensor in tensors if tensor.nbytes]
                for work in [self._ask(chunk, MORE) for chunk in chunks]:
                    _wait(work)
        room = self._here.ahead[-1]
        self._ask_for_parcel(parcel if len(parcel.memory) == room else _Parcel(room))
        # Bytes are a skeleton: no plain payload has any.
        filled = whole(form, tensors) if type(form) is bytes else _filled(form, iter(tensors))
        if self.receiving:  # a GPU's payload and event: the sender's means nothing here
            filled = filled[0], self.receiving.record_event()
        return key, filled, at

    def end(self) -> None:
        # The other end may wait inside gloo, from where only a message brings it back: if it still
        # waited when its Python ends, the process would be aborted.
        with suppress(Lost):
            self._send(_parcel_of(START.pack(0, 0)), FIRST)

    def close(self) -> None:
        """Close once everything sent has been read."""
        self._leaving.put(self._waiting)
        self._leaving.put(None)
        self._thread.join()

    def _send(self, parcel: Tensor, tag: int) -> None:
        # The group's own call: torch's isend and irecv look up in which group a rank is which.
        with TORCH_FAILS:
            work = self.to.send([parcel], self.rank, tag)
        if not parcel.is_cuda:
            self._waiting.append((work, parcel))
            self._bytes += OWN + parcel.nbytes
            if self._bytes > WAITING:
                self._leaving.put(self._waiting)
                self._waiting, self._bytes = [], 0

    def _ask(self, parcel: Tensor, tag: int) -> Any:
        with TORCH_FAILS:
            return self.back.recv([parcel], self.rank, tag)

    def _ask_for_parcel(self, parcel: "_Parcel") -> None:
        try:
            work = self._ask(parcel.tensor, FIRST)
        except Lost as gone:  # the other end may be closed after its last message
            work = gone
        self._asked.append((parcel, work))

    def _receive(self, size: int) -> memoryview:
        parcel = _Parcel(size)
        _wait(self._ask(parcel.tensor, MORE))
        return parcel.memory

    def _keep(self) -> None:
        """Keep tensors until they have left."""
        while (leaving := self._leaving.get()) is not None:
            for work, _ in leaving:
                _wait(work)


class _Parcel:
    """Memory to receive in, for torch and for Python."""

    def __init__(self, size: int) -> None:
        self.tensor = torch.empty(size, dtype=torch.uint8, device="cpu")
        self.memory = self.tensor.numpy().data


class _Rooms:
    """Bytes of the parcels that a receiver has asked for; both ends count them alike."""

    def __init__(self) -> None:
        self.ahead = deque([LEAST] * AHEAD)

    def take(self, total: int) -> bool:
        """Use up the next parcel: whether so many bytes fit into it. One more is asked for."""
        fits = total <= self.ahead.popleft()
        self.ahead.append(max(self.ahead[-1], total if total <= MOST else 0))
        return fits


def _form(value: Any, tensors: list[Tensor]) -> Any:
    """A plain payload with TENSOR for its tensors, which are added to `tensors`.

    An event becomes None, as `tensors_of` has it. NotImplementedError where there is anything else:
    `apart` takes that, too, and several times as long.
    """
    kind = type(value)
    if kind is Tensor:
        tensors.append(value)
        return TENSOR
    if kind is tuple or kind is list:
        return kind([_form(part, tensors) for part in value])
    if kind in PLAIN:
        return value
    if isinstance(value, torch.cuda.Event):
        return None
    raise NotImplementedError


def _filled(form: Any, tensors: Iterator[Tensor]) -> Any:
    """A payload from its form."""
    kind = type(form)
    if kind is tuple or kind is list:
        return kind([_filled(part, tensors) for part in form])
    return next(tensors) if form is TENSOR else form


def _wait(work: Any) -> None:
    with TORCH_FAILS:
        work.wait()


def _memory(tensor: Tensor) -> Any:
    """The bytes of a dense tensor on the CPU, which the caller keeps: numpy takes longer."""
    return (c_char * tensor.nbytes).from_address(tensor.data_ptr())


def _parcel_of(*chunks: Any) -> Tensor:
    return torch.frombuffer(bytearray().join(chunks), dtype=torch.uint8)
