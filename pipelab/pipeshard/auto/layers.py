"""The equations of a loss, clustered into layers (Alpa, section 5).

    equations 0 ................................ E - 1
    layers    |    0    |    1    |    2    |

A layer C(i, k), equations i to k, receives what equations before i made and it reads. Of all ways
to make L layers with FLOPs of at most (1 + delta) / L of the whole, those are taken whose largest
layer's receipts are the smallest:

    G(k, r) = min over i of max(G(i - 1, r - 1), C(i, k))

There are many of those, since all that is received is often the same array between any two blocks.
Of them the one with the smallest sum of squared FLOPs is taken: the most even one.
"""

from dataclasses import dataclass

import numpy as np

from pipelab.executors.jax.graph import Graph, Variables, place_of, variables
from pipelab.pipeshard.auto.flops import flops
from pipelab.pipeshard.graph import PipeshardError, bytes_of


@dataclass(frozen=True)
class AutoLayers:
    """Finds the layers of a loss that marks none; marks that it has are ignored.

    n      layers
    delta  a layer has at most (1 + delta) times the FLOPs of an equal share

    >>> AutoLayers(8)
    AutoLayers(n=8, delta=0.5)
    """

    n: int
    delta: float = 0.5

    def __post_init__(self) -> None:
        if not isinstance(self.n, int) or isinstance(self.n, bool) or self.n < 2:
            raise PipeshardError(f"AutoLayers(n={self.n!r}): give a whole number of at least 2")
        if not 0 <= self.delta < np.inf:
            raise PipeshardError(f"AutoLayers(delta={self.delta!r}): give a number of at least 0")

    def __call__(self, loss: Graph, parameters: Variables, batch: Variables) -> list[int]:
        """The numbers of the equations that begin a layer, but the first.

        Raises PipeshardError where no such layers have so few FLOPs each.
        """
        work = np.array([flops(eqn) for eqn in loss.equations])
        if len(work) < self.n:
            raise PipeshardError(
                f"AutoLayers(n={self.n}): the loss has {len(work)} equations: ask for fewer layers"
            )
        # [1] FLOPs of the equations i to k, and what these receive; infinite where k < i.
        ends = np.cumsum([0.0, *work])
        shares = np.where(np.tri(len(work), k=-1), np.inf, ends[1:] - ends[:-1, None])
        received = np.where(np.isinf(shares), np.inf, receipts(loss, parameters, batch))
        # [2] The least that the largest layer receives, without layers of too many FLOPs.
        limit = (1 + self.delta) * ends[-1] / self.n * (1 + 1e-9)
        allowed = np.where(shares <= limit, received, np.inf)
        least = _best(allowed, self.n, np.maximum)[-1][-1]
        if np.isinf(least):
            self._explain(loss, work, shares)
        # [3] Of all that receive no more, the most even.
        squares = np.where(allowed <= least, shares**2, np.inf)
        return _starts(squares, _best(squares, self.n, np.add))

    def _explain(self, loss: Graph, work: np.ndarray, shares: np.ndarray) -> None:
        # The largest layer of the most even ones, in units of an equal share.
        needed = _best(shares, self.n, np.maximum)[-1][-1] * self.n / work.sum() - 1
        largest = loss.equations[work.argmax()]
        raise PipeshardError(
            f"AutoLayers(n={self.n}, delta={self.delta}): no {self.n} layers have FLOPs of at most "
            f"{1 + self.delta:g} times an equal share. {largest.primitive.name} "
            f"({place_of(largest)}) alone has {work.max() / work.sum():.0%} of all; the most even "
            f"layers need delta={np.ceil(needed * 100) / 100:g}, or ask for fewer layers"
        )


def receipts(loss: Graph, parameters: Variables, batch: Variables) -> np.ndarray:
    """C: per (i, k), bytes that equations i to k read and that equations before i made.

    What does not depend on both the parameters and the batch is not counted: the cut computes it
    wherever it is needed.

        x made by equation 2, read by 4 and 7:  received by i..k for  2 < i <= 4 <= k
                                                                 and  4 < i <= 7 <= k
    """
    crossing = loss.depending(parameters) & loss.depending(batch)
    begun = np.zeros((len(loss.equations),) * 2)  # i, k: bytes that i..k reads but i..k-1 does not
    last: dict[object, int] = {}  # the last equation so far that made or read a variable
    for k, eqn in enumerate(loss.equations):
        for v in dict.fromkeys(variables(eqn.invars)):
            if v in last and v in crossing:
                begun[last[v] + 1 : k + 1, k] += bytes_of(v)
                last[v] = k
        last.update(dict.fromkeys(eqn.outvars, k))
    return begun.cumsum(axis=1)


def _best(cost: np.ndarray, layers: int, join: np.ufunc) -> list[np.ndarray]:
    """Per number of layers r and last equation k, the least cost of r layers of equations 0 to k.

    cost  per (i, k) of one layer of equations i to k; infinite where there is none
    join  what the costs of layers add up to: their sum or their largest
    """
    found = [cost[0]]
    for _ in range(1, layers):
        before = np.concatenate([[np.inf], found[-1][:-1]])  # of equations 0 to i - 1
        found.append(join(before[:, None], cost).min(axis=0))
    return found


def _starts(cost: np.ndarray, found: list[np.ndarray]) -> list[int]:
    """Where the layers after the first begin, from the last to the first: of the least sum."""
    starts = []
    end = len(cost)
    for before in reversed(found[:-1]):
        sums = np.concatenate([[np.inf], before[: end - 1]]) + cost[:end, end - 1]
        end = int(sums.argmin())
        starts.append(end)
    return starts[::-1]
