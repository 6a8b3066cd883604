"""Lower bounds: what no schedule of these costs can beat, each with its reason.

Whatever the order of the actions, three things hold: a device does one thing at a time; a
micro-batch passes the stages one after the other and comes back; a device has only so much memory.

    f, b, w, u  seconds of a stage: a forward; the part of a backward that the stage before waits
                for; the rest of the backward; an update. A split backward has b = input_grad and
                w = weight_grad, a whole one b = both and w = 0
    out         of a stage: until a micro-batch can be there, after f and transfer of all stages
                before
    trip        from the start of f to the end of b: through all later stages and back
    drain       after the last b: until the stages before have made theirs, and w and u; or its own
                w and u
    m, k        micro-batches; how many of them have room on a device

A device that has several stages can do nothing before its first one can, and its drain is that of
its first one. All micro-batches are alike, so that they may be numbered by their order on every
stage.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipelab.action import Kind, ScheduleError, check_counts, check_memory
from pipelab.costs import Costs, Recompute
from pipelab.memory import memory_used, shares
from pipelab.schedule import Schedule
from pipelab.simulate import compute_seconds, simulate, transfer_seconds

ROUNDING = 1e-9


@dataclass(frozen=True, repr=False)
class Bound:
    """Lower bounds of a makespan: name -> seconds."""

    by: dict[str, float]

    @property
    def makespan(self) -> float:
        """The largest one: no schedule is faster."""
        return max(self.by.values())

    @property
    def binding(self) -> str:
        """The name of the largest one."""
        return max(self.by, key=self.by.__getitem__)

    def gap(self, makespan: float) -> float:
        """How much longer than the bound a makespan is, as a share of the bound."""
        if not self.makespan:
            return 0.0
        return round(makespan / self.makespan - 1, 12) + 0.0  # rounding below 0 is 0, not -0

    def __repr__(self) -> str:
        each = ", ".join(f"{name} {seconds:.6g}" for name, seconds in self.by.items())
        return f"<Bound {self.makespan:.6g} by the {self.binding}: {each}>"


def bound(
    costs: Costs,
    devices: int,
    microbatches: int,
    memory: float | None = None,
    *,
    placement: Sequence[int] | None = None,
    split: bool = True,
) -> Bound:
    """Seconds that one batch takes at least, in whatever order: from the first start to the last
    end, as a timeline's makespan.

    costs      of the stages
    memory     micro-batches whose activations (of all of a device's stages) fit on a device; None
               or inf: no limit. It counts for nothing where forwards run again
    placement  stage -> device; None: one stage a device
    split      whether backwards may be split into I and W. What holds for split ones holds for
               whole ones, too

    busiest device   waits for its first input, does all its work, and drains
    round trip       the last forward's micro-batch still has to come back; no backward is there
                     before the first one is back
    memory turnover  a micro-batch keeps its room until it is back: no other can have it meanwhile
    memory limit     a device whose room is full waits until one is back

    The last two are there only with a limit. ScheduleError for a memory below 1, with which no
    micro-batch comes back, or for a placement that leaves a device out; CostError if the costs do
    not fit the stages.

    >>> bound(Costs(), devices=4, microbatches=8, split=False)
    <Bound 33 by the busiest device: busiest device 33, round trip 26>
    >>> bound(Costs(), devices=4, microbatches=8, memory=1).binding
    'memory turnover'
    """
    check_counts(devices=devices, microbatches=microbatches)
    check_memory(memory)
    home = np.arange(devices) if placement is None else np.array(placement)
    if set(home.tolist()) != set(range(devices)):
        raise ScheduleError(f"placement={placement!r}: give each of {devices} devices a stage")
    if memory is not None and not memory >= 1 - ROUNDING:
        raise ScheduleError(
            f"memory={memory!r}: give at least 1, the activations of one micro-batch"
        )
    if memory == math.inf:
        memory = None
    parts = _Parts(costs, home, microbatches, split)
    by = {"busiest device": parts.busiest(), "round trip": parts.round_trip()}
    if memory is not None and costs.recompute is Recompute.NEVER:
        by |= {
            "memory turnover": parts.memory_turnover(memory),
            "memory limit": parts.memory_limit(memory),
        }
    # A makespan counts from the first start, after what that action loses before it.
    return Bound({name: seconds - costs.overhead for name, seconds in by.items()})


def gap(schedule: Schedule, costs: Costs) -> float:
    """How much longer a batch takes than the bound: of the same stages on the same devices, under
    the memory of the device that needs most in this schedule, with backwards that may be split.

    Without a flush batches overlap: all of them count as one large batch.

    >>> from pipelab.schedules import pipedream_flush
    >>> round(gap(pipedream_flush(4, 8), Costs()), 3)
    0.222
    """
    if not schedule.asynchronous:
        schedule = schedule.part(0, 1)
    makespan = simulate(schedule, costs).makespan
    if schedule.batches > 1 and costs.recompute is Recompute.EXCEPT_LAST:
        costs = replace(costs, recompute=Recompute.NEVER)  # every batch has a last one
    limit = max(memory_used(schedule, costs))
    sizes = schedule.devices, schedule.total, limit
    return bound(costs, *sizes, placement=schedule.placement).gap(makespan)


class _Parts:
    """What the bounds are made of: arrays of one value a stage, or a device (in plural).

    In the formulas p devices, m micro-batches, k of which fit in memory; f, b, w, u seconds of a
    stage's actions. With T: Zero Bubble's (Qi et al. 2023, arXiv 2401.10241) for equal stages.
    """

    def __init__(self, costs: Costs, home: np.ndarray, microbatches: int, split: bool) -> None:
        p, m = home.max() + 1, microbatches
        seconds = compute_seconds(costs, home)
        # [1] A stage's own seconds. A whole backward loses its overhead once.
        again = costs.recompute.mask(m, m)
        f, w = seconds[Kind.F], seconds[Kind.W]
        b = seconds[Kind.I] + costs.overhead + again.all() * f
        self.m, self.f, self.u = m, f + costs.overhead, seconds[Kind.U] + costs.overhead
        self.b, self.w = (b, w) if split else (b + w, 0 * w)
        # [2] Its way from the first stage, to the last one and back, and back to the first one.
        way = transfer_seconds(costs, home)
        self.out = np.append(0, np.cumsum(self.f[:-1] + way))
        later = np.cumsum((self.f[1:] + self.b[1:] + 2 * way)[::-1])[::-1]
        self.trip = self.f + np.append(later, 0) + self.b
        back = np.append(0, np.cumsum(self.b[:-1] + way))
        self.drain = back + np.maximum.accumulate(self.w + self.u - back)
        # [3] What it keeps from I to W as long as W takes, and its part of its device's memory.
        self.share = shares(costs, home, "activations")
        as_much = shares(costs, home, "weight_activations") >= self.share
        self.kept = np.where(as_much, self.w, 0.0)
        # [4] Of the devices.
        self.stages = [np.flatnonzero(home == d) for d in range(p)]
        self.first = np.array([stages[0] for stages in self.stages])
        self.last = np.array([stages[-1] for stages in self.stages])
        self.forwards = m * np.bincount(home, self.f)
        some = 0 if again.all() else again.sum()  # are recomputed
        self.backwards = np.bincount(home, m * self.b + some * f)
        rest = np.bincount(home, m * self.w + self.u)
        self.ends = np.maximum(self.drain[self.first], rest)
        self.first_b = (self.out + self.trip - self.b)[self.last]

    def busiest(self) -> float:
        """A device waits for `out`, does all its f and b, and drains; what is left of its w and u
        may fill the drain:  out + m (f + b) + max(drain, m w + u)."""
        return float((self.out[self.first] + self.forwards + self.backwards + self.ends).max())

    def round_trip(self) -> float:
        """The last f of a stage starts after the others, and its micro-batch still has to come
        back:  out + (m - 1) f + trip + drain.  And before the first one is back a device has no b
        to do:  out + trip + (m - 1) b + max(drain, m w + u).  With m = 1 it is
        p (T_F + T_B) + 2 (p - 1) T_comm, and the last W."""
        of_last = self.out + (self.m - 1) * self.f + self.trip + self.drain
        of_first = self.first_b + self.backwards + self.ends
        return float(max(of_last.max(), of_first.max()))

    def memory_limit(self, memory: float) -> float:
        """While micro-batch j is on its way back, its device has room for k - 1 others: it can do
        k - 1 of the later f and k - 1 of the earlier b (fewer of the first and the last
        micro-batches), and then waits. j + k starts after j is back, so that the idle times of j,
        j + k, j + 2k add up. The first device's first one is the paper's bubble of at least
        (p - 1) (T_B + 2 T_comm) + (p - k) T_F. With several stages on a device only the first such
        idle time is counted."""
        return max(
            self._waits(int(stages[0]), memory)
            if len(stages) == 1
            else self._first_wait(d, stages, memory)
            for d, stages in enumerate(self.stages)
        )

    def _waits(self, s: int, memory: float) -> float:
        """Of a stage that has a device of its own: all its idle times."""
        f, b, w, room = self.f[s], self.b[s], self.w[s], self._fit(memory, 1.0)
        j = np.arange(self.m)
        later, earlier = np.minimum(room - 1, j[::-1]), np.minimum(room - 1, j)
        wait = self.trip[s] - (1 + later) * f - (1 + earlier) * b
        work = self.out[s] + self.m * (f + b)
        end = work + _longest(wait, room, self.kept[s]) + self.drain[s]
        if self.kept[s]:
            # A w that fills an idle time is that of one of the earlier micro-batches.
            wait = wait - earlier * w
            end = max(end, work + self.m * w + _longest(wait, room, 0.0) + self.u[s])
        return float(end)

    def _first_wait(self, d: int, stages: np.ndarray, memory: float) -> float:
        """Of a device of several stages: forwards that fit, then nothing until its first b."""
        share, fit = self.share[stages], 0.0
        if np.ptp(share) < ROUNDING:  # else we let parts of a micro-batch fit as well
            memory = math.floor(memory / share[0] + ROUNDING) * share[0]
        for i in np.argsort(share / np.maximum(self.f[stages], ROUNDING)):
            count = min(self.m, memory / share[i]) if share[i] else self.m
            memory -= count * share[i]
            fit += count * self.f[stages[i]]
        before = min(fit, self.first_b[d] - self.out[self.first[d]])
        rest = self.forwards[d] - before + self.backwards[d] + self.ends[d]
        return float(self.first_b[d] + rest)

    def memory_turnover(self, memory: float) -> float:
        """A micro-batch keeps its room for a whole trip (and w, where W needs as much as was kept
        before I): the last f comes after floor((m - 1) / k) of them and (m - 1) mod k other f. With
        several stages on a device k is counted for everything that begins with f of one of them and
        ends with b of a later one; and the seconds for which all of them keep their parts have to
        fit as well."""
        found = []
        for stages in self.stages:
            # While one is between f of stage s and b of t, it keeps the parts of all stages up to
            # s. The first to make its b of t keeps those up to t.
            depth = np.cumsum(self.share[stages])
            kept = np.minimum.accumulate(self.kept[stages])
            for j, t in enumerate(stages):
                for i, s in enumerate(stages[: j + 1]):
                    room = 1 + self._fit(memory - depth[j], depth[i])
                    turns, others = divmod(self.m - 1, room)
                    trip = self.out[t] - self.out[s] + self.trip[t]
                    start = self.out[s] + turns * (trip + kept[j]) + others * self.f[s]
                    found.append(start + trip + self.drain[t])
            keeps = self.share * (self.trip + self.kept)
            after = np.where(self.kept > 0, self.u, self.drain)[stages].min()
            found.append(self.out[stages[0]] + self.m * keeps[stages].sum() / memory + after)
        return float(max(found))

    def _fit(self, memory: float, share: float) -> int:
        """Micro-batches that fit, each with this share of the device's activations."""
        return min(self.m, math.floor(memory / share + ROUNDING)) if share else self.m


def _longest(waits: np.ndarray, apart: int, between: float) -> float:
    """The largest sum of waits that are at least `apart` places apart, with `between` before each
    but the first. Waits below 0 count as 0."""
    best = [0.0]  # of the first waits, of none on
    for j, wait in enumerate(np.maximum(waits, 0).tolist()):
        before = best[j + 1 - apart] + between if j >= apart else 0.0
        best.append(max(best[j], before + wait))
    return best[-1]
