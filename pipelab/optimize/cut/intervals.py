"""The dynamic program over intervals: the best stages, one after another, up to the last cut.

    cuts    0   1   2   3   4        a stage is what lies between two cuts, a and b behind it
    layers    0 | 1   2 | 3          here the stages (0, 1), (1, 3), (3, 4)

The part behind a cut depends only on what is left: stages, devices, or both. So the last stages
come first:

    best(left, a) = least over b > a, and over what the stage takes, of
                    join(cost(taken, rest)[a, b], best(rest, b))

`join` is the larger one in splits, PipeDream's optimizer and the planner's cuts, and the sum, under
a limit of the largest, in Alpa's stages.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

Left = Any  # what the stages from a cut on may use: a number of them, of devices, or a pair
Join = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Interval(NamedTuple):
    """A stage between two cuts, and what it takes of what is left."""

    first: int
    end: int
    taken: Any


class Intervals:
    """The table of the dynamic program, filled row by row: a row for all that may be left.

    cuts     how many there are, the first one in front of everything
    nothing  what is left when all is used up, at the last cut
    join     ([a, b] costs of a stage, [b] best behind it) -> [a, b]

    >>> layers = [1, 2, 3, 4]
    >>> cost = [[sum(layers[a:b]) if b > a else np.inf for b in range(5)] for a in range(5)]
    >>> table = Intervals(cuts=5, nothing=0)
    >>> for stages in (1, 2):
    ...     table.fill(stages, [(1, stages - 1)], lambda taken, rest: cost)
    >>> table.value(2), [stage[:2] for stage in table.stages(2)]
    (6.0, [(0, 3), (3, 4)])
    """

    def __init__(self, cuts: int, nothing: Left, join: Join = np.maximum) -> None:
        self.join = join
        self.values = {nothing: np.full(cuts, np.inf)}  # left -> [a]
        self.values[nothing][-1] = 0.0
        self._moves: dict[Left, list[tuple[Any, Left]]] = {}
        self._best: dict[Left, np.ndarray] = {}  # left -> [a], the number of (move, b)

    def fill(
        self,
        left: Left,
        moves: Iterable[tuple[Any, Left]],
        cost: Callable[[Any, Left], np.ndarray],
    ) -> None:
        """The row of what is left, from rows that are there.

        moves  what a stage may take, and the rest for those behind it
        cost   (taken, rest) -> [a, b], infinite where there is no such stage
        """
        self._moves[left] = moves = list(moves)
        found = [self.join(cost(taken, rest), self.values[rest]) for taken, rest in moves]
        # Every move and every end side by side: one minimum finds both.
        options = np.concatenate(found, axis=1)  # [a, (move, b)]
        self._best[left] = options.argmin(axis=1)
        self.values[left] = options.min(axis=1)

    def value(self, left: Left) -> float:
        return float(self.values[left][0])

    def stages(self, left: Left) -> list[Interval]:
        """The best ones, from the first cut on."""
        found, first = [], 0
        while left in self._best:
            move, end = divmod(int(self._best[left][first]), len(self.values[left]))
            taken, left = self._moves[left][move]
            found.append(Interval(first, end, taken))
            first = end
        return found


def split_intervals(
    cost: Callable[[int], np.ndarray], stages: int, join: Join = np.maximum
) -> tuple[float, list[int]]:
    """The least joined cost of the stages, and the number of layers in each.

    cost  number of a stage -> [a, b] of layers a to b - 1, infinite where there are none
    """
    table = Intervals(len(cost(0)), nothing=0, join=join)
    for left in range(1, stages + 1):
        table.fill(left, [(1, left - 1)], lambda taken, rest: cost(stages - 1 - rest))
    return table.value(stages), [b - a for a, b, _ in table.stages(stages)]
