"""Best-bound first: the plan that no other beats, without simulating them all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from heapq import heappop, heappush
from itertools import count, islice

from pipelab.plan.bounds import SLACK, least_bytes, least_seconds
from pipelab.plan.cuts import fitting, smallest
from pipelab.plan.judge import Plan, judge
from pipelab.plan.problem import Choice, Problem


class Search:
    """All choices of a problem with their bounds, and the plans that were simulated so far."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.plans: dict[Choice, Plan] = {}
        self.seconds: dict[Choice, float] = {}
        self.bytes: dict[Choice, float] = {}
        for choice in problem.choices():
            self._bound(choice)
        self.fastest_first = sorted(self.seconds, key=self.seconds.__getitem__)
        self._cuts: dict[tuple[Choice, float], tuple[list[Choice], Iterator[Choice]]] = {}

    def _bound(self, choice: Choice) -> None:
        if choice not in self.seconds:
            costs = self.problem.costs(choice)
            self.seconds[choice] = least_seconds(choice, costs)
            self.bytes[choice] = least_bytes(choice, costs)

    def plan(self, choice: Choice) -> Plan:
        if choice not in self.plans:
            self.plans[choice] = judge(self.problem, choice)
        return self.plans[choice]

    def _cut(self, choice: Choice, memory: float, turn: int) -> Choice | None:
        """The choice with the next of its cuts for a memory, the fastest first by their bound."""
        key = choice._replace(balance=()), memory
        if key not in self._cuts:
            self._cuts[key] = [], fitting(self.problem, *key)
        found, more = self._cuts[key]
        if turn == len(found):
            found.extend(islice(more, 1))
        return found[turn] if turn < len(found) else None

    def best(
        self,
        memory: float,
        allowed: Callable[[Choice], bool] = lambda choice: True,
        *,
        cut_anew: bool = True,
    ) -> Plan | None:
        """The fastest allowed plan that fits; of equally fast ones the one with least memory.

        cut_anew  whether layers are also cut for this memory
        """
        found: list[Plan] = []
        fastest = math.inf
        cut = set()  # choices without their balance that have got cuts of their own
        number = count()  # so that equal bounds are taken in this order
        queue = [(self.seconds[c], next(number), c, -1) for c in self.fastest_first]
        while queue:
            bound, _, choice, turn = heappop(queue)
            # [1] No later choice can be as fast.
            if bound > fastest * SLACK:
                break
            if not allowed(choice):
                continue
            # [2] It may win: simulate it, unless it cannot fit.
            fits = self.bytes[choice] <= memory * SLACK
            if fits and self.plan(choice).step <= fastest * SLACK:
                plan = self.plan(choice)
                fits = plan.memory <= memory
                if fits:
                    found.append(plan)
                    fastest = min(fastest, plan.step)
            # [3] Cut it for this memory, and otherwise if that is still too much.
            uncut = choice._replace(balance=())
            first = uncut not in cut
            cut.add(uncut)
            again = turn >= 0 and not fits
            if cut_anew and (first or again) and (other := self._cut(choice, memory, turn + 1)):
                self._bound(other)
                heappush(queue, (self.seconds[other], next(number), other, turn + 1))
        close = [plan for plan in found if plan.step <= fastest * SLACK]
        return min(close, key=lambda plan: plan.memory, default=None)

    def smallest(self) -> Plan:
        """The plan with least memory."""
        best: Plan | None = None
        for choice in sorted(self.bytes, key=self.bytes.__getitem__):
            if best and self.bytes[choice] > best.memory * SLACK:
                break
            for cut in (choice, smallest(self.problem, choice)):
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
            limit = plan.memory * 0.9
            if not limit:  # nothing needs less
                return
