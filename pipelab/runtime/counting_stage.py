"""A stage and what is counted of it, the same in both wings; they compute the gradients."""

from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import Any

import numpy as np

from pipelab.runtime.stage import Feed, Recipe, Stage, Step
from pipelab.table.action import Kind


class CountingStage(Stage):
    """A stage and what is counted of it; the wings' stages do the computing.

    weights  by version: values, so that a version lives as long as the table has readers of it
    """

    def __init__(self, device: Any, recipe: Recipe, *, first: bool, last: bool) -> None:
        self.device, self.recipe = device, recipe
        self.feed = Feed.empty(first=first, last=last)
        self.weights: dict[int, Any] = {}
        self.losses = {}
        self.steps: list[Step] = []
        self.unsplit: dict[str, str] = {}
        self.stepped: Any = None  # gradients of an update that `steps` does not have yet
        self.readers: Counter[int] = Counter()  # version -> backwards to come
        self.counts: dict[int, float] = {}  # group -> what its losses counted, in its unit
        self._backwards_left: Counter[int] = Counter()
        self._kept: dict[int, Any] = {}  # by micro-batch, what its forward left for its backward
        self._split: dict[int, tuple[Any, Any, float]] = {}  # the same between I and W

    def begin(self, feed: Feed | None, *, training: bool, keep: bool) -> None:
        self.recipe = replace(self.recipe, training=training, keep=keep)
        if feed:
            self.feed = self.feed.with_more(feed)
            if training:
                self.readers.update(feed.versions.values())
                self._backwards_left.update(feed.groups.values())

    def end(self) -> None:
        if not self.recipe.training:  # no update drops them
            for k in [*self.feed.versions]:
                self.feed.drop(k)
        # Its update may still have to look at a loss.
        self.losses = {k: loss for k, loss in self.losses.items() if k in self.feed.groups}
        self.steps = []

    def recomputes(self, microbatch: int) -> bool:
        return self.recipe.recompute[microbatch % self.recipe.microbatches]

    # ---- backwards: the same three in both wings, but for how gradients are computed

    def backward(self, microbatch: int, received: Any) -> Any:
        """Accumulate the weights' gradients; returns the input's."""
        kept, gradient, count = self._prepare(microbatch, received)
        gradient = self._pull(microbatch, kept, gradient, count, Kind.B)
        self.finish(microbatch, count)
        # The count goes along, to stages that never see the loss.
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
        """The values the forward kept, the gradient of its output, and what the loss counted."""
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
        return len(self.weights)

    def key(self, microbatch: int) -> Hashable:
        """The ledger's key of what a forward keeps."""
        return id(self), microbatch

    def complete(self, group: int) -> bool:
        return not self._backwards_left[group]

    def finish(self, microbatch: int, count: float) -> Any:
        """A micro-batch is through. Returns the weight version that nobody reads again, or None."""
        self.device.ledger.drop(self.key(microbatch))
        # Two counts end here: of the group, and of who still reads the version.
        group, version = self.feed.groups[microbatch], self.feed.versions[microbatch]
        self.counts[group] = self.counts.get(group, 0.0) + count
        self._backwards_left[group] -= 1
        self.readers[version] -= 1
        return None if self.needed(version) else self.weights.pop(version)

    def needed(self, version: int) -> bool:
        """Whether a weight version is the latest, from which updates start, or still to be read."""
        return version == self.latest or self.read_later(version)

    def read_later(self, version: int) -> bool:
        if self.readers[version]:
            return True
        self.readers.pop(version, None)
        return version in self.feed.later

    def end_group(self, group: int) -> None:
        """Its update is made: its micro-batches are not needed any more."""
        self._backwards_left.pop(group, None)
        for k in [k for k, of in self.feed.groups.items() if of == group]:
            self.feed.drop(k)

    def divisor(self, group: int, square: Callable[[], float]) -> float:
        """The divisor of the group's summed gradient: its count, and what clips its norm.

        `square` gives the squared norm of the sum; the formula is torch's clip_grad_norm_.
        """
        # Where all is masked the sum is zero, and stays so.
        count = self.counts.pop(group, 0.0) or 1.0
        if self.recipe.clip is None:
            return count
        # Gradients are sums; the norm is of their mean.
        norm = square() ** 0.5 / count
        return count / float(np.minimum(1.0, self.recipe.clip / (norm + 1e-6)))  # nan stays nan

    def check_loss(self, microbatch: int) -> None:
        """FloatingPointError for a loss that is nan or inf, unless the recipe allows it."""
        mean, count = self.losses[microbatch]
        if not 0 <= count < np.inf:
            raise ValueError(f"the loss is the mean of {count}: give how many it is the mean of")
        # A micro-batch that counts nothing may have any mean: it weighs nothing.
        if (
            self.recipe.finite
            and self.recipe.training
            and count
            and not np.isfinite(value := float(mean))
        ):
            batch = microbatch // self.recipe.microbatches
            raise FloatingPointError(
                f"the loss of micro-batch {microbatch} (batch {batch}) is {value}; "
                "to continue anyway: finite=False"
            )

    def snapshot(self) -> None:
        if self.stepped is not None:
            on_host = self.on_host
            self.steps.append(Step(on_host(self.stepped), on_host(self.weights[self.latest])))
            self.stepped = None

    def on_host(self, weights: Any) -> dict[str, Any]:
        """Weights or gradients by name, copied to the host."""
        raise NotImplementedError
