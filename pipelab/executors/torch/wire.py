"""Messages between processes over torch.distributed: a `Transport` for one rank."""

from __future__ import annotations

import math
import pickle
import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from pipelab.action import Kind
from pipelab.executors.transport import Key, Message
from pipelab.schedule import Schedule

ALIGNED = 16  # bytes: any dtype may begin there
AHEAD = 8  # messages of a stream for which receives are posted
BESIDE = 1  # tag of announcements
TOGETHER = 16  # sends that are waited for at a time
AT_ONCE = 1e-4  # seconds: a receive that takes less did not wait
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Leaf:
    """A leaf of a payload's tree: (dtype, shape) of a tensor, `float` for a number, else [the value itself]."""

    kind: Any


@dataclass(frozen=True)
class Layout:
    """Where a message's parts lie in its bytes: a header of floats, then the tensors one after another.

    spec     how the leaves make a tree
    leaves   `Leaf.kind` of each; numbers go into the header: when it was sent, whether it is announced, the payload's own
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
                kinds.append((leaf.dtype, leaf.shape))
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
        leaves, spec = pytree.tree_flatten(
            pickle.loads(content.numpy().tobytes()), is_leaf=lambda x: isinstance(x, Leaf)
        )
        return cls(spec, tuple(leaf.kind for leaf in leaves))

    @cached_property
    def header(self) -> int:
        """Bytes of the numbers."""
        return 8 * (2 + sum(kind is float for kind in self.leaves))

    @cached_property
    def places(self) -> list[tuple[torch.dtype, tuple[int, ...], int, int]]:
        """Type, shape, first byte and end of every tensor."""
        at, found = self.header, []
        for dtype, shape in (kind for kind in self.leaves if isinstance(kind, tuple)):
            at = -(-at // ALIGNED) * ALIGNED
            found.append((dtype, tuple(shape), at, at + dtype.itemsize * math.prod(shape)))
            at = found[-1][3]
        return found

    @cached_property
    def size(self) -> int:
        return self.places[-1][3] if self.places else self.header

    def pack(self, tensors: list[Tensor], numbers: list[float], device: torch.device) -> Tensor:
        body = torch.empty(self.size, dtype=torch.uint8, device=device)
        header = torch.from_numpy(np.array(numbers)).view(torch.uint8)
        body[: self.header] = header
        for tensor, (dtype, shape, at, end) in zip(tensors, self.places, strict=True):
            body[at:end].view(dtype).view(shape).copy_(tensor.detach())
        return body

    def numbers(self, body: Tensor) -> list[float]:
        """What the header says; on a GPU this waits until it is there."""
        return body[: self.header].cpu().numpy().view(np.float64).tolist()

    def unpack(self, body: Tensor, numbers: list[float]) -> Any:
        places, floats = iter(self.places), iter(numbers)
        leaves: list[Any] = []
        for kind in self.leaves:
            if isinstance(kind, tuple):
                dtype, shape, at, end = next(places)
                leaves.append(
                    body[at:end].view(dtype).view(shape).data
                )  # .data: no version counter in common
            else:
                leaves.append(next(floats) if kind is float else kind[0])
        return pytree.tree_unflatten(leaves, self.spec)


class Stream:
    """Messages of one kind from one device to another: outputs of a stage, its gradients, or its news; they mostly have one
    layout. Message j goes in as many bytes as that of message max(0, j - AHEAD) took, which both sides know by then, so that
    receives can be posted that far ahead. The first one, and one of another layout, are announced beside it.
    """

    def __init__(self) -> None:
        self.layouts: list[Layout] = []  # of the messages so far

    def reference(self, j: int) -> Layout | None:
        """The layout that message j goes by, if that is known yet; the first goes by none."""
        at = max(0, j - AHEAD)
        return self.layouts[at] if j and at < len(self.layouts) else None


class Wire:
    """The transport of one rank among as many processes as the schedule has devices, times the replicas.

    What a rank sends, and in which order, is written in the table, so every receiver posts its receives in the sender's
    order, ahead of when it needs them: no transfer waits for a compute. A message is one transfer of bytes in a layout that
    both sides know.

    partners  per stage, the stages whose news its updates wait for
    channels  (sender, receiver) -> process group, where payloads go from GPU to GPU; else they go through the CPU
    peers     the process group of this device's replicas, if there are any
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        partners: Sequence[Sequence[int]],
        *,
        replica: int = 0,
        replicas: int = 1,
        device: torch.device | None = None,
        channels: dict[tuple[int, int], Any] | None = None,
        peers: Any = None,
    ) -> None:
        self.rank, self._replica, self._count, self._peers = rank, replica, replicas, peers
        self._channels, self._device = channels or {}, device or CPU
        self._stage, self._kind = schedule.columns.stage.tolist(), schedule.columns.kind.tolist()
        self._home, self._placement = schedule.columns.device.tolist(), schedule.placement
        self._here: dict[Key, Message] = {}
        self._sending: defaultdict[Any, Stream] = defaultdict(Stream)
        self._coming: defaultdict[Any, Stream] = defaultdict(Stream)
        self._sent: list[tuple[Any, Tensor]] = []  # works in flight, and what they send
        self._done_with: SimpleQueue[list[tuple[Any, Tensor]]] = SimpleQueue()
        self._all_gone = Event()
        self._failed: Exception | None = None
        Thread(target=self._let_go, daemon=True, name="pipelab sent").start()
        self._posted: dict[Key, tuple[Any, Tensor, Layout]] = {}
        self._targets = {target for _, target in outgoing(schedule, rank, partners)}
        self._order: dict[int, deque[Key]] = {}  # sender -> what is still to come, in its order
        self._to_post: dict[int, deque[tuple[Key, int]]] = {}  # with their number in their stream
        for source in range(schedule.devices):
            keys = [
                key
                for key, target in outgoing(schedule, source, partners)
                if target == rank and source != rank
            ]
            if keys:
                numbers: Counter[Any] = Counter()
                self._order[source], self._to_post[source] = deque(keys), deque()
                for key in keys:
                    self._to_post[source].append((key, numbers[self._stream(key)]))
                    numbers[self._stream(key)] += 1
        self.began: float | None = (
            None  # the run's time zero on time.perf_counter, from when on arrivals are timed
        )

    def greet(self) -> None:
        """Open the connections, so that no measured message pays for it; waits for those who will send here."""
        for target in self._targets:
            for group, device in {self._channel(self.rank, target), (None, CPU)}:
                self._post(torch.zeros(1, dtype=torch.uint8, device=device), target, group)
        for source in self._order:
            for group, device in {self._channel(source, self.rank), (None, CPU)}:
                dist.recv(
                    torch.zeros(1, dtype=torch.uint8, device=device), self._global(source), group
                )

    def send(self, key: Key, device: int, message: Message) -> None:
        if device == self.rank:
            self._here[key] = message
            return
        payload = (
            message.payload[0] if isinstance(key, int) else message.payload
        )  # a parcel of the device's `give`
        layout, tensors, numbers = Layout.of(payload)
        stream, (group, on) = (
            self._sending[device, self._stream(key)],
            self._channel(self.rank, device),
        )
        known = stream.reference(len(stream.layouts))
        if _same(known, layout):
            self._post(layout.pack(tensors, [message.at, 0.0, *numbers], on), device, group)
        else:
            if known:  # the receive is posted: fill it, and say that the message comes beside it
                filler = torch.zeros(known.size, dtype=torch.uint8, device=on)
                filler[8:16].view(torch.float64).fill_(1)
                self._post(filler, device, group)
            announcement = layout.announcement()
            for tensor in (
                torch.tensor([len(announcement)]),
                announcement,
                layout.pack(tensors, [message.at, 0.0, *numbers], CPU),
            ):
                self._post(tensor, device, tag=BESIDE)
        stream.layouts.append(layout)

    def receive(self, key: Any, device: int) -> Message:
        try:
            while key not in self._here:
                self._take_next(
                    self._home[key] if isinstance(key, int) else self._placement[key[0]]
                )
        except RuntimeError as error:
            raise _lost(error) from error
        return self._here.pop(key)

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
        if seconds > 0:
            time.sleep(seconds)

    def abort(self) -> None:
        """Nothing to do: a rank that fails ends its process, which breaks its connections."""

    def finish(self) -> None:
        """Wait until all that was sent has left."""
        self._done_with.put(self._sent)
        self._done_with.put([])
        self._all_gone.wait()
        if self._failed:
            raise _lost(self._failed)

    def _let_go(self) -> None:
        """Wait for what has been sent, some at a time: gloo says that a send is done only to who waits for it."""
        try:
            while some := self._done_with.get():
                for work, _ in some:
                    work.wait()
        except RuntimeError as error:
            self._failed = error
        self._all_gone.set()

    def _take_next(self, source: int) -> None:
        """Put the next message of a sender among those that are here."""
        key = self._order[source].popleft()
        stream, changed, asked = self._coming[source, self._stream(key)], 1.0, time.perf_counter()
        self._post_receives(source)
        if key in self._posted:
            work, body, layout = self._posted.pop(key)
            work.wait()
            at, changed, *numbers = layout.numbers(body)
        if changed:
            size = self._fill(torch.zeros(1, dtype=torch.int64), source)
            layout = Layout.announced(self._fill(torch.empty(int(size), dtype=torch.uint8), source))
            body = self._fill(torch.empty(layout.size, dtype=torch.uint8), source)
            at, _, *numbers = layout.numbers(body)
        stream.layouts.append(layout)
        self._post_receives(source)
        if (
            self.began is not None and (now := time.perf_counter()) - asked > AT_ONCE
        ):  # else it was there; not known since when
            at = now - self.began
        payload = layout.unpack(body, numbers)
        self._here[key] = Message((payload, None) if isinstance(key, int) else payload, at)

    def _post_receives(self, source: int) -> None:
        """Post what is to come in the sender's order, as far ahead as its layout is known."""
        waiting, (group, device) = self._to_post[source], self._channel(source, self.rank)
        while waiting:
            key, j = waiting[0]
            layout = self._coming[source, self._stream(key)].reference(j)
            if j and layout is None:
                return
            waiting.popleft()
            if layout:
                body = torch.empty(layout.size, dtype=torch.uint8, device=device)
                self._posted[key] = (
                    dist.irecv(body, self._global(source), group=group),
                    body,
                    layout,
                )

    def _fill(self, tensor: Tensor, source: int) -> Tensor:
        dist.recv(tensor, self._global(source), tag=BESIDE)
        return tensor

    def _post(self, tensor: Tensor, device: int, group: Any = None, tag: int = 0) -> None:
        try:
            self._sent.append(
                (dist.isend(tensor, self._global(device), group=group, tag=tag), tensor)
            )
        except RuntimeError as error:
            raise _lost(error) from error
        if len(self._sent) == TOGETHER:
            self._done_with.put(self._sent)
            self._sent = []

    def _channel(self, source: int, target: int) -> tuple[Any, torch.device]:
        group = self._channels.get((source, target))
        return group, self._device if group is not None else CPU

    def _global(self, device: int) -> int:
        """The rank of a device in this replica: replicas of a device are neighbours, as in DeepSpeed's topology."""
        return device * self._count + self._replica

    def _stream(self, key: Any) -> tuple:
        return (self._stage[key], self._kind[key]) if isinstance(key, int) else key[:2]


def _lost(error: Exception) -> ConnectionError:
    return ConnectionError(f"a message to or from another rank was lost: {error}")


def outgoing(
    schedule: Schedule, rank: int, partners: Sequence[Sequence[int]]
) -> Iterator[tuple[Key, int]]:
    """What a rank sends in the order of its row, as (key, device): outputs, and after a group's last backward its news."""
    home, takers = schedule.columns.device, schedule.takers
    left = {
        (s, g): schedule.per_update for s in range(schedule.stages) for g in range(schedule.updates)
    }
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


def _same(known: Layout | None, layout: Layout) -> bool:
    try:
        return bool(known == layout)
    except (RuntimeError, ValueError):  # values that have no plain ==, such as arrays
        return False
