"""A device and its stages, which a worker drives, for any library."""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from typing import Any, Protocol

import numpy as np

from pipelab.runtime.batches import kind_of
from pipelab.runtime.ledger import Ledger
from pipelab.runtime.options import Options
from pipelab.runtime.orders import Bytes, MicroBatch, Order, Seen, Step, Update
from pipelab.table.action import Kind

NO_CONTEXT = nullcontext()  # one for all that need none


class Device:
    """A device whose work is done when a call returns, so a mark of time is just a number.

    apart  whether its stages work apart, so that what they send each other is given and taken, too
    """

    apart = False

    def __init__(self, device: Any, ledger: Ledger) -> None:
        self.device, self.ledger = device, ledger

    def begin(self, began: float) -> None:
        """Tie the device's clock to the run's time zero on `time.perf_counter`."""
        self._began = began

    def placing(self) -> AbstractContextManager:
        """The context in which the caller's thread makes the worker's stages."""
        return NO_CONTEXT

    def active(self) -> AbstractContextManager:
        """The context of a worker thread."""
        return NO_CONTEXT

    def working(self, stage: int) -> AbstractContextManager:
        """The context of all that is done for a stage, inside `active`."""
        return NO_CONTEXT

    def follow(self, marks: Iterable[Any]) -> None:
        """Let what comes in this `working` start after these marks of the stages' work."""

    def callers_work(self, order: Order) -> Any:
        """A mark of the caller's work so far, which makes an order's data; in its thread."""
        return None

    def wait_for_caller(self, mark: Any) -> None:
        """Let all further work come after that of `callers_work`."""

    def now(self) -> Any:
        """A mark of this moment in the device's work."""
        return time.perf_counter()

    @property
    def kernels(self) -> tuple[int, str]:
        """What numbers may depend on: how many threads compute, and the model of the device."""
        return 1, str(self.device)

    def beside(self, work: Callable[[], Any]) -> Callable[[], Any]:
        """Start work that overlaps with what follows; returns a function that waits for its result.

        Here the work runs at once.
        """
        result = work()
        return lambda: result

    def copying(self) -> AbstractContextManager:
        """The context of a copy to or from the host that overlaps with compute."""
        return NO_CONTEXT

    def reach(self, mark: Any) -> None:
        """Wait until the device's work is there: what it uses until then is not free for more."""

    def finish(self) -> None:
        """Wait for all work so far."""

    def failed(self, marks: list[Any]) -> tuple[int, Exception] | None:
        """The first mark, by number, whose work failed after its call returned, and why."""
        return None

    def doubt(self, error: BaseException) -> str:
        """Why the error may be that of an earlier action, and the remedy; empty if it is not."""
        return ""

    def seconds(self, marks: list[Any]) -> list[float]:
        """Marks as seconds since the run began."""
        return [mark - self._began for mark in marks]

    def give(self, payload: Any) -> Any:
        """A payload for another device's `take`."""
        return payload

    def take(self, parcel: Any) -> Any:
        """The payload of another device's `give`, on this device."""
        raise NotImplementedError

    def arrays(self, payload: Any) -> Iterable[Any]:
        """The arrays of a payload, with `dtype`, `shape` and `nbytes`."""
        raise NotImplementedError

    def size(self, payload: Any) -> int:
        """Bytes of a payload's arrays."""
        return sum(array.nbytes for array in self.arrays(payload))

    def describe(self, payload: Any) -> str:
        """Types and shapes of a payload's arrays, for an error."""
        kinds = [*map(kind_of, self.arrays(payload))]
        more = f" and {len(kinds) - 4} more" if len(kinds) > 4 else ""
        return ", ".join(kinds[:4]) + more if kinds else "no tensors"


class Stage(Protocol):
    """A stage as the worker drives it, in any library.

    Each kind of action has a method: (number of the micro-batch or update, received payload) ->
    payload to send.

    losses    per micro-batch, on the last stage: its mean and count
    steps     what each update did, if kept
    updates   what is reported of each: its squared norm may still be a number on a device
    seen      of an evaluation, on the last stage: by micro-batch, what the order's `observe` saw
    unsplit   weight -> why I computed its gradient instead of W
    """

    losses: dict[int, Any]
    steps: Sequence[Step] = ()
    updates: Mapping[int, Update] = {}
    seen: Mapping[int, Seen] = {}
    unsplit: Mapping[Any, str] = {}

    @property
    def versions_held(self) -> int:
        """Weight versions kept."""
        return 1

    def begin(self, stage: int, order: Order) -> None:
        """Take this stage's part of an order, by its number."""
        return None

    def end(self) -> None:
        """The order is done, and `losses` and `steps` have been taken."""
        return None

    def forward(self, microbatch: int, received: Any) -> Any: ...

    def backward(self, microbatch: int, received: Any) -> Any: ...

    def input_grad(self, microbatch: int, received: Any) -> Any: ...

    def weight_grad(self, microbatch: int, received: Any) -> Any: ...

    def update(self, number: int, received: Any = None) -> None: ...

    def offload(self, microbatch: int) -> None:
        """Move what its forward keeps to the host's memory; `reload` moves it back."""

        return None

    def reload(self, microbatch: int) -> None:
        return None

    def held(self) -> Bytes:
        """The memory kept now."""

    def trained(self) -> Any:
        """The latest weights, on the host."""

    def snapshot(self) -> None:
        """Keep what the last update did; not part of the update, to leave its time unchanged."""
        return None

    def digests(self) -> Mapping[str, str]:
        """Digests of the latest weights by name, which copies and replicas must have, too."""
        return {}

    def attributes(self) -> Mapping[str, str]:
        """What forwards have changed in a module's attributes, by name, in a form to compare."""
        return {}

    def resume_state(self) -> Any:
        """The state that a training continues from between two batches, if possible."""
        return None

    # ---- for replicas and partners

    def complete(self, update: int) -> bool:
        """Whether all backwards of an update are done; False if no other stage waits for that."""
        return False

    def news(self) -> Any:
        """News that other stages' updates wait for: a gradient for a common norm, tied weights."""
        return None

    def sums(self, update: int) -> list[Any]:
        """The sums that its backwards have accumulated, to add up over replicas."""
        return []

    def replace_sums(self, update: int, sums: list[Any]) -> None:
        """Continue with the sums over replicas."""
        return None

    @property
    def has_buffers(self) -> bool:
        """Whether it has buffers, which forwards may change; the same in copies and replicas."""
        return False

    def buffers(self) -> Any:
        """Copies of them, for copies of this stage and replicas."""
        return None

    def take_buffers(self, buffers: Any) -> None:
        """Continue with those of the first replica's first copy."""
        return None


class CountingStage(Stage):
    """A stage and its counts; the backends' stages compute.

    weights  by version: values; a version lives as long as the table has readers of it
    training, keep  as in its latest order; before the first one it trains
    """

    def __init__(self, device: Any, options: Options, *, first: bool, last: bool) -> None:
        self.device, self.options = device, options
        self.number = 0  # from its first order on, its own
        self.training, self.keep = True, False
        self.first, self.last = first, last  # whether it is that of the model
        self.fed: dict[int, MicroBatch] = {}
        self.later: Collection[int] = ()
        self.unit = 1
        self.weights: dict[int, Any] = {}
        self.losses = {}
        self.steps: list[Step] = []
        self.updates: dict[int, Update] = {}
        self.observe: Any = None  # as in its latest order
        self.seen: dict[int, Seen] = {}
        self.unsplit: dict[str, str] = {}
        self.stepped: Any = None  # gradients of an update that `steps` does not have yet
        self.norm = np.nan  # of the latest update, before clipping
        self.counts: dict[int, float] = {}  # update -> what its losses counted, in its unit
        # How many backwards are still to come, of each update and of each weight version.
        self._left: Counter[int] = Counter()
        self._readers: Counter[int] = Counter()
        self._kept: dict[int, Any] = {}  # by micro-batch, what its forward left for its backward
        self._split: dict[int, tuple[Any, Any, float]] = {}  # the same between I and W

    def begin(self, stage: int, order: Order) -> None:
        self.number = stage
        self.training, self.keep = order.training, order.keep
        self.observe = order.observe
        if stage in order.microbatches:
            self.later, self.unit = order.later[stage], order.unit
            fed = order.microbatches[stage]
            for of in fed.values():  # the order's own: it is done with them
                of.x, of.target = self.placed(of.x), self.placed(of.target)
            self.fed |= fed
            if self.training:
                self._left.update(of.update for of in fed.values())
                self._readers.update(of.version for of in fed.values())

    def end(self) -> None:
        if not self.training:  # no update drops them
            self.fed.clear()
        # Its update may still have to look at a loss.
        self.losses = {k: loss for k, loss in self.losses.items() if k in self.fed}
        self.steps, self.updates, self.seen = [], {}, {}

    # ---- backwards: the same three in both backends, but for how gradients are computed
    #
    # The worker calls one of these. `_prepare` finds what the forward kept and the gradient to
    # start from, `_pull` computes (torch: `_pull_graph`, `_walk`), `finish` counts and drops what
    # is done.

    def backward(self, microbatch: int, received: Any) -> Any:
        """Accumulate the weights' gradients; returns the input's."""
        kept, gradient, count = self._prepare(microbatch, received)
        gradient = self._pull(microbatch, kept, gradient, count, Kind.B)
        self.finish(microbatch, count)
        # The count goes along, to stages that never see the loss.
        return count, gradient

    def input_grad(self, microbatch: int, received: Any) -> Any:
        """Only the input's gradient; what is kept stays for `weight_grad`."""
        kept, gradient, count = self._prepare(microbatch, received)
        self._split[microbatch] = kept, gradient, count
        return count, self._pull(microbatch, kept, gradient, count, Kind.I)

    def weight_grad(self, microbatch: int, received: Any) -> None:
        """Accumulate the weights' gradients, which `input_grad` left out."""
        kept, gradient, count = self._split.pop(microbatch)
        self._pull(microbatch, kept, gradient, count, Kind.W)
        self.finish(microbatch, count)

    def _prepare(self, microbatch: int, received: Any) -> tuple[Any, Any, float]:
        """The values the forward kept, the gradient of its output, and what its loss weighs.

        That is what the loss counted, on torch's last stage in multiples of the order's `unit`;
        gradients on the way back are that much larger than those of a mean.
        """
        raise NotImplementedError

    def _pull(self, microbatch: int, kept: Any, gradient: Any, count: float, kind: Kind) -> Any:
        """Accumulate the weights' gradients, unless the action is I; returns the input's.

        The gradient of a micro-batch that counts nothing (all its tokens masked) is zeros, whatever
        its mean is.
        """
        raise NotImplementedError

    # ---- what is counted

    @property
    def latest(self) -> int:
        return max(self.weights)

    @property
    def versions_held(self) -> int:
        return len(self.weights)

    def key(self, microbatch: int) -> Hashable:
        """The ledger's key of what a forward keeps."""
        return id(self), microbatch

    def complete(self, update: int) -> bool:
        return update not in self._left

    def finish(self, microbatch: int, count: float) -> Any:
        """A micro-batch is done. Returns the weight version that nobody reads again, or None."""
        self.device.ledger.drop(self.key(microbatch))
        fed = self.fed[microbatch]
        for counter, key in ((self._left, fed.update), (self._readers, fed.version)):
            counter[key] -= 1
            if not counter[key]:
                del counter[key]
        self.counts[fed.update] = self.counts.get(fed.update, 0.0) + count
        # The latest version is what updates start from.
        if fed.version == self.latest or self.read_later(fed.version):
            return None
        return self.weights.pop(fed.version)

    def read_later(self, version: int) -> bool:
        """Whether a weight version is still to be read."""
        return version in self.later or version in self._readers

    def end_update(self, update: int) -> None:
        """The update is made: its micro-batches are no longer needed."""
        # Updates are made in their order: those are the first.
        for k in list(takewhile(lambda k: self.fed[k].update == update, self.fed)):
            del self.fed[k]

    def divisor(self, update: int, square: Callable[[], float]) -> float:
        """The divisor of its summed gradient: its count, and what clips its norm.

        `square` gives the squared norm of the sum; the formula is torch's clip_grad_norm_.
        """
        # Where all is masked the sum is zero, and stays so.
        count = self.counts.pop(update, 0.0) or 1.0
        if self.options.clip is None:
            return count
        # Gradients are sums; the norm is of their mean.
        self.norm = square() ** 0.5 / count
        # nan stays nan; an infinite norm leaves nothing of what is finite, as in torch
        factor = float(np.minimum(1.0, self.options.clip / (self.norm + 1e-6)))
        return count / factor if factor else np.inf

    def copied(self, data: Any) -> Any:
        """Copies, if what is given could write into them."""
        return data

    def given_back(self, output: Any) -> Any:
        """The model's output on the host."""
        raise NotImplementedError

    def check_loss(self, microbatch: int) -> None:
        """FloatingPointError for a loss that is nan or inf, unless `finite` allows it."""
        mean, count = self.losses[microbatch]
        if not 0 <= count < math.inf:
            raise ValueError(
                f"the loss is the mean of {count}: return (mean, count), with the count as a number"
            )
        # A micro-batch that counts nothing may have any mean: it weighs nothing.
        matters = self.options.finite and self.training and count
        if matters and not math.isfinite(value := float(mean)):
            batch = self.fed[microbatch].batch
            raise FloatingPointError(
                f"the loss of micro-batch {microbatch} (batch {batch}) is {value}; "
                "to continue anyway: finite=False"
            )

    def snapshot(self) -> None:
        if self.stepped is not None:
            on_host = self.on_host
            weights = on_host(self.weights[self.latest])
            self.steps.append(Step(on_host(self.stepped), weights, self.norm))
            self.stepped = None

    def on_host(self, weights: Any) -> dict[str, Any]:
        """Weights or gradients by name, copied to the host."""
        raise NotImplementedError

    def placed(self, data: Any) -> Any:
        """Data on the stage's device."""
        raise NotImplementedError
