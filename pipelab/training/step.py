"""A batch in training, whose results are read when they are known."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from pipelab.runtime.result import Run
from pipelab.runtime.verdict.check import Check


class Result(NamedTuple):
    """What is known about a batch once its update is made: see `TrainedBatch`."""

    loss: float
    seconds: float
    run: Run | None
    counted: float
    norm: float
    rates: Sequence[float]


class TrainedBatch:
    """A batch that training has begun with. Whoever reads its results waits until they are known.

    number   of batches up to and including it, from the beginning of the training; never waits
    run      of a checked batch, which has the pipeline alone: its timeline and memory, without
             weights; else None; never waits
    check    that run's: whether it equals one device's training, with its seconds
    known    whether all of the following is known, so that reading it does not wait
    loss     the mean over the whole batch; `counted`: over how many samples, or tokens if the loss
             tells them
    seconds  since the batch before, or since it was read if that was later; of a batch that has the
             pipeline alone, its timeline's
    norm     of the whole gradient of its last update, before clipping
    rates    the learning rates of that update: see `Run`
    """

    def __init__(self, number: int, wait: Callable[[int], None]) -> None:
        """`wait` makes the results known, or raises RunError."""
        self.number = number
        self._wait = wait
        self._result: Result | None = None

    def end(self, result: Result) -> None:
        """Make its results known."""
        self._result = result

    @property
    def known(self) -> bool:
        return self._result is not None

    @property
    def loss(self) -> float:
        return self._known().loss

    @property
    def counted(self) -> float:
        return self._known().counted

    @property
    def seconds(self) -> float:
        return self._known().seconds

    @property
    def run(self) -> Run | None:
        return self._result.run if self._result else None  # what is checked is known at once

    @property
    def check(self) -> Check | None:
        return self.run.check if self.run else None

    @property
    def norm(self) -> float:
        return self._known().norm

    @property
    def rates(self) -> Sequence[float]:
        return self._known().rates

    def _known(self) -> Result:
        if self._result is None:
            self._wait(self.number)
        assert self._result is not None
        return self._result

    def __str__(self) -> str:
        ends = sorted({*self.rates})[:: max(len({*self.rates}) - 1, 1)]  # the least and the most
        rates = " to ".join(f"{rate:.1e}" for rate in ends) or "not told"
        told = f"step {self.number}: loss {self.loss:.3f}, norm {self.norm:.2f}, rate {rates}"
        return f"{told}. {self.check}" if self.check else told
