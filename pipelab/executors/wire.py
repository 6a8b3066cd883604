"""Messages between processes over torch.distributed: a `Transport` for one rank."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from pipelab.action import Kind
from pipelab.executors.transport import Aborted, Key, Mailboxes, Message
from pipelab.schedule import Schedule

ALIGNED = 16  # bytes: any dtype may begin there


@dataclass(frozen=True)
class Leaf:
    """A leaf of a payload's tree: (dtype, shape) of a tensor, `float` for a number, else [the value itself]."""

    kind: Any


class Layout(NamedTuple):
    """Where a message's parts lie in its bytes: a header of floats, then the tensors one after another.

    spec     how the leaves make a tree
    leaves   `Leaf.kind` of each; numbers go into the header
    """

    spec: Any
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, payload: Any) -> tuple[Layout, list[Tensor], list[float]]:
        """The layout of a payload, and what goes into the message."""
        leaves, spec = pytree.tree_flatten(payload)
        tensors: list[Tensor] = []
        numbers: list[float] = []
        kinds: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                tensors.append(leaf)
                kinds.append((leaf.dtype, tuple(leaf.shape)))
            elif type(leaf) is float:
                numbers.append(leaf)
                kinds.append(float)
            else:
                kinds.append([leaf])
        return cls(spec, tuple(kinds)), tensors, numbers

    def announcement(self) -> Tensor:
        """As bytes: a tree of `Leaf`, since the tree's own type of specification is not made to travel."""
        tree = pytree.tree_unflatten([Leaf(kind) for kind in self.leaves], self.spec)
        return torch.frombuffer(bytearray(pickle.dumps(tree)), dtype=torch.uint8)

    @classmethod
    def announced(cls, content: Tensor) -> Layout:
        leaves, spec = pytree.tree_flatten(pickle.loads(content.numpy().tobytes()), is_leaf=lambda x: isinstance(x, Leaf))
        return cls(spec, tuple(leaf.kind for leaf in leaves))

    def places(self) -> tuple[list[tuple[torch.dtype, tuple[int, ...], int]], int]:
        """Type, shape and first byte of every tensor, and the size of the whole."""
        at, found = _aligned(8 * self.header), []
        for kind in self.leaves:
            if isinstance(kind, tuple):
                found.append((*kind, at))
                at = _aligned(at + kind[0].itemsize * torch.Size(kind[1]).numel())
        return found, at

    @property
    def header(self) -> int:
        """Numbers in the header: when it was sent, whether another layout follows, and the payload's own."""
        return 2 + sum(kind is float for kind in self.leaves)

    def pack(self, tensors: list[Tensor], numbers: list[float], device: torch.device) -> Tensor:
        places, size = self.places()
        body = torch.empty(size, dtype=torch.uint8, device=device)
        body[: 8 * self.header].view(torch.float64).copy_(torch.tensor(numbers, dtype=torch.float64))
        for tensor, place in zip(tensors, places, strict=True):
            _view(body, *place).copy_(tensor.detach())
        return body

    def unpack(self, body: Tensor, numbers: list[float]) -> Any:
        tensors, floats = iter(self.places()[0]), iter(numbers)
        leaves = [
            next(floats) if kind is float else kind[0] if isinstance(kind, list) else _view(body, *next(tensors)).data
            for kind in self.leaves
        ]  # fmt: skip
        return pytree.tree_unflatten(leaves, self.spec)


class Wire(Mailboxes):
    """The transport of one rank among as many processes as the schedule has devices, times the replicas.

    What a rank sends, and in which order, is written in the table, so every receiver posts its receives in the sender's
    order: one thread per sender puts what comes into the rank's own mailbox. No transfer waits for a compute. A message is
    one transfer of bytes in a layout that both sides know from the message before; only a new layout is announced.

    partners  per stage, the stages whose news its updates wait for
    channels  (sender, receiver) -> process group, where payloads go from GPU to GPU; else they go through the CPU
    peers     the process group of this device's replicas, if there are any
    """

    def __init__(
        self, schedule: Schedule, rank: int, partners: Sequence[Sequence[int]], *, replica: int = 0, replicas: int = 1,
        device: torch.device | None = None, channels: dict[tuple[int, int], Any] | None = None, peers: Any = None,
    ) -> None:  # fmt: skip
        super().__init__(schedule.devices)
        self.rank, self._replica, self._count, self._peers = rank, replica, replicas, peers
        self._channels, self._device = channels or {}, device or torch.device("cpu")
        self._stage, self._kind = schedule.columns.stage.tolist(), schedule.columns.kind.tolist()
        self._known: dict[Any, Layout] = {}  # the layout of the last message of each stream that this rank sends
        self._sent: list[tuple[Any, Tensor]] = []  # works in flight, and what they send
        self._failed: BaseException | None = None
        self.began: float | None = None  # the run's time zero on time.perf_counter, from when on arrivals are timed
        self._targets = {target for _, target in outgoing(schedule, rank, partners)}
        self._sources = []
        for source in range(schedule.devices):
            keys = [key for key, target in outgoing(schedule, source, partners) if target == rank and source != rank]
            if keys:
                self._sources.append(source)
                Thread(target=self._listen, args=(source, keys), daemon=True, name=f"pipelab from {source}").start()

    def greet(self) -> None:
        """Open the connections, so that no measured message pays for it; waits for those who will send here."""
        for target in self._targets:
            for group, device in {self._channel(self.rank, target), (None, torch.device("cpu"))}:
                self._post(torch.zeros(1, dtype=torch.uint8, device=device), target, group)
        for source in self._sources:
            self.receive(("hello", source), self.rank)

    def send(self, key: Key, device: int, message: Message) -> None:
        if device == self.rank:
            return super().send(key, device, message)
        payload = message.payload[0] if isinstance(key, int) else message.payload  # a parcel of the device's `give`
        layout, tensors, numbers = Layout.of(payload)
        stream, channel = (device, *self._stream(key)), self._channel(self.rank, device)
        known = self._known.get(stream)
        if not _same(known, layout):
            if known:  # the receiver waits for as many bytes as before: they say that another layout follows
                filler = torch.zeros(known.places()[1], dtype=torch.uint8, device=channel[1])
                filler[8:16].view(torch.float64).fill_(1)
                self._post(filler, device, channel[0])
            announcement = layout.announcement()
            self._post(torch.tensor([len(announcement)]), device)
            self._post(announcement, device)
            self._known[stream] = layout
        self._post(layout.pack(tensors, [message.at, 0.0, *numbers], channel[1]), device, channel[0])

    def receive(self, key: Key, device: int) -> Message:
        with self._blaming():
            return super().receive(key, device)

    def sum_over_replicas(self, key: Key, device: int, parts: list[Any]) -> list[Any]:
        for dtype in {part.dtype for part in parts}:
            same = [i for i, part in enumerate(parts) if part.dtype == dtype]
            flat = torch.cat([parts[i].reshape(-1) for i in same])
            if self._peers is None or dist.get_backend(self._peers) == "gloo":
                flat = flat.cpu()
            dist.all_reduce(flat, group=self._peers)
            for i, total in zip(same, flat.split([parts[i].numel() for i in same]), strict=True):
                parts[i] = total.to(parts[i].device).view_as(parts[i])
        return parts

    def sleep(self, seconds: float) -> None:
        with self._blaming():
            super().sleep(seconds)

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """Say what broke the connection instead of that the run has ended."""
        try:
            yield
        except Aborted:
            raise ConnectionError(f"a message from another rank did not come: {self._failed}") from self._failed

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    def _channel(self, source: int, target: int) -> tuple[Any, torch.device]:
        group = self._channels.get((source, target))
        return group, self._device if group is not None else torch.device("cpu")

    def _global(self, device: int) -> int:
        """The rank of a device in this replica: replicas of a device are neighbours, as in DeepSpeed's topology."""
        return device * self._count + self._replica

    def _stream(self, key: Any) -> tuple:
        """Messages of one stream mostly have one layout: outputs of a stage, its gradients, its news."""
        return (self._stage[key], self._kind[key]) if isinstance(key, int) else key[:2]

    def _post(self, tensor: Tensor, device: int, group: Any = None) -> None:
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        self._sent.append((dist.isend(tensor, self._global(device), group=group), tensor))

    def _listen(self, source: int, keys: list[Key]) -> None:
        known: dict[Any, Layout] = {}
        try:
            if self._device.type == "cuda":
                torch.cuda.set_stream(torch.cuda.Stream(self._device))
            for group, device in {self._channel(source, self.rank), (None, torch.device("cpu"))}:
                self._fill(torch.zeros(1, dtype=torch.uint8, device=device), source, group)
            super().send(("hello", source), self.rank, Message(None, 0.0))
            for key in keys:
                stream = self._stream(key)
                if stream in known:
                    body, (at, changed, *numbers) = self._take(source, known[stream])
                if stream not in known or changed:
                    size = self._fill(torch.zeros(1, dtype=torch.int64), source)
                    pickled = self._fill(torch.empty(int(size), dtype=torch.uint8), source)
                    known[stream] = Layout.announced(pickled)
                    body, (at, changed, *numbers) = self._take(source, known[stream])
                payload = known[stream].unpack(body, numbers)
                at = at if self.began is None else time.perf_counter() - self.began
                super().send(key, self.rank, Message((payload, None) if isinstance(key, int) else payload, at))
        except BaseException as error:  # the worker is told when it next receives
            self._failed = error
            self.abort()

    def _take(self, source: int, layout: Layout) -> tuple[Tensor, list[float]]:
        group, device = self._channel(source, self.rank)
        body = self._fill(torch.empty(layout.places()[1], dtype=torch.uint8, device=device), source, group)
        return body, body[: 8 * layout.header].view(torch.float64).tolist()  # on a GPU this waits until it is there

    def _fill(self, tensor: Tensor, source: int, group: Any = None) -> Tensor:
        dist.recv(tensor, self._global(source), group=group)
        return tensor


def outgoing(schedule: Schedule, rank: int, partners: Sequence[Sequence[int]]) -> Iterator[tuple[Key, int]]:
    """What a rank sends in the order of its row, as (key, device): outputs, and after a group's last backward its news."""
    home, takers = schedule.columns.device, schedule.takers
    left = {(s, g): schedule.per_update for s in range(schedule.stages) for g in range(schedule.updates)}
    for i, action in enumerate(schedule.rows[rank], schedule.bounds[rank]):
        if takers[i] >= 0 and home[takers[i]] != rank:
            yield i, int(home[takers[i]])
        if action.kind in (Kind.B, Kind.W):
            group = action.microbatch // schedule.per_update
            left[action.stage, group] -= 1
            if not left[action.stage, group]:
                for other in partners[action.stage]:
                    if (target := schedule.placement[other]) != rank:
                        yield (action.stage, other, group), target


def _aligned(at: int) -> int:
    return -(-at // ALIGNED) * ALIGNED


def _view(body: Tensor, dtype: torch.dtype, shape: tuple[int, ...], at: int) -> Tensor:
    size = dtype.itemsize * torch.Size(shape).numel()
    return body[at : at + size].view(dtype).view(shape)


def _same(known: Layout | None, layout: Layout) -> bool:
    try:
        return bool(known == layout)
    except (RuntimeError, ValueError):  # values that have no plain ==, such as arrays
        return False
