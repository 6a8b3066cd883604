"""Best-bound first: the plan that no other beats, without simulating them all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from heapq import heappop, heappush
from itertools import count

from pipelab.optimize.plan.choices import Choice, Problem
from pipelab.optimize.plan.cuts import fastest_cut, smallest
from pipelab.optimize.plan.judged import Plan, estimate
from pipelab.optimize.plan.limits import SLACK, least_bytes, least_seconds

Allowed = Callable[[Choice], bool]


class Enumeration:
    """All choices of a problem with their bounds, and the plans that were simulated so far."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.plans: dict[Choice, Plan] = {}
        self.seconds: dict[Choice, float] = {}
        self.bytes: dict[Choice, float] = {}
        for choice in problem.choices():
            self._bound(choice)
        self.fastest_first = sorted(self.seconds, key=self.seconds.__getitem__)
        self.fastest = cache(partial(fastest_cut, problem))
        self.smallest_cut = cache(partial(smallest, problem))

    def _bound(self, choice: Choice) -> None:
        sizes = self.problem.of_stages(choice)
        self.seconds[choice] = least_seconds(choice, sizes)
        self.bytes[choice] = least_bytes(choice, sizes)

    def plan(self, choice: Choice) -> Plan:
        if choice not in self.plans:
            self.plans[choice] = estimate(self.problem, choice)
        return self.plans[choice]

    def best(
        self,
        memory: float,
        allowed: Allowed = lambda choice: True,
        *,
        cut_anew: bool = True,
    ) -> Plan | None:
        """The fastest allowed plan that fits; of equally fast ones the one with least memory.

        cut_anew  whether layers are also cut for this memory
        """
        found: list[Plan] = []
        fastest = math.inf
        tried: set[Choice] = set()  # their layers were cut; without a balance: those to cut
        number = count()  # so that equal bounds are taken in this order
        queue = [(self.seconds[choice], next(number), choice) for choice in self.fastest_first]
        while queue:
            bound, _, choice = heappop(queue)
            # [1] No later choice can be as fast.
            if bound > fastest * SLACK:
                break
            if not allowed(choice):
                continue
            # [2] It may win: simulate it, unless it cannot fit.
            room = memory
            if self.bytes[choice] <= memory * SLACK and self.plan(choice).step <= fastest * SLACK:
                plan = self.plan(choice)
                if plan.memory <= memory:
                    found.append(plan)
                    fastest = min(fastest, plan.step)
                else:  # inputs that wait in buffers are too much
                    room = self.bytes[choice] - (plan.memory - memory)
            # [3] Cut its layers for this memory, or for less, if that is still too much.
            if not cut_anew:
                continue
            uncut = choice._replace(balance=())
            others = []
            if uncut not in tried:
                others = [self.fastest(uncut, memory)]
            elif choice in tried and room < memory:
                others = [self.fastest(uncut, room), self.smallest_cut(uncut)]
            tried.add(uncut)
            for other in others:
                if other and other not in tried:
                    tried.add(other)
                    self._bound(other)
                    heappush(queue, (self.seconds[other], next(number), other))
                    break
        close = [plan for plan in found if plan.step <= fastest * SLACK]
        return min(close, key=lambda plan: plan.memory, default=None)

    def smallest(self) -> Plan:
        """The plan with least memory."""
        best: Plan | None = None
        for choice in sorted(self.bytes, key=self.bytes.__getitem__):
            if best and self.bytes[choice] > best.memory * SLACK:
                break
            for cut in (choice, self.smallest_cut(choice._replace(balance=()))):
                plan = self.plan(cut)
                if not best or plan.memory < best.memory:
                    best = plan
        assert best
        return best

    def frontier(self) -> Iterator[Plan]:
        """The best plans for less and less memory: each limit is 0.9 of what the last one needs.

        Of layers that are cut once and for all: to cut them for every limit takes a minute.
        """
        limit = math.inf
        while plan := self.best(limit, cut_anew=False):
            yield plan
            # Below what the last one needs: the next one has to be another.
            limit = plan.memory * 0.9
            if not limit:  # nothing needs less
                return
