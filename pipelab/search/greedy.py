"""A list scheduler: whenever a device is free it starts the best of what it can start."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from pipelab.action import Action, Kind
from pipelab.memory import reserved
from pipelab.schedule import Schedule
from pipelab.search.problem import SLACK, Problem


class Rule(NamedTuple):
    """How a device chooses.

    order     kinds, the most urgent first
    deep      of one kind the later stage first
    patience  an action is not started if a more urgent one arrives before this share of it is done
    lead      how many forwards a device may be ahead of its backwards, as a multiple of the devices
              that follow; inf: as its memory allows
    """

    order: tuple[Kind, ...]
    deep: bool
    patience: float
    lead: float


def rules(problem: Problem) -> Iterator[Rule]:
    """All that are tried."""
    backward = Kind.I if problem.split else Kind.B
    orders = [(backward, Kind.F, Kind.W), (Kind.F, backward, Kind.W), (backward, Kind.W, Kind.F)]
    deep = [True, False] if problem.stages > problem.devices else [True]
    orders = orders if problem.split else orders[:2]
    leads = [np.inf, 1.0, 1.5, 2.0] if len(deep) == 1 else [np.inf]
    for choice in itertools.product(leads, orders, deep, [0.0, 0.5, 1.0]):
        lead, order, deeper, patience = choice
        yield Rule(order, deeper, patience, lead)


class Draft:
    """A table in the making: `rows` of (stage, kind), and when each device is free again."""

    def __init__(self, problem: Problem, rule: Rule) -> None:
        self.problem, self.rule = problem, rule
        n, m, kinds = problem.stages, problem.microbatches, len(Kind)
        self.rows: list[list[tuple[int, Kind]]] = [[] for _ in range(problem.devices)]
        self.free = [0.0] * problem.devices
        self.level = [0.0] * problem.devices  # of memory
        self.done = [[0] * n for _ in range(kinds)]  # [kind][stage]: actions so far
        # [kind][stage]: when the input of each micro-batch is there, as far as it is known
        self.ready: list[list[list[float]]] = [[[] for _ in range(n)] for _ in range(kinds)]
        self.ready[Kind.F][0] = [0.0] * m
        self.events = [(0.0, problem.placement[0])]  # when to look at which device
        self.seconds = problem.seconds.tolist()
        change = reserved(problem.change) if problem.split else problem.change
        self.change = change.tolist()
        self.memory = problem.memory * (1 + SLACK)
        self.delay = problem.delay.tolist()
        self.urgency = self._urgencies()
        last = problem.kinds[-1]  # what ends a micro-batch on a stage
        self.last = last
        limits = np.full(problem.devices, float(m))
        if np.isfinite(rule.lead):
            limits = np.ceil(rule.lead * np.arange(problem.devices, 0, -1))
        self.lead = limits.tolist()

    def _urgencies(self) -> list[list[tuple[int, int, Kind]]]:
        """Of each device its stages and kinds, the most urgent first."""
        side = -1 if self.rule.deep else 1
        kinds = [kind for kind in self.rule.order if kind in self.problem.kinds]
        return [
            [(rank, s, kind) for rank, kind in enumerate(kinds) for s in sorted(stages)[::side]]
            for stages in self.problem.stages_of
        ]

    def run(self) -> Schedule:
        """The whole table."""
        while self.events:
            now, device = heappop(self.events)
            if self.free[device] <= now:
                self._go_on(device, now)
        return self.problem.table("greedy", self.rows)

    def _go_on(self, device: int, now: float) -> None:
        """Start the most urgent action, unless it pays to wait for another one."""
        waits = []  # when more urgent ones arrive
        for _, stage, kind in self.urgency[device]:
            k = self.done[kind][stage]
            known = self.ready[kind][stage]
            if k >= len(known) or (kind is Kind.F and not self._has_room(device, stage)):
                continue
            if known[k] > now:
                waits.append(known[k])
                continue
            until = now + self.rule.patience * self.seconds[kind][stage]
            if not waits or min(waits) >= until:
                self._start(device, stage, kind, now)
                return
        if waits:
            heappush(self.events, (min(waits), device))

    def _has_room(self, device: int, stage: int) -> bool:
        """Whether every micro-batch here can still come to its end after this forward.

        One after the other: what it has yet to take has to be free, and at its end it gives back
        what it holds (the banker's algorithm).
        """
        done, stages, change = self.done, self.problem.stages_of[device], self.change
        back = self.problem.kinds[1]
        if done[Kind.F][stage] - done[back][stage] >= self.lead[device]:
            return False
        forwards = {s: done[Kind.F][s] + (s == stage) for s in stages}
        free = self.memory - self.level[device] - change[Kind.F][stage]
        oldest = min(done[self.last][s] for s in stages)
        for k in range(oldest, max(forwards.values())):
            for s in stages:
                if k >= forwards[s]:
                    free -= change[Kind.F][s]
            if free < 0:
                return False
            for s in stages:
                if k >= done[back][s]:
                    free += change[Kind.F][s]
                elif k >= done[self.last][s]:
                    free -= change[Kind.W][s]
        return True

    def _start(self, device: int, stage: int, kind: Kind, now: float) -> None:
        end = now + self.seconds[kind][stage]
        self.rows[device].append((stage, kind))
        self.done[kind][stage] += 1
        self.level[device] += self.change[kind][stage]
        self.free[device] = end
        heappush(self.events, (end, device))
        # What takes its output, and W, which follows I.
        n, back = self.problem.stages, self.problem.kinds[1]
        if kind is Kind.F and stage + 1 < n:
            self._arrives(Kind.F, stage + 1, end + self.delay[stage])
        elif kind is Kind.F:
            self._arrives(back, stage, end)
        elif kind is back:
            if stage:
                self._arrives(back, stage - 1, end + self.delay[stage - 1])
            if back is Kind.I:
                self.ready[Kind.W][stage].append(end)

    def _arrives(self, kind: Kind, stage: int, time: float) -> None:
        self.ready[kind][stage].append(time)
        heappush(self.events, (time, self.problem.placement[stage]))


def fuse(schedule: Schedule) -> Schedule:
    """The same with each W that follows its own I made one action B of them.

    That saves an action's overhead, and delays the gradient by the W.
    """
    rows = []
    for row in schedule.rows:
        kept: list[Action] = []
        for a in row:
            if a.kind is Kind.W and kept[-1] == a._replace(kind=Kind.I):
                kept[-1] = a._replace(kind=Kind.B)
            else:
                kept.append(a)
        rows.append(kept)
    return replace(schedule, rows=rows)
