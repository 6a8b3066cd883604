"""A GPU that runs torch stages, or a part of one: what waits for what."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pipelab.runtime.orders import Order
from pipelab.runtime.stage import NO_CONTEXT
from pipelab.runtime.torch.device import CpuDevice
from pipelab.runtime.torch.names import find_device
from pipelab.runtime.torch.streams import copy_stream, receiving_on, stream_of


class CudaDevice(CpuDevice):
    """A GPU, or a part of it, with its own stream, so that several workers can share it.

    The host runs ahead, so marks of time are events. What comes from elsewhere is copied on a
    stream beside that one. Where actions of two stages overlap, each stage has a stream and so
    memory of its own: a forward cannot write where another stage's backward still reads.

    of_stages  by stage, their streams, if not all have the worker's
    """

    def __init__(
        self,
        device: torch.device,
        stream: torch.cuda.Stream,
        of_stages: Mapping[int, torch.cuda.Stream] | None = None,
    ) -> None:
        super().__init__(device)
        self.stream, self.computing, self.of_stages = stream, stream, of_stages or {}
        self.apart, self._all = bool(of_stages), {stream, *self.of_stages.values()}
        self.copy_stream: torch.cuda.Stream | None = None  # if it copies to or from the host
        self._of_caller: Sequence[torch.cuda.Event] = ()

    @contextmanager
    def placing(self) -> Iterator[None]:
        # Memory belongs to the stream that it is made on: a version of the weights that is dropped
        # is not free before this stream has read it.
        caller = torch.cuda.current_stream(self.device)
        for stream in self._all:
            stream.wait_stream(caller)
        with torch.cuda.stream(self.stream):
            yield
        for stream in self._all:  # they have read the modules, which the caller may change now
            caller.wait_stream(stream)

    def begin(self, began: float) -> None:
        self._zero = self.now()
        self._zero.synchronize()
        self._before = time.perf_counter() - began  # seconds from the run's zero to the event

    @contextmanager
    def active(self) -> Iterator[None]:
        # It makes the GPU's context current in this thread, which cuBLAS looks for.
        torch.cuda.synchronize(self.device)
        with super().active(), torch.cuda.stream(self.stream):
            yield

    def callers_work(self, order: Order) -> list[torch.cuda.Event]:
        # Also of this GPU, where the loss may have tensors of the caller's.
        return [*super().callers_work(order), *self._marks_on([self.device])]

    def wait_for_caller(self, mark: Sequence[torch.cuda.Event]) -> None:
        self._of_caller = mark
        for stream in self._all:
            for event in mark:
                stream.wait_event(event)

    @contextmanager
    def working(self, stage: int) -> Iterator[None]:
        before = self.stream, self.computing
        used = self.stream = self.computing = self.of_stages.get(stage, self.computing)
        try:
            with torch.cuda.stream(used) if self.apart else NO_CONTEXT:
                yield
        finally:
            self.stream, self.computing = before

    def follow(self, marks: Iterable[Any]) -> None:
        if self.apart:
            for mark in marks:
                self.stream.wait_event(mark)

    def placed(self, tensor: Tensor) -> Tensor:
        if tensor.device == self.device:
            return tensor.clone()
        return self._fetched(tensor, self._of_caller)

    def _fetched(self, tensor: Tensor, events: Sequence[torch.cuda.Event]) -> Tensor:
        """A tensor of another device, copied when the events are done, beside all computing."""
        receiving = receiving_on(self.device, self.computing)
        streams = [receiving]
        if tensor.is_cuda:
            # torch copies on the sending GPU's current stream, which is the caller's otherwise.
            streams.insert(0, receiving_on(tensor.device, self.computing))
        elif tensor.layout is torch.strided:
            tensor = tensor.pin_memory()  # else the host would wait
        for stream in streams:
            for event in events:
                stream.wait_event(event)
        with ExitStack() as stack:
            for stream in streams:
                stack.enter_context(torch.cuda.stream(stream))
            here = tensor.to(self.device, non_blocking=True)
        if tensor.is_cuda:
            tensor.record_stream(streams[0])
        here.record_stream(self.stream)
        self.stream.wait_stream(receiving)
        return here

    def now(self) -> Any:
        # Who waits for it sleeps: the cores are for threads that launch.
        return self.stream.record_event(torch.cuda.Event(enable_timing=True, blocking=True))

    def beside(self, work: Callable[[], Any]) -> Callable[[], Any]:
        result = work()

        def wait() -> Any:
            if self.copy_stream:
                self.stream.wait_stream(self.copy_stream)
            return result

        return wait

    @contextmanager
    def copying(self) -> Iterator[None]:
        # A stream of its own, which marks of time are then of, too.
        stream = self.copy_stream = copy_stream(self.computing)
        stream.wait_stream(self.stream)
        self.stream = stream
        try:
            with torch.cuda.stream(stream):
                yield
        finally:
            self.stream = self.computing

    def to_host(self, tensor: Tensor) -> Tensor:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self.stream)
        return host

    def from_host(self, tensor: Tensor) -> Tensor:
        back = tensor.to(self.device, non_blocking=True)
        back.record_stream(self.computing)
        return back

    def reach(self, mark: Any) -> None:
        mark.synchronize()

    def finish(self) -> None:
        for stream in self._all:
            stream.synchronize()

    def doubt(self, error: BaseException) -> str:
        # cuBLAS and others fail after it with a RuntimeError of their own.
        if not (isinstance(error, RuntimeError) and "CUDA error" in str(error)):
            return ""
        return (
            "a GPU reports errors late, so an earlier action may have failed: "
            "CUDA_LAUNCH_BLOCKING=1 or devices='cpu' names it"
        )

    def seconds(self, marks: list[Any]) -> list[float]:
        return [self._zero.elapsed_time(mark) / 1e3 + self._before for mark in marks]

    def give(self, payload: Any) -> Any:
        return payload, self.stream.record_event()

    def take(self, parcel: Any) -> Any:
        payload, event = parcel
        events = [] if event is None else [event]

        def move(tensor: Tensor) -> Tensor:
            if tensor.device != self.device:
                return self._fetched(tensor, events)
            tensor.record_stream(self.stream)  # its sender may free it before it is read here
            return tensor

        if event is not None:
            self.stream.wait_event(event)
        return pytree.tree_map_only(Tensor, move, payload)


def torch_device(name: str, worker: int, apart: Iterable[int] = ()) -> CpuDevice:
    """The runtime of a device for a worker by its number. ValueError as for `find_device`.

    apart  stages that overlap with others of this device
    """
    device = find_device(name)
    if device.type == "cpu":
        return CpuDevice(device)
    streams = {stage: stream_of(name, worker, stage) for stage in apart}
    return CudaDevice(device, stream_of(name, worker), streams)
