"""What every stage counts, whichever library computes it: readers, backwards, losses, bytes."""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from pipelab.action import Kind


@dataclass(frozen=True)
class Recipe:
    """How to train, the same for all stages.

    loss         (output, target) -> mean, or (mean, how many it is the mean of); by default the
                 samples are counted
    optimizer    torch: a factory, parameters -> optimizer, or a tuple of one and learning-rate
                 schedulers; jax: an optax transformation. None to evaluate
    recompute    (total,) whether a micro-batch's forward runs again before its backward
    microbatches in a batch
    clip         largest norm of a step's gradient: over all stages if `shared_clip`, else per stage
    autocast     torch: type of mixed precision, or None
    finite       whether a loss that is nan or inf ends the run
    training     else the forwards only evaluate
    keep         whether to keep gradients and weights of every update, for the check and for dumps
    """

    loss: Callable[[Any, Any], Any]
    optimizer: Any
    recompute: np.ndarray
    microbatches: int
    clip: float | None
    shared_clip: bool
    autocast: Any
    finite: bool
    training: bool
    keep: bool


@dataclass(frozen=True)
class Feed:
    """What the table and the data hold for one stage; lists have one entry per micro-batch.

    versions  the weight version that it reads
    groups    the update that it belongs to
    later     versions that are read after the last micro-batch here: kept for a checkpoint
    inputs    on the first stage, the data. None elsewhere
    targets   on the last stage. None elsewhere
    samples   how many it has, on the last stage
    seeds     (uint32) what its forward draws random numbers from; None if forwards draw none
    """

    versions: Sequence[int]
    groups: Sequence[int]
    later: Sequence[int]
    inputs: Sequence[Any] | None
    targets: Sequence[Any] | None
    samples: Sequence[int]
    seeds: np.ndarray | None


class Step(NamedTuple):
    """What an update did to a stage: the gradients it stepped with and the weights it made."""

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
            if block not in mine:
                mine[block] = size
                self._holders[block] += 1
                if self._holders[block] == 1:
                    self.held += size
        self.most = max(self.most, self.held)

    def drop(self, key: Hashable) -> None:
        """`key` holds nothing any more."""
        for block, size in self._blocks.pop(key, {}).items():
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                self.held -= size


class Stage:
    """What the worker drives, and the part of it that counts; the wings' stages do the computing.

    There is a method for each kind of action, `forward`, `backward`, `input_grad`, `weight_grad`
    and `update`: (micro-batch or update's number, what it received) -> what is sent on. Besides,
    `news()` is what other stages' updates wait for after the last backward of a group (its gradient
    for a common norm, tied weights); `sums(group)` and `replace_sums(group, sums)` give what a
    group has accumulated to be added up over replicas; `held()` the bytes kept; `trained()` the
    weights.

    weights  by version: values, so that a version lives as long as the table has readers of it
    losses   per micro-batch: its mean and what it is the mean of
    steps    what each update did, if the recipe says to keep it
    unsplit  weight -> why I computed its gradient, which W should have
    """

    def __init__(self, device: Any, recipe: Recipe, feed: Feed) -> None:
        self.device, self.recipe, self.feed = device, recipe, feed
        self.weights: dict[int, Any] = {}
        self.losses: dict[int, tuple[Any, float]] = {}
        self.steps: list[Step] = []
        self.unsplit: dict[str, str] = {}
        self.stepped: Any = None  # gradients of an update that `steps` does not have yet
        self.readers = Counter([*feed.versions, *feed.later])  # version -> backwards to come
        self.counts: dict[int, float] = {}  # group -> what its micro-batches' losses counted
        self._backwards_left = Counter(feed.groups)
        self._kept: dict[int, Any] = {}  # by micro-batch, what its forward left for its backward
        self._split: dict[int, tuple[Any, Any, float]] = {}  # the same between I and W

    # ---- backwards: the same three in both wings, but for how gradients are computed

    def backward(self, microbatch: int, received: Any) -> Any:
        """Accumulate the weights' gradients; returns the input's."""
        kept, gradient, count = self._prepare(microbatch, received)
        gradient = self._pull(microbatch, kept, gradient, count, Kind.B)
        self.finish(microbatch, count)
        return count, gradient

    def input_grad(self, microbatch: int, received: Any) -> Any:
        """The input's gradient alone; what is kept stays for `weight_grad`."""
        kept, gradient, count = self._prepare(microbatch, received)
        self._split[microbatch] = kept, gradient, count
        return count, self._pull(microbatch, kept, gradient, count, Kind.I)

    def weight_grad(self, microbatch: int, received: Any) -> None:
        """Accumulate the weights' gradients, which `input_grad` left out."""
        kept, gradient, count = self._split.pop(microbatch)
        self._pull(microbatch, kept, gradient, count, Kind.W)
        self.finish(microbatch, count)

    def _prepare(self, microbatch: int, received: Any) -> tuple[Any, Any, float]:
        """What the forward kept, the gradient of its output, and what the loss counted."""
        raise NotImplementedError

    def _pull(self, microbatch: int, kept: Any, gradient: Any, count: float, kind: Kind) -> Any:
        """Accumulate the weights' gradients, unless the action is I; returns the input's.

        A micro-batch that counts nothing (all its tokens masked) has no gradient, whatever its mean
        is.
        """
        raise NotImplementedError

    def _seed(self, microbatch: int) -> Any:
        return None if self.feed.seeds is None else self.feed.seeds[microbatch]

    # ---- what is counted

    @property
    def latest(self) -> int:
        return max(self.weights)

    @property
    def versions_held(self) -> int:
        """Weight versions kept."""
        return len(self.weights)

    def key(self, microbatch: int) -> Hashable:
        """The ledger's key of what a forward keeps."""
        return id(self), microbatch

    def complete(self, group: int) -> bool:
        """Whether all backwards of an update group are through."""
        return not self._backwards_left[group]

    def finish(self, microbatch: int, count: float) -> Any:
        """A micro-batch is through. Returns the weight version that nobody reads again, or None."""
        self.device.ledger.drop(self.key(microbatch))
        group, version = self.feed.groups[microbatch], self.feed.versions[microbatch]
        self.counts[group] = self.counts.get(group, 0.0) + count
        self._backwards_left[group] -= 1
        self.readers[version] -= 1
        if self.readers[version] or version == self.latest:
            return None
        return self.weights.pop(version)

    def divisor(self, group: int, square: Callable[[], float]) -> float:
        """What the group's summed gradient is divided by: its count, and what clips its norm.

        `square` gives the squared norm of the sum; the formula is torch's clip_grad_norm_.
        """
        count = self.counts.pop(group, 0.0) or 1.0
        if self.recipe.clip is None:
            return count
        norm = square() ** 0.5 / count
        return count / min(1.0, self.recipe.clip / (norm + 1e-6))

    def check_loss(self, microbatch: int) -> None:
        """FloatingPointError for a loss that is nan or inf, unless the recipe allows it."""
        mean, count = self.losses[microbatch]
        if not 0 <= count < np.inf:
            raise ValueError(f"the loss is the mean of {count}: give how many it is the mean of")
        if self.recipe.finite and count and not np.isfinite(value := float(mean)):
            batch = microbatch // self.recipe.microbatches
            raise FloatingPointError(
                f"the loss of micro-batch {microbatch} (batch {batch}) is {value}; "
                "to continue anyway: finite=False"
            )

    def snapshot(self) -> None:
        """Keep what the last update did; not part of the update, so that its time is its own."""
        if self.stepped is not None:
            on_host = self.on_host
            self.steps.append(Step(on_host(self.stepped), on_host(self.weights[self.latest])))
            self.stepped = None

    def on_host(self, weights: Any) -> dict[str, Any]:
        """Weights or gradients by name, copied to the host."""
        raise NotImplementedError
