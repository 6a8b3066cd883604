"""The equations of a loss, clustered into layers (Alpa, section 5).

    equations 0 ................................ E - 1
    layers    |    0    |    1    |    2    |

The layer of equations i to k receives C(i, k) bytes: those that it reads and equations before i
made. Among all cuts into L layers, each with at most (1 + delta) / L of all FLOPs, take those in
which the most that a layer receives is the smallest:

    G(k, r) = min over i of max(G(i - 1, r - 1), C(i, k))      (`pipelab.optimize.cut.intervals`)

There are many of those, since often the same array crosses between any two blocks. Of these, take
the one with the smallest sum of squared FLOPs: the most even one.
"""

from dataclasses import dataclass

import numpy as np
from jax.extend.core import jaxprs_in_params

from pipelab.jax.jaxpr import Graph, Variables, place_of, variables
from pipelab.optimize.cut.intervals import split_intervals
from pipelab.optimize.cut.splits import sums
from pipelab.pipeshard.arrays import PipeshardError, bytes_of
from pipelab.pipeshard.auto.flops import flops
from pipelab.pipeshard.method import Keywords


@dataclass(frozen=True)
class AutoLayers(Keywords):
    """Finds the layers of a loss without marks; existing marks are ignored.

    n      layers
    delta  a layer has at most (1 + delta) times the FLOPs of an equal share

    >>> AutoLayers(8)
    AutoLayers(n=8, delta=0.5)
    """

    n: int
    delta: float = 0.5

    def __post_init__(self) -> None:
        if self.n < 2 or self.delta < 0:
            raise PipeshardError(f"{self}: give n of at least 2, and delta of at least 0")

    def __call__(self, loss: Graph, parameters: Variables, batch: Variables) -> list[int]:
        """The numbers of the equations that begin a layer, except the first.

        Raises PipeshardError if no layers keep to the limit of FLOPs.
        """
        work = np.array([flops(eqn) for eqn in loss.equations])
        if len(work) < self.n:
            raise PipeshardError(
                f"AutoLayers(n={self.n}): the loss has {len(work)} equations: ask for fewer layers"
            )
        # [1] FLOPs between two cuts a and b, and bytes that the equations between them receive;
        #     infinite where there are none.
        shares = sums(work)
        received = np.where(np.isinf(shares), np.inf, receipts(loss, parameters, batch))
        # [2] The smallest maximum that a layer receives, if none has too many FLOPs.
        limit = (1 + self.delta) * work.sum() / self.n * (1 + 1e-9)
        allowed = np.where(shares <= limit, received, np.inf)
        least, _ = split_intervals(lambda layer: allowed, self.n)
        if np.isinf(least):
            raise self._too_uneven(loss, work, shares)
        # [3] Of all cuts whose layers receive no more, the most even.
        squares = np.where(allowed <= least, shares**2, np.inf)
        _, counts = split_intervals(lambda layer: squares, self.n, np.add)
        return np.cumsum(counts[:-1]).tolist()

    def _too_uneven(self, loss: Graph, work: np.ndarray, shares: np.ndarray) -> PipeshardError:
        # How far the largest layer of the most even cut exceeds an equal share.
        most, _ = split_intervals(lambda layer: shares, self.n)
        needed = most * self.n / work.sum() - 1
        largest = loss.equations[work.argmax()]
        share = work.max() / work.sum()
        remedy = (
            f"; the most even layers need delta={np.ceil(needed * 100) / 100:g}, or ask for fewer "
            "layers"
        )
        if list(jaxprs_in_params(largest.params)):
            remedy = (
                " and is one equation, which cannot be cut: make it "
                f"{max(2, np.ceil(share * self.n)):g} or more, one after another (a scan over some "
                "of the layers, then one over the next; a checkpoint around each layer, not "
                "around the model)"
            )
        return PipeshardError(
            f"AutoLayers(n={self.n}, delta={self.delta}): no cut into {self.n} layers keeps each "
            f"to {1 + self.delta:g} times an equal share of the FLOPs. {largest.primitive.name} "
            f"({place_of(largest)}) alone has {share:.0%} of all{remedy}"
        )


def receipts(loss: Graph, parameters: Variables, batch: Variables) -> np.ndarray:
    """C: per pair of cuts (a, b), bytes made before a and read by the equations between a and b.

    Values that do not depend on both the parameters and the batch are not counted: the cut computes
    them wherever they are needed.

        x made by equation 2, read by 4 and 7:  received between a and b for  2 < a <= 4 < b
                                                                         and  4 < a <= 7 < b
    """
    crossing = loss.depending(parameters) & loss.depending(batch)
    count = len(loss.equations) + 1
    begun = np.zeros((count, count))  # a, b: bytes that b - 1 reads and none of a to b - 2 does
    last: dict[object, int] = {}  # the last equation so far that made or read a variable
    for k, eqn in enumerate(loss.equations):
        for v in dict.fromkeys(variables(eqn.invars)):
            if v in last and v in crossing:
                begun[last[v] + 1 : k + 1, k + 1] += bytes_of(v)
                last[v] = k
        last.update(dict.fromkeys(eqn.outvars, k))
    return begun.cumsum(axis=1)
