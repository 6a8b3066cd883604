"""Best-bound first: the choice that no other beats, without simulating them all."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from heapq import heappop, heappush
from itertools import count

from pipelab.optimize.plan.choices import Problem, TrainingChoice
from pipelab.optimize.plan.cuts import fastest_cut, smallest_cut
from pipelab.optimize.plan.estimates import Estimate, estimate
from pipelab.optimize.plan.limits import SLACK, least_bytes, least_seconds

Allowed = Callable[[TrainingChoice], bool]


class Enumeration:
    """All choices of a problem with their bounds, and those that were simulated so far."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.estimates: dict[TrainingChoice, Estimate] = {}
        self.seconds: dict[TrainingChoice, float] = {}
        self.bytes: dict[TrainingChoice, float] = {}
        for choice in problem.choices():
            self._bound(choice)
        self.fastest_first = sorted(self.seconds, key=self.seconds.__getitem__)
        self.fastest_cut = cache(partial(fastest_cut, problem))
        self.smallest_cut = cache(partial(smallest_cut, problem))

    def _bound(self, choice: TrainingChoice) -> None:
        sizes = self.problem.of_stages(choice)
        self.seconds[choice] = least_seconds(choice, sizes)
        self.bytes[choice] = least_bytes(choice, sizes)

    def estimate(self, choice: TrainingChoice) -> Estimate:
        """Simulate it, once."""
        if choice not in self.estimates:
            self.estimates[choice] = estimate(self.problem, choice)
        return self.estimates[choice]

    def best(self, memory: float, allowed: Allowed = lambda choice: True) -> Estimate | None:
        """The fastest allowed choice that fits; of equally fast ones that with least memory."""
        fitting: list[Estimate] = []
        fastest = math.inf  # seconds
        cuts: dict[TrainingChoice, list[TrainingChoice]] = {}  # new ones, by choice without balance
        order = count()  # of equal bounds the first to come is the first to go
        queue = [(self.seconds[choice], next(order), choice) for choice in self.fastest_first]
        while queue:
            bound, _, choice = heappop(queue)
            # [1] No later choice can be as fast.
            if bound > fastest * SLACK:
                break
            if not allowed(choice):
                continue
            # [2] It may win: simulate it, unless it cannot fit.
            excess = 0.0
            if self.bytes[choice] <= memory * SLACK:
                found = self.estimate(choice)
                if found.step <= fastest * SLACK and found.memory <= memory:
                    fitting.append(found)
                    fastest = min(fastest, found.step)
                elif found.step <= fastest * SLACK:  # inputs that wait in buffers are too much
                    excess = found.memory - memory
            # [3] Cut its layers anew: the new choice waits for its turn like any other.
            if new := self._cut_anew(choice, memory, excess, cuts):
                heappush(queue, (self.seconds[new], next(order), new))
        close = [found for found in fitting if found.step <= fastest * SLACK]
        return min(close, key=lambda found: found.memory, default=None)

    def _cut_anew(
        self,
        choice: TrainingChoice,
        memory: float,
        excess: float,
        cuts: dict[TrainingChoice, list[TrainingChoice]],
    ) -> TrainingChoice | None:
        """The choice with another cut of its layers, if one is worth a try: for this memory, and
        where such a cut needs `excess` bytes more than that, for as much less."""
        family = choice._replace(balance=())
        tries: list[TrainingChoice | None] = []
        if family not in cuts:
            tries = [self.fastest_cut(family, memory)]
        elif excess and choice in cuts[family]:
            room = self.bytes[choice] - excess
            tries = [self.fastest_cut(family, room), self.smallest_cut(family)]
        known = cuts.setdefault(family, [])
        for new in tries:
            if new and new not in known:
                known.append(new)
                self._bound(new)
                return new
        return None

    def smallest(self) -> Estimate:
        """The choice that needs least memory."""
        best: Estimate | None = None
        for choice in sorted(self.bytes, key=self.bytes.__getitem__):
            if best and self.bytes[choice] > best.memory * SLACK:
                break
            for cut in (choice, self.smallest_cut(choice._replace(balance=()))):
                found = self.estimate(cut)
                if not best or found.memory < best.memory:
                    best = found
        assert best
        return best
