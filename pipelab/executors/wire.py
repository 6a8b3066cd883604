"""Messages between processes over torch.distributed: a `Transport` for one rank."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import _pytree as pytree

from pipelab.action import Kind
from pipelab.executors.transport import Aborted, Key, Mailboxes, Message
from pipelab.schedule import Schedule


class _Packed(NamedTuple):
    """A tensor as bytes (numpy has no bfloat16)."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    content: Any


class Wire(Mailboxes):
    """The transport of one rank among as many processes as the schedule has devices.

    What a rank sends, and in which order, is written in the table, so every receiver posts its receives in the sender's
    order: one thread per sender puts what comes into the rank's own mailbox. No transfer waits for a compute.
    """

    def __init__(self, schedule: Schedule, rank: int, news: bool) -> None:
        super().__init__(schedule.devices)
        self.rank = rank
        self._sent: list[tuple[Any, Tensor]] = []  # works in flight, and what they send
        self._failed: BaseException | None = None
        for source in range(schedule.devices):
            keys = [key for key, target in outgoing(schedule, source, news) if target == rank and source != rank]
            if keys:
                Thread(target=self._listen, args=(source, keys), daemon=True, name=f"pipelab from {source}").start()

    def send(self, key: Key, device: int, message: Message) -> None:
        if device == self.rank:
            return super().send(key, device, message)
        if isinstance(key, int):  # a parcel of the device's `give`: what it holds leaves when it has been computed
            payload, event = message.payload
            if event is not None:
                event.synchronize()
            message = message._replace(payload=(payload, None))
        body = torch.frombuffer(bytearray(_pack(message)), dtype=torch.uint8)
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        for tensor in (torch.tensor([len(body)]), body):
            self._sent.append((dist.isend(tensor, device), tensor))

    def receive(self, key: Key, device: int) -> Message:
        with self._blaming():
            return super().receive(key, device)

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

    def _listen(self, source: int, keys: list[Key]) -> None:
        size = torch.zeros(1, dtype=torch.int64)
        try:
            for key in keys:
                dist.recv(size, source)
                body = torch.empty(int(size), dtype=torch.uint8)
                dist.recv(body, source)
                super().send(key, self.rank, _unpack(body.numpy().tobytes()))
        except BaseException as error:  # the worker is told when it next receives
            self._failed = error
            self.abort()


def outgoing(schedule: Schedule, rank: int, news: bool) -> Iterator[tuple[Key, int]]:
    """What a rank sends in the order of its row, as (key, device): outputs, and after a group's last backward its news."""
    home, takers = schedule.columns.device, schedule.takers
    left = {(s, g): schedule.per_update for s in range(schedule.stages) for g in range(schedule.updates)}
    for i, action in enumerate(schedule.rows[rank], schedule.bounds[rank]):
        if takers[i] >= 0 and home[takers[i]] != rank:
            yield i, int(home[takers[i]])
        if action.kind in (Kind.B, Kind.W):
            group = action.microbatch // schedule.per_update
            left[action.stage, group] -= 1
            if news and not left[action.stage, group]:
                for other, target in enumerate(schedule.placement):
                    if target != rank:
                        yield (action.stage, other, group), target


def _pack(message: Message) -> bytes:
    def pack(tensor: Tensor) -> _Packed:
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return _Packed(tensor.dtype, tuple(tensor.shape), flat.numpy())

    return pickle.dumps((pytree.tree_map_only(Tensor, pack, message.payload), message.at), protocol=5)


def _unpack(content: bytes) -> Message:
    def unpack(leaf: Any) -> Any:
        if not isinstance(leaf, _Packed):
            return leaf
        return torch.from_numpy(leaf.content.copy()).view(leaf.dtype).reshape(leaf.shape)

    payload, at = pickle.loads(content)
    return Message(pytree.tree_map(unpack, payload, is_leaf=lambda x: isinstance(x, _Packed)), at)
