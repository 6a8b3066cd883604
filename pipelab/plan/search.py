"""Best-bound first: the plan that no other beats, without simulating them all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from pipelab.plan.bounds import least_bytes, least_seconds
from pipelab.plan.judge import Plan, judge
from pipelab.plan.problem import Choice, Problem

SLACK = 1 + 1e-9  # bounds and simulations add up the same numbers in another order


class Search:
    """All choices of a problem with their bounds, and the plans that were simulated so far."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.plans: dict[Choice, Plan] = {}
        costs = {choice: problem.costs(choice) for choice in problem.choices()}
        self.seconds = {choice: least_seconds(choice, costs[choice]) for choice in costs}
        self.bytes = {choice: least_bytes(choice, costs[choice]) for choice in costs}
        self.fastest_first = sorted(self.seconds, key=self.seconds.__getitem__)

    def plan(self, choice: Choice) -> Plan:
        if choice not in self.plans:
            self.plans[choice] = judge(self.problem, choice)
        return self.plans[choice]

    def best(
        self, memory: float, allowed: Callable[[Choice], bool] = lambda choice: True
    ) -> Plan | None:
        """The fastest allowed plan that fits; of equally fast ones the one with least memory."""
        best = None
        for choice in self.fastest_first:
            # [1] No later choice can be as fast.
            if best and self.seconds[choice] > best.step * SLACK:
                break
            # [2] This one cannot fit, or is not asked for.
            if self.bytes[choice] > memory * SLACK or not allowed(choice):
                continue
            # [3] It may win: simulate it.
            plan = self.plan(choice)
            if best and (plan.step > best.step or _ties(plan, best)):
                continue
            if plan.memory <= memory:
                best = plan
        return best

    def smallest(self) -> Plan:
        """The plan with least memory."""
        best: Plan | None = None
        for choice in sorted(self.bytes, key=self.bytes.__getitem__):
            if best and self.bytes[choice] > best.memory * SLACK:
                break
            plan = self.plan(choice)
            if not best or plan.memory < best.memory:
                best = plan
        assert best
        return best

    def frontier(self, step: float = 0.9) -> Iterator[Plan]:
        """The best plans for less and less memory: each limit is `step` of the last one's need."""
        limit = math.inf
        while plan := self.best(limit):
            yield plan
            limit = plan.memory * step
            if not limit:  # nothing needs less
                return


def _ties(plan: Plan, best: Plan) -> bool:
    """Whether it is exactly as fast and needs no less memory."""
    return plan.step == best.step and plan.memory >= best.memory
