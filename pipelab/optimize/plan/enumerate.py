"""Best bound first: the best choice, without simulating all."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial
from heapq import heapify, heappop, heappush
from itertools import count

import numpy as np

from pipelab.optimize.bounds import bound
from pipelab.optimize.plan.choice_costs import costs_of, sizes_of, sizes_of_stages
from pipelab.optimize.plan.choices import MADE, Problem, TrainingChoice
from pipelab.optimize.plan.cuts import fastest_cut, smallest_cut
from pipelab.optimize.plan.estimates import Estimate, estimate
from pipelab.optimize.plan.limits import (
    SLACK,
    fitting,
    least_bytes,
    least_of_any_cut,
    least_seconds,
)
from pipelab.predict.costs import Recompute
from pipelab.show.bar import Bar

QUARTER = 0.25  # of a micro-batch: limits of memory are multiples of it
Allowed = Callable[[TrainingChoice], bool]


class Enumeration:
    """All choices of a problem with their bounds, and the simulated ones so far.

    least      per choice, seconds and bytes that no cut of its layers can beat
    seconds    bounds for a choice's own cut, once its turn has come
    bytes      likewise
    estimates  of the simulated choices
    """

    def __init__(self, problem: Problem, bar: Bar | None = None) -> None:
        self.problem, self.bar = problem, bar or Bar("plan", shown=False)
        self.estimates: dict[TrainingChoice, Estimate] = {}
        self.least: dict[TrainingChoice, tuple[float, float]] = {}
        self.seconds: dict[TrainingChoice, float] = {}
        self.bytes: dict[TrainingChoice, float] = {}
        self.bar.phase("listing choices")  # the caller begins the searches' phases
        whole = cache(self._whole)
        for choice in problem.choices():
            alike = choice._replace(schedule="", virtual=1, recompute=Recompute.NEVER, balance=())
            self.least[choice] = least_of_any_cut(choice, whole(alike))
            if len(self.least) % 500 == 0:
                self._show()
        self.bar.step()
        self.fastest_cut = cache(partial(fastest_cut, problem))
        self.smallest_cut = cache(partial(smallest_cut, problem))

    def _whole(self, choice: TrainingChoice) -> dict[str, float]:
        """`Problem.sizes` of all layers in one stage."""
        sizes = sizes_of(self.problem, choice, np.array([0]), np.array([self.problem.layers]))
        return {name: float(np.ravel(size)[0]) for name, size in sizes.items()}

    def _add(self, new: TrainingChoice, alike: TrainingChoice) -> None:
        """Add a choice, with the bound of one that differs only in its cut or memory."""
        self.least.setdefault(new, self.least[alike])
        if new not in self.seconds:
            self._bound(new)

    def _bound(self, choice: TrainingChoice) -> None:
        sizes = sizes_of_stages(self.problem, choice)
        self.seconds[choice] = least_seconds(choice, sizes)
        self.bytes[choice] = least_bytes(choice, sizes)
        if self.is_limited(choice):
            costs, p = costs_of(self.problem, choice), choice.pipeline
            limit = p if choice.room is None else choice.room
            least = bound(costs, p, choice.microbatches, limit, placement=choice.home)
            self.seconds[choice] = max(self.seconds[choice], least.makespan + costs.overhead)

    @staticmethod
    def is_limited(choice: TrainingChoice) -> bool:
        """Whether its table is searched for within a memory limit."""
        return choice.schedule in MADE and choice.recompute is Recompute.NEVER

    def _within(self, choice: TrainingChoice, memory: float, excess: float) -> TrainingChoice:
        """The choice, with a searched table limited to what fits into `memory` bytes, or to less if
        it needed `excess` bytes more."""
        if not self.is_limited(choice):
            return choice
        fit, each = fitting(choice, sizes_of_stages(self.problem, choice), memory)
        less = now = choice.room or choice.pipeline
        if excess:
            less = now - max(excess / each if each else 0.0, QUARTER)
        fit = max(min(fit, less) * SLACK // QUARTER * QUARTER, 1.0)
        return choice._replace(room=fit) if fit < now else choice

    def estimate(self, choice: TrainingChoice) -> Estimate:
        """Simulate it, once."""
        if choice not in self.estimates:
            self.estimates[choice] = estimate(self.problem, choice)
            self._show()
        return self.estimates[choice]

    def _show(self) -> None:
        self.bar.text = f"{len(self.least):,} choices, {len(self.estimates)} simulated"
        self.bar.step(0)

    def best(self, memory: float, allowed: Allowed = lambda choice: True) -> Estimate | None:
        """The fastest allowed choice that fits; among equals, the one with the least memory."""
        fitting: list[Estimate] = []
        fastest = math.inf  # seconds
        cuts: dict[TrainingChoice, list[TrainingChoice]] = {}  # new ones, by choice without balance
        order = count()  # of equal bounds, first in, first out
        queue = [
            (self.seconds.get(choice, seconds), next(order), choice)
            for choice, (seconds, size) in self.least.items()
            if size <= memory * SLACK and allowed(choice)
        ]
        heapify(queue)
        while queue:
            bound, number, choice = heappop(queue)
            # [1] No later choice can be as fast.
            if bound > fastest * SLACK:
                break
            # [2] Bound its own cut, and queue it again by that bound.
            if choice not in self.seconds:
                self._bound(choice)
                heappush(queue, (max(self.seconds[choice], bound), number, choice))
                continue
            # [3] It may win: simulate it, unless it cannot fit.
            excess, made = 0.0, self._within(choice, memory, 0.0)
            if self.bytes[choice] <= memory * SLACK and made == choice:
                found = self.estimate(choice)
                if found.step <= fastest * SLACK and found.memory <= memory:
                    fitting.append(found)
                    fastest = min(fastest, found.step)
                elif found.step <= fastest * SLACK:  # inputs that wait in buffers do not fit
                    excess = found.memory - memory
                    made = self._within(choice, memory, excess)
            # [4] Queue the choice for less memory, and the one with its layers cut anew.
            news = [made] if made != choice else []
            if not choice.room and (new := self._cut_anew(choice, memory, excess, cuts)):
                news.append(new)
            for new in filter(allowed, news):
                self._add(new, choice)
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
        """The choice with another cut of its layers, if one is worth a try: a cut for this memory,
        or, if such a cut needed `excess` bytes more, for that much less."""
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
                self._add(new, choice)
                return new
        return None

    def smallest(self) -> Estimate:
        """The choice that needs the least memory."""
        best: Estimate | None = None
        order = count()
        queue = [(size, next(order), choice) for choice, (_, size) in self.least.items()]
        heapify(queue)
        while queue:
            bound, number, choice = heappop(queue)
            if best and bound > best.memory * SLACK:
                break
            if choice not in self.bytes:
                self._bound(choice)
                heappush(queue, (max(self.bytes[choice], bound), number, choice))
                continue
            for cut in (choice, self.smallest_cut(choice._replace(balance=()))):
                if self.is_limited(cut):
                    cut = cut._replace(room=1.0)
                found = self.estimate(cut)
                if not best or found.memory < best.memory:
                    best = found
        assert best
        return best
