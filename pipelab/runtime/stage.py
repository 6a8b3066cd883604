"""A device and its stages, which a worker drives, whichever library computes."""

import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol


@dataclass(frozen=True)
class Recipe:
    """How to train, the same for all stages.

    loss         (output, target) -> mean, or (mean, how many it is the mean of); by default the
                 samples are counted
    optimizer    torch: a factory, parameters -> optimizer, or a tuple of one and learning-rate
                 schedulers; jax: an optax transformation. None to evaluate
    recompute    per micro-batch of a batch, whether its forward runs again before its backward
    microbatches in a batch
    clip         largest norm of a step's gradient: over all stages if `shared_clip`, else per stage
    autocast     torch: type of mixed precision, or None
    finite       whether a loss that is nan or inf ends the run
    training     else the forwards only evaluate
    keep         whether to keep gradients and weights of every update, for the check and for dumps
    """

    loss: Callable[[Any, Any], Any]
    optimizer: Any
    recompute: Sequence[bool]
    microbatches: int
    clip: float | None
    shared_clip: bool
    autocast: Any
    finite: bool
    training: bool
    keep: bool


@dataclass(frozen=True)
class Feed:
    """The part of the table and the data for one stage, by micro-batch.

    Micro-batches, groups and versions are counted through the whole training.

    versions  the weight version that it reads
    groups    the update that it belongs to
    later     versions that are read after the last micro-batch here: they are kept
    inputs    on the first stage, the data. None elsewhere
    targets   on the last stage. None elsewhere
    samples   how many it has, on the first and the last stage
    unit      what counts are divided by where they weigh gradients, on the last stage: about the
              samples of one, so that float16 can hold it; a power of two, which rounds nothing; the
              same in all replicas
    seeds     (uint32) what its forward draws random numbers from; None if forwards draw none
    """

    versions: dict[int, int]
    groups: dict[int, int]
    later: Collection[int]
    inputs: dict[int, Any] | None
    targets: dict[int, Any] | None
    samples: dict[int, int]
    unit: int
    seeds: dict[int, Any] | None

    @classmethod
    def empty(cls, *, first: bool, last: bool) -> "Feed":
        """The feed of a stage that has had none yet; whether it is the first one, and the last."""
        return cls({}, {}, (), {} if first else None, {} if last else None, {}, 1, None)

    def with_more(self, more: "Feed") -> "Feed":
        """What is left of this one, and another one's micro-batches."""
        pairs = ((getattr(self, f.name), getattr(more, f.name)) for f in fields(self))
        return Feed(*(old | new if isinstance(old, dict) else new for old, new in pairs))

    def drop(self, microbatch: int) -> None:
        """A micro-batch is not needed any more."""
        for values in vars(self).values():
            if isinstance(values, dict):
                values.pop(microbatch, None)


class Step(NamedTuple):
    """The effect of an update on a stage: the gradients it stepped with and the weights it made."""

    gradients: dict[str, Any]
    weights: dict[str, Any]


class Ledger:
    """Bytes of the activations kept on a device; what several micro-batches hold counts once.

    held   now
    most   since `most` was last set
    """

    def __init__(self) -> None:
        self.held = self.most = 0
        self._holders: Counter[int] = Counter()  # block of memory -> how many keys hold it
        self._blocks: dict[Hashable, dict[int, int]] = {}  # key -> its blocks and their bytes

    def hold(self, key: Hashable, blocks: dict[int, int]) -> None:
        """Count blocks of memory, {address: bytes}, for `key`, which has to keep them alive."""
        mine = self._blocks.setdefault(key, {})
        for block, size in blocks.items():
            # Views share a block: it is counted by the first who holds it.
            if block not in mine:
                mine[block] = size
                self._holders[block] += 1
                if self._holders[block] == 1:
                    self.held += size
        self.most = max(self.most, self.held)

    def drop(self, key: Hashable) -> None:
        """`key` holds nothing any more."""
        for block, size in self._blocks.pop(key, {}).items():
            # A block is free when the last of those who hold it lets go.
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                self.held -= size


class Device:
    """A device whose work is done when a call returns, so that a mark of time is just a number."""

    def __init__(self, device: Any, ledger: Ledger) -> None:
        self.device, self.ledger = device, ledger

    def begin(self, began: float) -> None:
        """Tie the device's clock to the run's time zero on `time.perf_counter`."""
        self._began = began

    def active(self) -> AbstractContextManager:
        """The context of a worker thread."""
        return nullcontext()

    def now(self) -> Any:
        """A mark of this moment in the device's work."""
        return time.perf_counter()

    def finish(self) -> None:
        """Wait for all work so far."""

    def failed(self, marks: list[Any]) -> tuple[int, Exception] | None:
        """The first mark, by number, whose work has failed later than it was asked, and why."""
        return None

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
        found = [
            f"{str(array.dtype).removeprefix('torch.')} {tuple(array.shape)}"
            for array in self.arrays(payload)
        ]
        more = f" and {len(found) - 4} more" if len(found) > 4 else ""
        return ", ".join(found[:4]) + more if found else "no tensors"


class Bytes(NamedTuple):
    """The memory besides activations: the latest weights, more versions of them, and so on."""

    weights: int
    versions: int
    gradients: int
    optimizer: int


class Stage(Protocol):
    """A stage as the worker drives it, in any library.

    There is a method for each kind of action: (micro-batch or update's number, what it received) ->
    what is sent on.

    losses    per micro-batch, on the last stage: its mean and what it is the mean of
    steps     what each update did, if it was to be kept
    unsplit   weight -> why I computed its gradient, which W should have
    """

    losses: dict[int, Any]
    steps: Sequence["Step"] = ()
    unsplit: Mapping[Any, str] = {}

    @property
    def versions_held(self) -> int:
        """Weight versions kept."""
        return 1

    def begin(self, feed: Feed | None, *, training: bool, keep: bool) -> None:
        """More micro-batches come; `training` and `keep` are as in a `Recipe`, from now on."""
        return None

    def end(self) -> None:
        """What it was begun for is done, and `losses` and `steps` have been taken."""
        return None

    def forward(self, microbatch: int, received: Any) -> Any: ...

    def backward(self, microbatch: int, received: Any) -> Any: ...

    def input_grad(self, microbatch: int, received: Any) -> Any: ...

    def weight_grad(self, microbatch: int, received: Any) -> Any: ...

    def update(self, number: int, received: Any = None) -> None: ...

    def held(self) -> Bytes:
        """The memory kept now."""

    def trained(self) -> Any:
        """The latest weights, on the host."""

    def snapshot(self) -> None:
        """Keep what the last update did; not part of the update, so that its time is its own."""
        return None

    def resume_state(self) -> Any:
        """What a training goes on from between two batches, if that is possible."""
        return None

    # ---- for replicas and partners

    def complete(self, group: int) -> bool:
        """Whether all backwards of an update group are through, and somebody waits for that."""
        return False

    def news(self) -> Any:
        """News that other stages' updates wait for: a gradient for a common norm, tied weights."""
        return None

    def sums(self, group: int) -> list[Any]:
        """The sums that a group has accumulated, to be added up over replicas."""
        return []

    def replace_sums(self, group: int, sums: list[Any]) -> None:
        """Go on with the sums over replicas."""
        return None
