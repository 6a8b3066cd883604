"""ZB-1p, ZB-2p and between (Qi et al. 2023, arXiv 2401.10241, section 3.1): the authors' heuristic.

0F0 0F1 0F2 0F3 .   0I0 0W0 0F4 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0U0 .       p = 3, m = 5, 4 fit:
.   1F0 1F1 1F2 1I0 1F3 1I1 1W0 1F4 1I2 1I3 1W1 1W2 1I4 1W3 1W4 1U0 .       between ZB-H1 (3) and
.   .   2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2W0 2F4 2I4 2W1 2W2 2W3 2W4 2U0     ZB-H2 (5)
"""

from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from pipelab.action import Kind, ScheduleError, check_counts
from pipelab.costs import Costs, Recompute
from pipelab.memory import shares
from pipelab.placement import loop_placement
from pipelab.schedule import Schedule, one_stage_each
from pipelab.schedules._fastest import TINY, fastest
from pipelab.schedules.eager_1f1b import eager_1f1b
from pipelab.schedules.gpipe import gpipe
from pipelab.schedules.inter_layer import inter_layer
from pipelab.schedules.pipedream_flush import pipedream_flush
from pipelab.schedules.zb_h1 import zb_h1
from pipelab.schedules.zb_h2 import zb_h2
from pipelab.simulate import compute_seconds
from pipelab.transform import repeat

FIXED = (zb_h1, zb_h2, pipedream_flush, eager_1f1b, gpipe, inter_layer)  # one stage a device


def zb(
    devices: int,
    microbatches: int,
    batches: int = 1,
    costs: Costs | None = None,
    memory: float | None = None,
) -> Schedule:
    """A table for these costs and this memory: of several the one whose longest span is shortest.

    costs   of its stages, in seconds; from activations and weight_activations (bytes) the share of
            an activation that is kept from I to W. All of it where there are no bytes
    memory  how many micro-batches' activations fit on a device. p unless given (ZB-1p); 2 p is
            ZB-2p; fractions count, since W keeps less than I

    They are the heuristic's eight, which makes three choices one way or the other, and the fixed
    orders that fit: it is never slower than one of these, whose backwards may be whole.
    ScheduleError for a memory that holds no micro-batch.

    >>> zb(4, 8).peak_in_flight
    [4, 4, 4, 4]
    """
    check_counts(devices=devices, microbatches=microbatches, batches=batches)
    costs = costs or Costs()
    limit = devices if memory is None else memory
    task = _task(devices, microbatches, costs, limit)

    drafts = (_Draft(task, Choices(*each)).build() for each in product((False, True), repeat=3))
    tables = [one_stage_each("zb", rows.__getitem__, devices, microbatches, 1) for rows in drafts]
    best = fastest(tables + [order(devices, microbatches) for order in FIXED], costs, limit)
    assert best, "the heuristic keeps within the memory"
    return replace(repeat(best, batches), name="zb")


class Choices(NamedTuple):
    """The choices that the heuristic leaves open."""

    first_gradient_waits: bool  # a forward of the warm-up may end after the first I could start
    gradients_first: bool  # a stage that is two forwards ahead lets a turn pass
    every_gap: bool  # W also where it is longer than the gap, and no stage has waited less


class _Task(NamedTuple):
    """What a table is built for; lists by stage."""

    microbatches: int
    seconds: list[list[float]]  # [kind][stage]
    link: list[float]  # seconds from stage s to s + 1, and back
    memory: list[float]  # micro-batches that fit
    for_weights: list[float]  # of a micro-batch's share of memory, what is kept from I to W


def _task(devices: int, microbatches: int, costs: Costs, memory: float) -> _Task:
    home = loop_placement(devices)
    recomputed = costs.recompute is not Recompute.NEVER
    seconds = compute_seconds(costs, home, recomputed) + costs.overhead
    share = shares(costs, home, "weight_activations")
    least = max(1, share.max())
    if not memory >= least:
        raise ScheduleError(
            f"memory={memory!r}: one micro-batch takes {least:g}; give at least that, or None for "
            f"{devices}, as many as devices"
        )
    most = np.maximum(share, 1)  # where W keeps more than I, room for that from the forward on
    memory_of, for_weights = (memory / most).tolist(), (share / most).tolist()
    link = costs.links(devices).tolist()
    return _Task(microbatches, seconds.tolist(), link, memory_of, for_weights)


class _Draft:
    """Rows that grow action by action, with the time at which each stage is free."""

    def __init__(self, task: _Task, choices: Choices) -> None:
        self.task, self.choices = task, choices
        self.stages = range(len(task.for_weights))
        self.rows: list[list[tuple[int, Kind, int]]] = [[] for _ in self.stages]
        self.free = [0.0 for _ in self.stages]
        self.idle = [0.0 for _ in self.stages]  # since the first forward
        self.most_idle = 0.0
        self.ends: dict[Kind, list[list[float]]] = {
            kind: [[] for _ in self.stages] for kind in (Kind.F, Kind.I, Kind.W)
        }

    def done(self, kind: Kind, stage: int) -> int:
        return len(self.ends[kind][stage])

    def waiting(self, stage: int) -> int:
        """Weight gradients that could run."""
        return self.done(Kind.I, stage) - self.done(Kind.W, stage)

    def ready(self, kind: Kind, stage: int) -> float:
        """When the input of the stage's next F or I is there."""
        source = stage + (-1 if kind is Kind.F else 1)
        if source not in self.stages:
            return 0.0
        sent = self.ends[kind][source][self.done(kind, stage)]
        return sent + self.task.link[min(stage, source)]

    def fits(self, stage: int, forwards: int = 1, less: int = 0) -> bool:
        """Whether so many more forwards fit after `less` weight gradients."""
        for_inputs = self.done(Kind.F, stage) - self.done(Kind.I, stage) + forwards
        for_weights = (self.waiting(stage) - less) * self.task.for_weights[stage]
        return for_inputs + for_weights <= self.task.memory[stage] * (1 + TINY)

    def add(self, kind: Kind, stage: int) -> None:
        start = self.free[stage]
        if kind is not Kind.W:
            start = max(start, self.ready(kind, stage))
        if self.rows[stage]:
            self.idle[stage] += start - self.free[stage]
            self.most_idle = max(self.most_idle, self.idle[stage])
        self.free[stage] = end = start + self.task.seconds[kind][stage]
        self.rows[stage].append((stage, kind, self.done(kind, stage)))
        self.ends[kind][stage].append(end)

    def fill(self, kind: Kind, stage: int) -> None:
        """The weight gradients that memory asks for or that fit before the next F or I, then it."""
        seconds = self.task.seconds[Kind.W][stage]
        while kind is Kind.F and not self.fits(stage):
            self.add(Kind.W, stage)
        ready = self.ready(kind, stage)
        while self.waiting(stage) and self.free[stage] + seconds <= ready:
            self.add(Kind.W, stage)
        gap = ready - self.free[stage]
        longest = self.idle[stage] + gap > self.most_idle
        if self.waiting(stage) and gap > 0 and (self.choices.every_gap or longest):
            self.add(Kind.W, stage)
        self.add(kind, stage)

    def build(self) -> list[np.ndarray]:
        """All rows. After the warm-up every turn is one forward (or none), then one I."""
        self.warm_up()
        for _ in range(1, self.task.microbatches):
            for stage in self.takers():
                self.fill(Kind.F, stage)
            for stage in reversed(self.stages):
                if stage == 0 and self.done(Kind.F, 0) == self.task.microbatches:
                    while self.waiting(0):  # nobody waits for its gradients
                        self.add(Kind.W, 0)
                self.fill(Kind.I, stage)
        for stage in self.stages:
            while self.waiting(stage):
                self.add(Kind.W, stage)
        return [np.array(row) for row in self.rows]

    def warm_up(self) -> None:
        """The forwards before every stage's first I: as many as have the time and the memory."""
        task, last = self.task, self.stages[-1]
        for stage in self.stages:
            self.add(Kind.F, stage)
        more = [0 for _ in self.stages]
        back = self.free[last]  # when a stage could start its first I
        for stage in reversed(self.stages):
            f, now = task.seconds[Kind.F][stage], self.free[stage]
            while 1 + more[stage] < task.microbatches and self.fits(stage, more[stage] + 1):
                in_time = now < back if self.choices.first_gradient_waits else now + f <= back
                if not in_time:
                    break
                now += f
                more[stage] += 1
            if stage:
                back = max(now, back) + task.seconds[Kind.I][stage] + task.link[stage - 1]
        for stage in self.stages[1:]:
            if 1 + more[stage - 1] < task.microbatches:
                more[stage] = max(min(more[stage], more[stage - 1] - 1), 0)
        for stage in self.stages:
            for _ in range(more[stage]):
                self.add(Kind.F, stage)
        for stage in reversed(self.stages):
            self.add(Kind.I, stage)

    def takers(self) -> list[int]:
        """The stages that take a forward in this turn: where one passes, those before it do."""
        first = 0
        for stage in self.stages:
            if self.passes(stage):
                first = stage + 1
        left = self.stages[first:]
        return [s for s in left if self.done(Kind.F, s) < self.task.microbatches]

    def passes(self, stage: int) -> bool:
        """Whether a stage leaves its forward for later, as the next I would have to wait for it."""
        following, seconds = stage + 1, self.task.seconds
        if not self.choices.gradients_first or following not in self.stages:
            return False
        if self.done(Kind.F, stage) == self.task.microbatches:
            return False
        if self.done(Kind.F, stage) < self.done(Kind.F, following) + 2:
            return False
        back = self.free[following] + seconds[Kind.F][following] + seconds[Kind.I][following]
        back += self.task.link[stage]  # when the gradient after the next one could be here
        first = 0  # weight gradients that the forward needs done
        while not self.fits(stage, less=first):
            first += 1
        end = self.free[stage] + first * seconds[Kind.W][stage] + seconds[Kind.F][stage]
        return end > back and (
            self.free[stage] >= back or back - self.free[stage] <= self.most_idle - self.idle[stage]
        )
