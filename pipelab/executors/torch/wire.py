"""Messages between processes over torch.distributed: a `Transport` for one rank.

Receives are posted before the messages are made, so that no transfer waits for a compute. For that
both ends have to know how many bytes will come: the message's *slot*. As a rule a message fits. One
that does not comes in two transfers: as much as its slot has room for, and the rest *beside* it.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipelab.action import Kind
from pipelab.executors.job import Job
from pipelab.executors.torch.packing import HEAD, pack, read_head, unpack
from pipelab.executors.transport import Key, Message

AHEAD = 8  # messages of a stream for which receives are posted
BESIDE = 1  # tag of what comes beside a slot
AT_ONCE = 1e-4  # seconds: a receive that takes less did not wait
CPU = torch.device("cpu")


class Wire:
    """The transport of one rank among as many processes as devices, times the replicas.

    What a rank sends, and in which order, is written in the table: every receiver posts its
    receives in the sender's order (NCCL knows no other), ahead of when it needs them.

    A stream is the messages of one kind from one device to another: a stage's outputs, its input
    gradients or its news. They mostly have one size, from which follow the slots: see `_slot`.

    channels  (sender, receiver) -> process group, where payloads go from GPU to GPU; else they go
              through the CPU
    peers     the process group of this device in all replicas
    began     the run's time zero on time.perf_counter, from when on arrivals are timed
    """

    began: float | None = None

    def __init__(self, job: Job, device: torch.device, channels: dict, peers: Any) -> None:
        self._job, self._device = job, device
        self._channels, self._peers = channels, peers
        self._here: dict[Key, Message] = {}  # what has come, and what this device sends to itself
        # By source, in its order: the keys of messages to come, and of those the posted receives.
        self._to_post: dict[int, deque[Key]] = defaultdict(deque)
        self._posted: dict[int, deque[tuple[Key, Any, Tensor]]] = defaultdict(deque)
        for source in range(job.schedule.devices):
            for key, target in outgoing(job, source):
                if target == job.row != source:
                    self._to_post[source].append(key)
        # By stream: the sizes of all messages so far, and how many receives have been posted.
        self._sizes_sent: dict[Any, list[int]] = defaultdict(list)
        self._sizes_received: dict[Any, list[int]] = defaultdict(list)
        self._count_posted: Counter[Any] = Counter()
        # A thread waits for sends: gloo says that one is done only to who waits for it.
        self._sent: SimpleQueue[Any] = SimpleQueue()
        self._lost: Exception | None = None
        self._waiting = Thread(target=self._wait_for_sent, daemon=True, name="pipelab sent")

    def __enter__(self) -> Wire:
        """Open the connections, so that no measured message pays for it."""
        self._waiting.start()
        greeting = torch.zeros(1, dtype=torch.uint8)
        targets = {target for _, target in outgoing(self._job, self._job.row)}
        for target in targets - {self._job.row}:
            group, device = self._channel(self._job.row, target)
            self._post(greeting.to(device), target, group)
        for source in self._to_post:
            group, device = self._channel(source, self._job.row)
            with connected():
                dist.recv(greeting.to(device), self._global(source), group)
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        """Wait until all that was sent has left, unless the run has failed."""
        self._sent.put(None)
        if kind is None:
            self._waiting.join()
            if self._lost:
                raise self._lost

    def send(self, key: Any, device: int, message: Message) -> None:
        if device == self._job.row:
            self._here[key] = message
            return
        # [1] An output is a pair of `Device.give`: its event says nothing to another process, and
        # packing waits for the output anyway. News are no pair.
        payload = message.payload[0] if isinstance(key, int) else message.payload
        # [2] the receiver has posted a receive of so many bytes, or will
        sizes = self._sizes_sent[device, self._stream(key)]
        room = _slot(sizes, len(sizes))
        group, place = self._channel(self._job.row, device)
        body, size = pack((message.at, payload), room, place)
        # [3] a smaller message fills the slot with anything; a larger one goes on beside it
        self._post(body[:room], device, group)
        if size > room:
            self._post(body[room:].cpu(), device, tag=BESIDE)
        sizes.append(size)

    def receive(self, key: Any, device: int) -> Message:
        if isinstance(key, int):
            source = int(self._job.schedule.columns.device[key])
        else:
            source = self._job.schedule.placement[key[0]]
        while key not in self._here:
            with connected():
                self._take_next(source)
        return self._here.pop(key)

    def _take_next(self, source: int) -> None:
        """Put the next message of a source among those that are here."""
        asked = time.perf_counter()
        # [1] its slot; for all of the source's messages before, the receives are posted
        self._post_receives(source)
        key, work, body = self._posted[source].popleft()
        work.wait()
        # [2] what had no room in it
        size = read_head(body)[1]
        if size > len(body):
            rest = torch.empty(size - len(body), dtype=torch.uint8)
            dist.recv(rest, self._global(source), tag=BESIDE)
            body = torch.cat([body, rest.to(body.device)])
        at, payload = unpack(body)
        # [3] its size is known now, so are further slots
        self._sizes_received[source, self._stream(key)].append(size)
        self._post_receives(source)
        # [4] when it was there: if it was not waited for, only the time of sending is known
        now = time.perf_counter()
        if self.began is not None and now - asked > AT_ONCE:
            at = now - self.began
        self._here[key] = Message((payload, None) if isinstance(key, int) else payload, at)

    def _post_receives(self, source: int) -> None:
        """Post a source's next receives, in its order, as far as their slots are known.

        That is AHEAD messages of a stream, and not more: each takes memory until it is wanted.
        """
        to_post = self._to_post[source]
        group, device = self._channel(source, self._job.row)
        while to_post:
            stream = source, self._stream(to_post[0])
            size = _slot(self._sizes_received[stream], self._count_posted[stream])
            if size is None:
                return
            self._count_posted[stream] += 1
            slot = torch.empty(size, dtype=torch.uint8, device=device)
            work = dist.irecv(slot, self._global(source), group=group)
            self._posted[source].append((to_post.popleft(), work, slot))

    def sum_over_replicas(self, key: Key, device: int, parts: list[Any]) -> list[Any]:
        sums = [part.contiguous() for part in parts]
        with connected():
            works = [dist.all_reduce(part, group=self._peers, async_op=True) for part in sums]
            for work in works:
                work.wait()
        return sums

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)

    def abort(self) -> None:
        """Does nothing: waits end with the process, or when its connections are closed."""

    def _post(self, tensor: Tensor, device: int, group: Any = None, tag: int = 0) -> None:
        with connected():
            work = dist.isend(tensor, self._global(device), group=group, tag=tag)
        self._sent.put((work, tensor))  # which must live until it has left

    def _wait_for_sent(self) -> None:
        try:
            with connected():
                while sent := self._sent.get():
                    sent[0].wait()
                    del sent
        except ConnectionError as error:
            self._lost = error

    # ---- who and where

    def _stream(self, key: Any) -> tuple:
        if isinstance(key, int):
            columns = self._job.schedule.columns
            return int(columns.stage[key]), int(columns.kind[key])
        return key[:2]

    def _channel(self, source: int, target: int) -> tuple[Any, torch.device]:
        """The process group between two devices, and where its tensors have to be."""
        group = self._channels.get((source, target))
        return group, CPU if group is None else self._device

    def _global(self, device: int) -> int:
        """The rank of a device in this replica, as `Job.rank`."""
        return device * self._job.replicas + self._job.replica


def _slot(sizes: Sequence[int], j: int) -> Any:
    """Bytes of the slot of a stream's message j; None if they are not known yet.

    As many as the message AHEAD places before it had in all, or else the first one. The receiver
    knows that as soon as that message has come; the first slot has room for a head alone.

        message   0         1  ...  8   9         10
        slot      the head  sizes[0]    sizes[1]  sizes[2]
    """
    if j == 0:
        return HEAD.size
    before = max(0, j - AHEAD)
    return sizes[before] if before < len(sizes) else None


@contextmanager
def connected() -> Iterator[None]:
    """ConnectionError where torch.distributed fails: that is mostly another rank's fault."""
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"a message to or from another rank was lost: {error}") from error


def outgoing(job: Job, row: int) -> Iterator[tuple[Any, int]]:
    """What a row's device sends, as (key, device), in the order of the row.

    Outputs, and after the last backward of an update group its news.
    """
    schedule = job.schedule
    backwards: Counter[tuple[int, int]] = Counter()  # by stage and group, so far
    for i, action in enumerate(schedule.rows[row], schedule.bounds[row]):
        taker = schedule.takers[i]
        if taker >= 0:
            yield i, int(schedule.columns.device[taker])
        if action.kind in (Kind.B, Kind.W):
            group = action.microbatch // schedule.per_update
            backwards[action.stage, group] += 1
            if backwards[action.stage, group] == schedule.per_update:
                for other in job.partners[action.stage]:
                    yield (action.stage, other, group), schedule.placement[other]
