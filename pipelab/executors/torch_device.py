"""A device that runs torch stages: its clock, how payloads reach it, and the bytes that autograd keeps on it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _pytree as pytree

_DRAWING = Lock()


class CpuDevice:
    """The CPU: work is done when a call returns, so that a mark of time is just a number."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.ledger = device, Ledger()

    def begin(self, began: float) -> None:
        """Tie the device's clock to the run's time zero on `time.perf_counter`."""
        self._began = began

    def active(self) -> AbstractContextManager:
        """What a worker thread runs in."""
        return nullcontext()

    def now(self) -> Any:
        """A mark of this moment in the device's work."""
        return time.perf_counter()

    def finish(self) -> None:
        """Wait for all work so far."""

    def seconds(self, marks: list[Any]) -> list[float]:
        """Marks as seconds since the run began."""
        return [mark - self._began for mark in marks]

    def give(self, payload: Any) -> Any:
        """A payload for another device's `take`, with the CUDA event (or None) after which it is there."""
        return payload, None

    def take(self, parcel: Any) -> Any:
        """The payload of another device's `give`, on this device."""
        payload, event = parcel
        if event is not None:
            event.synchronize()
        return pytree.tree_map_only(Tensor, lambda t: t.to(self.device), payload)

    def size(self, payload: Any) -> int:
        """Bytes of a payload's tensors."""
        return sum(t.nbytes for t in pytree.tree_leaves(payload) if isinstance(t, Tensor))

    def describe(self, payload: Any) -> str:
        """Types and shapes of a payload's tensors, for an error."""
        found = [
            f"{str(t.dtype)[6:]} {tuple(t.shape)}"
            for t in pytree.tree_leaves(payload)
            if isinstance(t, Tensor)
        ]
        return (
            ", ".join(found[:4]) + (f" and {len(found) - 4} more" if len(found) > 4 else "")
            or "no tensors"
        )

    @contextmanager
    def forward_context(self, seed: int | None, autocast: torch.dtype | None) -> Iterator[None]:
        """What a forward runs in: a stream of random numbers of its own, and mixed precision.

        torch draws from one generator a device, so that forwards which draw take turns on the threads of a process.
        """
        with ExitStack() as stack:
            if seed is not None:
                stack.enter_context(_DRAWING)
                stack.enter_context(
                    torch.random.fork_rng([self.device] if self.device.type == "cuda" else [])
                )
                torch.default_generator.manual_seed(seed)
                if self.device.type == "cuda":
                    torch.cuda.manual_seed(seed)
            if autocast is not None:
                stack.enter_context(torch.autocast(self.device.type, autocast))
            yield


class CudaDevice(CpuDevice):
    """A GPU with a stream of its own, so that several workers can share it; marks are events, as the host runs ahead."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.stream = torch.cuda.Stream(device)

    def begin(self, began: float) -> None:
        # Weights and data were put there on the caller's stream.
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        self._zero = self.now()
        self._zero.synchronize()
        self._began = (
            began - time.perf_counter()
        )  # minus the seconds from the run's zero to the event

    def active(self) -> AbstractContextManager:
        return torch.cuda.stream(self.stream)

    def now(self) -> Any:
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.stream)
        return event

    def finish(self) -> None:
        self.stream.synchronize()

    def seconds(self, marks: list[Any]) -> list[float]:
        return [self._zero.elapsed_time(mark) / 1e3 - self._began for mark in marks]

    def give(self, payload: Any) -> Any:
        event = torch.cuda.Event()
        event.record(self.stream)
        return payload, event

    def take(self, parcel: Any) -> Any:
        payload, event = parcel
        if event is not None:
            self.stream.wait_event(event)

        def move(tensor: Tensor) -> Tensor:
            if tensor.is_cuda:
                tensor.record_stream(
                    self.stream
                )  # the sender may free it before this stream has read it
            return tensor.to(self.device, non_blocking=True)

        return pytree.tree_map_only(Tensor, move, payload)


def torch_device(name: str | torch.device) -> CpuDevice:
    """The runtime of a torch device by its name. ValueError if this machine does not have it."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device {name!r}: {str(error).splitlines()[0]}") from None
    if device.type == "cpu":
        return CpuDevice(device)
    if device.type != "cuda":
        raise ValueError(f"device {name!r}: use cpu or cuda")
    if (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {name!r}: this machine has {torch.cuda.device_count()} CUDA devices"
        )
    return CudaDevice(device)


class Ledger:
    """Bytes of the activations kept on a device: unique storages of what autograd saved, without weights and buffers.

    held   now
    most   since `most` was last set
    """

    def __init__(self) -> None:
        self.held = self.most = 0
        self._constants: dict[int, set[int]] = {}  # owner -> storages that do not count
        self._count: Counter[int] = Counter()  # storage -> how many keys hold it
        self._of: dict[Any, dict[int, int]] = {}  # key -> storages and their bytes

    def ignore(self, owner: int, tensors: Iterable[Tensor]) -> None:
        """Storages of these tensors do not count; replaces what the owner said before."""
        self._constants[owner] = {t.untyped_storage().data_ptr() for t in tensors}

    def watch(self, key: Any) -> AbstractContextManager:
        """Count for `key` all that autograd saves in this context."""

        def pack(tensor: Tensor) -> tuple[Tensor, int]:
            self.hold(key, [tensor])
            return (
                tensor.detach(),
                tensor._version,
            )  # the tensor itself would keep its own graph alive

        def unpack(packed: tuple[Tensor, int]) -> Tensor:
            tensor, version = packed
            if tensor._version != version:
                raise RuntimeError(
                    "a tensor saved for the backward was changed in place after the forward"
                )
            return tensor

        return saved_tensors_hooks(pack, unpack)

    def hold(self, key: Any, tensors: Iterable[Any]) -> None:
        """Count these tensors for `key`, those that are held already only once."""
        mine = self._of.setdefault(key, {})
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                at = storage.data_ptr()
                if at not in mine and not any(at in known for known in self._constants.values()):
                    mine[at] = storage.nbytes()
                    self._count[at] += 1
                    self.held += mine[at] if self._count[at] == 1 else 0
        self.most = max(self.most, self.held)

    def drop(self, key: Any) -> None:
        """`key` holds nothing any more."""
        for at, size in self._of.pop(key, {}).items():
            self._count[at] -= 1
            if not self._count[at]:
                del self._count[at]
                self.held -= size
