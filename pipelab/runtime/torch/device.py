"""A device that runs torch stages, here the CPU: its clock, payloads, contexts of its actions."""

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from queue import SimpleQueue
from threading import Condition, RLock, Thread, get_ident
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.overrides import _get_current_function_mode_stack
from torch.utils import _pytree as pytree
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from pipelab.runtime.orders import Order
from pipelab.runtime.stage import NO_CONTEXT, Device
from pipelab.runtime.torch.ledger import TorchLedger
from pipelab.runtime.torch.streams import receiving_on

DRAWING = RLock()  # torch has one generator a device, whichever run draws from it


class Turns:
    """Turns at torch's generator, for a training's ranks in this process and its caller's code.

    known  a stage each: whether its forwards draw when it trains (True) or evaluates (False), as
           far as known. If one draws, all backwards take turns, too: a torch.utils.checkpoint in
           any of them sets the generator to the state that its forward had, and restores it
    """

    def __init__(self) -> None:
        self.known: list[dict[bool, bool]] = []
        self._passed = Condition()
        self._lent = 1  # ranks may draw while this is positive: calls of a Trainer may be nested
        self._drawing = 0  # the thread that draws

    def __reduce__(self) -> tuple[type["Turns"], tuple[()]]:
        return Turns, ()  # another process has a generator of its own

    @contextmanager
    def given(self, callers: bool) -> Iterator[None]:
        """The caller's code may draw, and ranks wait; or the other way round."""
        self._lend(-1 if callers else 1)
        try:
            yield
        finally:
            self._lend(1 if callers else -1)

    def _lend(self, more: int) -> None:
        with self._passed:
            self._lent += more
            self._passed.notify_all()
            self._passed.wait_for(lambda: self._lent > 0 or not self._drawing)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """A rank's turn."""
        me = get_ident()
        with self._passed:
            self._passed.wait_for(
                lambda: self._drawing == me or (self._lent > 0 and not self._drawing)
            )
            before, self._drawing = self._drawing, me
        try:
            with DRAWING:
                yield
        finally:
            with self._passed:
                self._drawing = before
                self._passed.notify_all()


class CpuDevice(Device):
    """The CPU."""

    ledger: TorchLedger

    def __init__(self, device: torch.device) -> None:
        super().__init__(device, TorchLedger())
        # The default device is a thread's: this is made in the caller's, for the worker's.
        default = torch.get_default_device()
        self._default = device if default.type == device.type else default
        self._second: SimpleQueue[Any] | None = None  # work for it, with its results to be
        self.turns = Turns()

    @contextmanager
    def active(self) -> Iterator[None]:
        # A thread starts with as many of OpenMP's as there are cores, until it is asked.
        torch.get_num_threads()
        default = NO_CONTEXT if self._default.type == "cpu" else self._default
        # Of the caller's mixed precision nothing is inherited: each forward opens its own. Nor is
        # there a cache of casts for one that a stage opens itself: it would be emptied with this
        # one only, long after the weights have changed.
        mixed = torch.autocast(self.device.type, enabled=False, cache_enabled=False)
        # Autograd would otherwise launch all stages' backwards on a GPU in one thread of its own.
        with mixed, default, torch.autograd.set_multithreading_enabled(False):
            yield

    def callers_work(self, order: Order) -> list[torch.cuda.Event]:
        if not torch.cuda.is_initialized():  # then nothing is on a GPU
            return []
        every = [fed for by_number in order.microbatches.values() for fed in by_number.values()]
        data = self.arrays([(fed.x, fed.target) for fed in every])
        return self._marks_on({tensor.device for tensor in data if tensor.is_cuda})

    def _marks_on(self, gpus: Iterable[torch.device]) -> list[torch.cuda.Event]:
        """Events of this thread's current streams."""
        return [torch.cuda.current_stream(gpu).record_event() for gpu in gpus]

    def wait_for_caller(self, mark: Sequence[torch.cuda.Event]) -> None:
        for event in mark:
            event.synchronize()

    def placed(self, tensor: Tensor) -> Tensor:
        """A copy of the caller's data on this device."""
        if tensor.is_cpu:
            return tensor.clone()
        with self._copy_context(tensor):
            return tensor.to(self.device, copy=True)

    @property
    def kernels(self) -> tuple[int, str]:
        return torch.get_num_threads(), kind_of_device(self.device)

    def beside(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """In a second thread."""

        def inside() -> Any:
            with CpuDevice.active(self):
                return work()

        if self._second is None:
            self._second = SimpleQueue()
            # Not an executor, which keeps a process from ending while its thread hangs.
            Thread(target=_do, args=(self._second,), daemon=True).start()
            finalize(self, self._second.put, None)
        result = Future[Any]()
        self._second.put((inside, result))
        return result.result

    def _copy_context(self, tensor: Tensor) -> AbstractContextManager:
        """The context of a tensor's copy to the CPU: from a GPU not behind the caller's kernels."""
        if not tensor.is_cuda:
            return NO_CONTEXT
        return torch.cuda.stream(receiving_on(tensor.device, str(self.device)))

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
            with self._copy_context(tensor):
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
        mixed: AbstractContextManager[Any] = NO_CONTEXT
        if autocast:
            mixed = torch.autocast(self.device.type, autocast, cache_enabled=False)
        return mixed if seed is None else self._drawing(seed, mixed)

    @contextmanager
    def _drawing(self, seed: int, mixed: AbstractContextManager) -> Iterator[Callable[[], bool]]:
        cuda = [self.device] if self.device.type == "cuda" else []
        with self.turns.taken(), torch.random.fork_rng(cuda), mixed:
            draw_from(seed, self.device)
            yield partial(drew_from, seed, self.device)

    def backward_context(self) -> AbstractContextManager:
        """The context of a backward: torch.utils.checkpoint draws in it what its forward drew."""
        draw = any(modes.get(True, True) for modes in self.turns.known)
        return self.turns.taken() if draw else NO_CONTEXT


def _do(given: SimpleQueue[Any]) -> None:
    """The work of a second thread; None ends it."""
    while entry := given.get():
        work, result = entry
        try:
            result.set_result(work())
        except BaseException as error:
            result.set_exception(error)
        del entry, work, result  # they refer to the device


def kind_of_device(device: torch.device) -> str:
    """The model of a device, and whether it repeats itself: other kernels round otherwise."""
    if device.type == "cpu":
        return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return f"{torch.cuda.get_device_name(device)} {torch.are_deterministic_algorithms_enabled()}"


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
    of_inputs = []
    for leaf in inputs:
        of_inputs.append(leaf.grad)
        leaf.grad = None
    return of_inputs


def walk(
    starts: Sequence[GradientEdge],
    gradients: Sequence[Tensor],
    ends: Sequence[Any] = (),
    *,
    keep: bool = False,
) -> Sequence[Tensor | None]:
    """Accumulate gradients from `starts`, those of `ends` or else of all leaves; frees the graph.

    keep  return those of `ends` instead, and keep the graph

    torch.autograd's (2.11 to 2.13) first compare shapes in Python, as slowly as a small product;
    here they are right.
    """
    build_another = False
    return _engine_run_backward(
        tuple(starts),
        tuple(gradients),
        keep,
        build_another,
        tuple(ends),
        allow_unreachable=True,
        accumulate_grad=not keep,
    )


def check_modes() -> None:
    """ValueError inside a torch mode that covers only this thread, not the workers'."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    names = [type(mode).__name__ for mode in modes if not isinstance(mode, DeviceContext)]
    if torch._C._autograd._top_saved_tensors_default_hooks(False):
        names.append("saved_tensors_hooks")
    if names:
        raise ValueError(
            f"the call is inside `with {names[-1]}`, which torch applies only in this thread, not "
            "in the workers': leave it, or enter it in the stages' forward"
        )
