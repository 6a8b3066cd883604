"""A device that runs torch stages: its clock, payloads to it, and contexts of its actions."""

import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cache, partial
from threading import RLock
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pipelab.runtime.orders import Order
from pipelab.runtime.stage import Device
from pipelab.runtime.torch.ledger import TorchLedger
from pipelab.runtime.torch.names import find_device, find_part
from pipelab.runtime.torch.parts import stream_of_part

HERE = nullcontext()  # of an action that needs no other context
DRAWING = RLock()  # torch has one generator a device, whichever run draws from it


class CpuDevice(Device):
    """The CPU."""

    ledger: TorchLedger

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, TorchLedger())
        # The default device is a thread's: this is made in the caller's, for the worker's.
        default = torch.get_default_device()
        self._default = device if default.type == device.type else default
        self._second: ThreadPoolExecutor | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        # A thread starts with as many of OpenMP's as there are cores, until it is asked.
        torch.get_num_threads()
        default = HERE if self._default.type == "cpu" else self._default
        # Of the caller's mixed precision nothing is inherited: each forward opens its own. Nor is
        # there a cache of casts for one that a stage opens itself: it would be emptied with this
        # one only, long after the weights have changed.
        mixed = torch.autocast(self.device.type, enabled=False, cache_enabled=False)
        # Autograd would otherwise launch all stages' backwards on a GPU in one thread of its own.
        with mixed, default, torch.autograd.set_multithreading_enabled(False):
            yield

    def callers_work(self, order: Order) -> list[torch.cuda.Event]:
        given = [each for of in order.microbatches.values() for each in of.values()]
        data = self.arrays([(each.x, each.target) for each in given])
        return self._marks_on({tensor.device for tensor in data if tensor.is_cuda})

    def _marks_on(self, gpus: Iterable[torch.device]) -> list[torch.cuda.Event]:
        """Events of this thread's current streams."""
        return [torch.cuda.current_stream(gpu).record_event() for gpu in gpus]

    def wait_for_caller(self, mark: Sequence[torch.cuda.Event]) -> None:
        for event in mark:
            event.synchronize()

    def placed(self, tensor: Tensor) -> Tensor:
        """A copy of the caller's data on this device."""
        with self._beside(tensor):
            return tensor.to(self.device, copy=True)

    def beside(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """In a second thread."""

        def inside() -> Any:
            with CpuDevice.active(self):
                return work()

        if self._second is None:
            self._second = ThreadPoolExecutor(1)
        return self._second.submit(inside).result

    def _beside(self, tensor: Tensor) -> AbstractContextManager:
        """The context of a tensor's copy to the CPU: from a GPU not behind the caller's kernels."""
        own = str(self.device)
        return torch.cuda.stream(receiving_on(tensor.device, own)) if tensor.is_cuda else HERE

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in the host's memory, inside `copying`."""
        return tensor.clone()

    def from_host(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def give(self, payload: Any) -> Any:
        """With the CUDA event (or None) that marks its arrival."""
        return payload, None

    def take(self, parcel: Any) -> Any:
        payload, event = parcel
        if event is None:  # it is here, and to look for its tensors takes time
            return payload
        event.synchronize()

        def move(tensor: Tensor) -> Tensor:
            with self._beside(tensor):
                return tensor.to(self.device)

        return pytree.tree_map_only(Tensor, move, payload)

    def arrays(self, payload: Any) -> Iterator[Tensor]:
        if isinstance(payload, Tensor):
            yield payload
        elif type(payload) in (tuple, list):  # most messages, for which pytree would take longer
            for part in payload:
                yield from self.arrays(part)
        else:
            yield from (leaf for leaf in pytree.tree_leaves(payload) if isinstance(leaf, Tensor))

    # ---- what actions run in

    def forward_context(
        self, seed: int | None, autocast: torch.dtype | None
    ) -> AbstractContextManager[Any]:
        """The context of a forward: a stream of random numbers of its own, and mixed precision.

        With a seed it yields `drew`, which says at its end whether anything was drawn.

        torch has one generator per device, so a process's threads take turns if forwards draw. A
        cache of casts would outlive the weights: only the caller's own autocast, around this one,
        empties it.
        """
        kind = self.device.type
        mixed = torch.autocast(kind, autocast, cache_enabled=False) if autocast else HERE
        return mixed if seed is None else self._drawing(seed, mixed)

    @contextmanager
    def _drawing(self, seed: int, mixed: AbstractContextManager) -> Iterator[Callable[[], bool]]:
        cuda = [self.device] if self.device.type == "cuda" else []
        with DRAWING, torch.random.fork_rng(cuda), mixed:
            draw_from(seed, self.device)
            yield partial(drew_from, seed, self.device)

    def backward_context(self, draws: bool) -> AbstractContextManager:
        """The context of a backward: torch.utils.checkpoint draws in it what its forward drew."""
        return DRAWING if draws else HERE


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
        self.copies: torch.cuda.Stream | None = None  # if it copies to or from the host
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
        own = self.stream = self.computing = self.of_stages.get(stage, self.computing)
        try:
            with torch.cuda.stream(own) if self.apart else HERE:
                yield
        finally:
            self.stream, self.computing = before

    def follow(self, marks: Iterable[Any]) -> None:
        for mark in marks if self.apart else ():
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
            if self.copies:
                self.stream.wait_stream(self.copies)
            return result

        return wait

    @contextmanager
    def copying(self) -> Iterator[None]:
        # A stream of its own, which marks of time are then of, too.
        copies = self.copies = copies_of(self.computing)
        copies.wait_stream(self.stream)
        self.stream = copies
        try:
            with torch.cuda.stream(copies):
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


@cache
def stream_of(name: str, worker: int, stage: int | None = None) -> torch.cuda.Stream:
    """The stream of a worker, or its stage, on a GPU or a part of one, the same in every run.

    torch keeps freed memory per stream, and cuBLAS a workspace: with new streams, every run would
    take more of both, and be slow until it has them.
    """
    part = find_part(name)
    return stream_of_part(*part) if part else torch.cuda.Stream(torch.device(name))


@cache
def copies_of(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """The stream of copies to and from the host, beside one that computes."""
    return torch.cuda.Stream(stream.device)


@cache
def receiving_on(gpu: torch.device, owner: Hashable) -> torch.cuda.Stream:
    """A GPU's stream for what a worker, by its computing stream or device, gets from elsewhere."""
    return torch.cuda.Stream(gpu)


def torch_device(name: str, worker: int, apart: Iterable[int] = ()) -> CpuDevice:
    """The runtime of a device for a worker by its number. ValueError as for `find_device`.

    apart  stages that overlap with others of this device
    """
    device = find_device(name)
    if device.type == "cpu":
        return CpuDevice(device)
    streams = {stage: stream_of(name, worker, stage) for stage in apart}
    return CudaDevice(device, stream_of(name, worker), streams)


# ---- random numbers


def draw_from(seed: int, device: torch.device) -> None:
    """Let the next forward on the device draw from this seed."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def drew_from(seed: int, device: torch.device) -> bool:
    """Whether anything was drawn since; starts again from the seed."""

    def states() -> list[Tensor]:
        cuda = device.type == "cuda"
        return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if cuda else [])]

    now = states()
    draw_from(seed, device)
    return not all(map(torch.equal, now, states()))


# ---- a backward


def whole_backward(
    outputs: Sequence[GradientEdge], gradients: Sequence[Tensor], inputs: Iterable[Tensor]
) -> list[Tensor | None]:
    """A full backward: accumulates the weights' gradients and returns those of the inputs."""
    if outputs:
        walk(outputs, gradients)
    found = []
    for leaf in inputs:
        found.append(leaf.grad)
        leaf.grad = None
    return found


def walk(
    starts: Sequence[GradientEdge], gradients: Sequence[Tensor], ends: Sequence[Tensor] = ()
) -> None:
    """Accumulate gradients from `starts`, those of `ends` or else of all leaves; frees the graph.

    torch.autograd.backward (2.11 to 2.13) first compares shapes in Python, as slowly as a small
    product; here they are right.
    """
    keep_graph = build_another = False
    _engine_run_backward(
        tuple(starts),
        tuple(gradients),
        keep_graph,
        build_another,
        tuple(ends),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def check_modes() -> None:
    """ValueError inside a torch mode that covers only this thread, not the workers'."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    found = [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]
    if torch._C._autograd._top_saved_tensors_default_hooks(False):
        found.append("saved_tensors_hooks")
    if found:
        raise ValueError(
            f"the call is inside `with {found[-1]}`, which torch applies only in this thread, not "
            "in the workers': leave it, or enter it in the stages' forward"
        )
