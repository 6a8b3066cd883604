"""Lower bounds: what no schedule of the same stages can beat, each with its reason.

Whatever the order of the actions, three things hold: a device does one thing at a time; a
micro-batch passes the stages one after the other and comes back; a device has only so much memory.

All micro-batches are alike, so every stage may number them by its own order. In formulas, p devices
run m micro-batches, of which k fit on a device; f, b, w and u are a stage's seconds of a forward,
of the part of a backward that the stage before waits for, of the rest of the backward, and of an
update (`_Stage`); reach, trip and drain are seconds on the way to it, there and back, and after it.
T in a formula is of equal stages, from Zero Bubble (Qi et al. 2023, arXiv 2401.10241).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from numbers import Real

from pipelab.predict.costs import Costs, Recompute
from pipelab.predict.memory import memory_used, shares
from pipelab.predict.simulate import compute_seconds, simulate, transfer_seconds
from pipelab.predict.timeline import Timeline
from pipelab.table.action import HOST, LARGEST, Kind, ScheduleError, check_counts
from pipelab.table.placement import check_placement, loop_placement, stages_of
from pipelab.table.schedule import Schedule
from pipelab.table.validate import check_type

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
    """Seconds that one batch takes at least in any order of these stages, from the first start to
    the last end, as a timeline's makespan. The same model in more stages may be faster.

    costs      of the stages
    memory     micro-batches whose activations (of all of a device's stages) fit on a device; None
               or inf: no limit. Ignored if forwards run again
    placement  stage -> device; None: one stage a device
    split      whether backwards may be split into I and W. Bounds for split ones hold for whole
               ones, too

    busiest device   waits for its first input, does all its work, and drains
    round trip the last forward's micro-batch still has to come back; no backward comes before the
                     first one is back
    memory turnover a micro-batch holds its memory until it is back: no other can use it meanwhile
    memory limit a device with full memory waits until one is back

    The last two need a limit. ScheduleError for a memory below 1, which lets no micro-batch
    through, or for a placement that leaves a device out; CostError if the costs do not fit the
    stages.

    >>> bound(Costs(), devices=4, microbatches=8, split=False)
    <Bound 33 by the busiest device: busiest device 33, round trip 26>
    >>> bound(Costs(), devices=4, microbatches=8, memory=1).binding
    'memory turnover'
    """
    check_type(Costs, costs=costs)
    devices, microbatches = check_counts(devices=devices, microbatches=microbatches)
    home = loop_placement(devices)
    if 2 * devices * microbatches > LARGEST:
        raise ScheduleError(
            f"devices={devices} microbatches={microbatches}: more than {LARGEST:,} actions; use "
            "smaller sizes"
        )
    if placement is not None:
        home = check_placement(placement, devices, each=True)
    check_type(Real, memory=math.inf if memory is None else memory)
    if memory is not None and not memory >= 1 - ROUNDING:
        raise ScheduleError(
            f"memory={memory!r}: give at least 1, the activations of one micro-batch"
        )
    parts = _devices(costs, home, microbatches, split)
    by = {
        "busiest device": max(device.busiest() for device in parts),
        "round trip": max(device.round_trip() for device in parts),
    }
    if memory is not None and memory < math.inf and costs.recompute is Recompute.NEVER:
        by["memory turnover"] = max(device.memory_turnover(memory) for device in parts)
        by["memory limit"] = max(device.memory_limit(memory) for device in parts)
    # A makespan counts from the first start, after what that action loses before it.
    return Bound({name: seconds - costs.overhead for name, seconds in by.items()})


def gap(schedule: Schedule, costs: Costs, timeline: Timeline | None = None) -> float | None:
    """How much longer a batch takes than the bound for the same stages and devices, within the
    memory of this schedule's fullest device, with backwards that may be split. None if no bound is
    known: for overlapping actions, slices, copies of the model, or offloading.

    Without a flush, batches overlap, and count as one large batch. `timeline` is the schedule's
    simulation, if there is one already.

    >>> from pipelab.schedules import pipedream_flush
    >>> round(gap(pipedream_flush(4, 8), Costs()), 3)
    0.222
    """
    check_type(Schedule, schedule=schedule)
    check_type(Costs, costs=costs)
    if schedule.overlapped or schedule.slices or schedule.copies > 1 or HOST & schedule.kinds:
        return None
    if schedule.batches > 1 and not schedule.asynchronous:
        schedule, timeline = schedule.part(0, 1), None
    makespan = (timeline or simulate(schedule, costs)).makespan
    return gap_of_longer(schedule, costs, schedule.total, makespan)


def gap_of_longer(part: Schedule, costs: Costs, microbatches: int, makespan: float) -> float:
    """The gap of a longer batch, of which `part` is a part that needs as much memory."""
    if part.batches > 1 and costs.recompute is Recompute.EXCEPT_LAST:
        costs = replace(costs, recompute=Recompute.NEVER)  # every batch has a last one
    limit = max(memory_used(part, costs))
    sizes = part.devices, microbatches, limit
    return bound(costs, *sizes, placement=part.placement).gap(makespan)


@dataclass
class _Stage:
    """Seconds of a stage, of one micro-batch each, and its part of its device's memory.

    forward      f
    backward     b, the part of a backward that the stage before waits for; of a whole one all of it
    rest         w, the rest of the backward
    update       u
    share        of the activations that its device keeps for a micro-batch
    kept         as long as it keeps these after b: w if that needs as much as I did, else 0
    reach        until a micro-batch can be here, after f and transfer of all stages before
    trip         from the start of f to the end of b: through all later stages and back
    drain        after the last b: until the stages before have made theirs, and w and u
    """

    forward: float
    backward: float
    rest: float
    update: float
    share: float
    kept: float
    reach: float = 0.0
    trip: float = 0.0
    drain: float = 0.0


def _stages(costs: Costs, home: Sequence[int], again: bool, split: bool) -> list[_Stage]:
    # [1] Their own seconds. A whole backward loses its overhead once.
    seconds, overhead = compute_seconds(costs, home, again), costs.overhead
    share = shares(costs, home, "activations")
    for_weights = shares(costs, home, "weight_activations")
    stages = []
    for s in range(len(home)):
        backward, rest = seconds[Kind.I][s] + overhead, seconds[Kind.W][s]
        if not split:
            backward, rest = backward + rest, 0.0
        stages.append(
            _Stage(
                forward=seconds[Kind.F][s] + overhead,
                backward=backward,
                rest=rest,
                update=seconds[Kind.U][s] + overhead,
                share=share[s],
                kept=rest if for_weights[s] >= share[s] else 0.0,
            )
        )
    # [2] The way there and, with the drain, back to the first stage.
    way = transfer_seconds(costs, home)
    stages[0].drain = stages[0].rest + stages[0].update
    for before, stage, link in zip(stages, stages[1:], way, strict=False):
        stage.reach = before.reach + before.forward + link
        stage.drain = max(before.drain + before.backward + link, stage.rest + stage.update)
    # [3] The way to the last stage and back.
    later = 0.0
    for stage, link in zip(reversed(stages), [*reversed(way), 0.0], strict=True):
        stage.trip = stage.forward + later + stage.backward
        later += stage.forward + stage.backward + 2 * link
    return stages


@dataclass
class _Device:
    """Stages of a device, and the seconds of all micro-batches in them.

    A device that has several stages can do nothing before its first one can, and its drain is that
    of its first one.

    forwards   all f
    backwards  all b
    ending     after the last b: the drain, or all w and u
    """

    microbatches: int
    stages: list[_Stage]
    forwards: float
    backwards: float
    ending: float

    @property
    def first_b(self) -> float:
        """When the first backward can start."""
        last = self.stages[-1]
        return last.reach + last.trip - last.backward

    def busiest(self) -> float:
        """A device waits for `reach`, does all its f and b, and drains; what is left of its w and u
        may fill the drain:  reach + m (f + b) + max(drain, m w + u)."""
        return self.stages[0].reach + self.forwards + self.backwards + self.ending

    def round_trip(self) -> float:
        """The last f of a stage starts after the others, and its micro-batch still has to come
        back:  reach + (m - 1) f + trip + drain.  And before the first one is back a device has no b
        to do:  reach + trip + (m - 1) b + max(drain, m w + u).  With m = 1 it is
        p (T_F + T_B) + 2 (p - 1) T_comm, and the last W."""
        others = self.microbatches - 1
        of_last = (s.reach + others * s.forward + s.trip + s.drain for s in self.stages)
        return max(self.first_b + self.backwards + self.ending, *of_last)

    def memory_limit(self, memory: float) -> float:
        """While micro-batch j is on its way back, its device has room for k - 1 others: it can do
        k - 1 of the later f and k - 1 of the earlier b (fewer of the first and the last
        micro-batches), and then waits. j + k starts after j is back, so that the idle times of j,
        j + k, j + 2k add up. The first device's first one is the paper's bubble of at least
        (p - 1) (T_B + 2 T_comm) + (p - k) T_F. With several stages on a device only the first such
        idle time is counted."""
        return self._waits(memory) if len(self.stages) == 1 else self._first_wait(memory)

    def _waits(self, memory: float) -> float:
        """All idle times of a device of one stage."""
        (s,), m = self.stages, self.microbatches
        room = self._fit(memory, 1.0)
        earlier = [min(room - 1, j) for j in range(m)]
        waits = [
            s.trip - (1 + later) * s.forward - (1 + before) * s.backward
            for before, later in zip(earlier, reversed(earlier), strict=True)
        ]
        work = s.reach + m * (s.forward + s.backward)
        end = work + _longest(waits, room, s.kept) + s.drain
        if s.kept:
            # A w that fills an idle time is that of one of the earlier micro-batches.
            waits = [wait - before * s.rest for wait, before in zip(waits, earlier, strict=True)]
            end = max(end, work + m * s.rest + _longest(waits, room, 0.0) + s.update)
        return end

    def _first_wait(self, memory: float) -> float:
        """The wait of a device of several stages: forwards that fit, then its first b."""
        shares = [s.share for s in self.stages]
        if max(shares) - min(shares) < ROUNDING:  # else parts of a micro-batch may fit as well
            most = self.microbatches * len(shares)
            memory = math.floor(min(most, memory / shares[0] + ROUNDING)) * shares[0]
        fit = 0.0
        for s in sorted(self.stages, key=lambda s: s.share / max(s.forward, ROUNDING)):
            count = min(self.microbatches, memory / s.share) if s.share else self.microbatches
            memory -= count * s.share
            fit += count * s.forward
        before = min(fit, self.first_b - self.stages[0].reach)
        return self.first_b + self.forwards - before + self.backwards + self.ending

    def memory_turnover(self, memory: float) -> float:
        """A micro-batch keeps its room for a whole trip (and w, where W needs as much as was kept
        before I): the last f comes after floor((m - 1) / k) of them and (m - 1) mod k other f. With
        several stages on a device k is counted for everything that begins with f of one of them and
        ends with b of a later one; and the seconds for which all of them keep their parts have to
        fit as well."""
        # While one is between f of stage s and b of t, it keeps the parts of all stages up to s.
        # The first to make its b of t keeps those up to t.
        depth = [*accumulate(s.share for s in self.stages)]
        kept = [*accumulate((s.kept for s in self.stages), min)]
        keeps = sum(s.share * (s.trip + s.kept) for s in self.stages)
        after = min(s.update if s.kept > 0 else s.drain for s in self.stages)
        longest = self.stages[0].reach + self.microbatches * keeps / memory + after
        for j, t in enumerate(self.stages):
            for i, s in enumerate(self.stages[: j + 1]):
                room = 1 + self._fit(memory - depth[j], depth[i])
                turns, others = divmod(self.microbatches - 1, room)
                trip = t.reach - s.reach + t.trip
                start = s.reach + turns * (trip + kept[j]) + others * s.forward
                longest = max(longest, start + trip + t.drain)
        return longest

    def _fit(self, memory: float, share: float) -> int:
        """Micro-batches that fit, each with this share of the device's activations."""
        m = self.microbatches
        return math.floor(min(m, memory / share + ROUNDING)) if share else m


def _devices(costs: Costs, home: Sequence[int], microbatches: int, split: bool) -> list[_Device]:
    m, again = microbatches, costs.recomputed(microbatches, microbatches)
    every = _stages(costs, home, all(again), split)
    some = 0 if all(again) else sum(again)  # are recomputed, and `b` is of one that is not
    devices = []
    for numbers in stages_of(home):
        stages = [every[s] for s in numbers]
        forwards = sum(m * s.forward for s in stages)
        backwards = sum(m * s.backward + some * (s.forward - costs.overhead) for s in stages)
        rest = sum(m * s.rest + s.update for s in stages)
        ending = max(stages[0].drain, rest)
        devices.append(_Device(m, stages, forwards, backwards, ending))
    return devices


def _longest(waits: Sequence[float], apart: int, between: float) -> float:
    """The largest sum of waits that are at least `apart` places apart, with `between` before each
    but the first. Waits below 0 count as 0."""
    best = [0.0]  # of the first waits, of none on
    for j, wait in enumerate(waits):
        before = best[j + 1 - apart] + between if j >= apart else 0.0
        best.append(max(best[j], before + max(wait, 0.0)))
    return best[-1]
