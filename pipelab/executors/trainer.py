"""What a reference can do, whichever library computes it: each wing has a `Trainer`."""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

Arrays = dict[str, np.ndarray]  # "NAME of stage S" -> float64 or complex128
Losses = list[tuple[float, float]]


class Piece(NamedTuple):
    """What one forward and backward of the reference computes: a batch or a part of it.

    reads  the weight version of every stage
    seeds  the random numbers that every stage's forward draws from; None if they draw none
    first  whether the first replica computes it, whose buffers are those that a run gives back
    """

    x: Any
    y: Any
    reads: Sequence[int]
    seeds: Sequence[int] | None = None
    first: bool = True


class Trainer(Protocol):
    """The model's stages one after another on one device; each wing has one.

    It keeps the weights of every version that is still to be read, and follows the run's.

    eps          from 1 to the next number, in the lowest precision that the run uses
    eps_of_steps the same of the weights: mixed precision leaves the optimizer alone
    computes_in  the name of the precision that it computes in
    start        by stage, what a checkpoint holds that the training goes on from, if it does
    history      [stage][version], its weights
    """

    eps: float
    eps_of_steps: float
    computes_in: str
    start: Sequence[Any] = ()
    history: list[dict[int, Any]]

    def losses(self, pieces: Sequence[Piece], jitter: int = 0) -> Losses:
        """The forwards alone: (mean loss, count) of every piece."""

    def gradients(self, pieces: Sequence[Piece], jitter: int = 0) -> tuple[Losses, Arrays]:
        """The same, with the (clipped) gradient of an update.

        `jitter`, if not 0, seeds random errors of up to an eps in all weights and data.
        """

    def step(self, t: int, gradients: Sequence[dict[str, Any]]) -> Arrays:
        """The weights after the optimizer's step from version t and these gradients, by stage."""

    def accept(self, t: int, weights: Sequence[dict[str, Any]]) -> None:
        """Go on from these weights, by stage, as version t."""

    def forget(self, needed: Sequence[set[int]]) -> None:
        """Drop the versions that are not among the needed ones of their stage."""
        for s, keep in enumerate(needed):
            self.history[s] = {v: w for v, w in self.history[s].items() if v in keep}

    def arrays(self, by_stage: Sequence[Any]) -> Arrays:
        """Gradients or weights of all stages."""

    def state(self) -> tuple[Arrays, Arrays]:
        """The accepted weights, and the buffers that the forwards have left."""

    def saved(self, states: Sequence[Any], weights: Sequence[Any] = ()) -> tuple[Arrays, Arrays]:
        """What a checkpoint of all stages holds, and what it should hold.

        `weights`, if given, are what the run gives back: the buffers should be those. Nothing where
        checkpoints are not supported.
        """
        return {}, {}
