"""ZB-V (Qi et al. 2023, arXiv 2401.10241, section 6): zero bubble in the memory of 1F1B.

0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2 0U0 3U0 .
.   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2 1U0 2U0

p = 2, m = 3, F = I = W: from its first forward on no device waits. Device 0 holds stages 0 and 3,
device 1 stages 1 and 2; the last stage's backward begins where the first stage is.
"""

from collections import deque
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from pipelab.action import Action, Kind, ScheduleError, check_counts, numbers
from pipelab.costs import Costs, Recompute
from pipelab.memory import changes, memory_used, reserved
from pipelab.placement import v_placement
from pipelab.schedule import Schedule
from pipelab.schedules._fastest import TINY, fastest
from pipelab.schedules._v import v_schedule
from pipelab.schedules.dualpipe_v import dualpipe_v
from pipelab.schedules.v_half import v_half
from pipelab.schedules.v_min import v_min
from pipelab.simulate import compute_seconds, transfer_seconds
from pipelab.transform import repeat

FIXED = (v_half, v_min, dualpipe_v)  # two chunks a device in a V


def zb_v(
    devices: int,
    microbatches: int,
    batches: int = 1,
    costs: Costs | None = None,
    memory: float | None = None,
) -> Schedule:
    """Two chunks a device in a V: F and I take turns, and W fills the gaps that these costs leave.

    costs   of its 2 p stages, in seconds; from activations and weight_activations (bytes) the share
            of an activation that is kept from I to W. All of it where there are no bytes
    memory  how many micro-batches' activations (of both chunks) fit on a device; p unless given.
            More of it makes the bubble smaller where F, I and W differ

    Of the heuristic's four variants and the fixed orders in a V that fit the one whose longest
    device span is shortest. ScheduleError for a memory that is too small for all of them.

    >>> zb_v(4, 8).peak_in_flight
    [8, 8, 8, 8]
    """
    check_counts(devices=devices, microbatches=microbatches, batches=batches)
    costs = costs or Costs()
    limit = devices if memory is None else memory
    tables = _variants(devices, microbatches, costs, limit)
    tables += [order(devices, microbatches) for order in FIXED]
    best = fastest(tables, costs, limit)
    if not best:
        for enough in (1, devices):
            tables += _variants(devices, microbatches, costs, enough)
        least = min(max(memory_used(table, costs)) for table in tables)
        raise ScheduleError(
            f"memory={memory!r}: zb_v finds no order for {devices} devices; give at least "
            f"{least:g}, or None for {devices}"
        )
    return replace(repeat(best, batches), name="zb_v")


def _variants(devices: int, microbatches: int, costs: Costs, memory: float) -> list[Schedule]:
    """What the heuristic makes of these costs; none where it finds no order in the memory."""
    model = _model(devices, costs, memory)
    order = _Order(model, microbatches)
    if not (memory >= 1 and order.make()):
        return []
    tables = []
    for choices in product((False, True), repeat=2):
        filled = _filled(model, order.actions, *choices)
        rows = [*map(numbers, filled.rows)]
        tables.append(v_schedule("zb_v", rows, devices, microbatches, 1))
    return tables


@dataclass(frozen=True)
class _Model:
    """What the order depends on.

    home     stage -> device
    seconds  [kind][stage]
    delay    of link s, between stages s and s + 1
    change   [kind][stage]: what an action adds to the activations on its device, in micro-batches
    limit    of those, of a device
    """

    home: tuple[int, ...]
    seconds: list[list[float]]
    delay: list[float]
    change: list[list[float]]
    limit: float

    @property
    def devices(self) -> int:
        return len(self.home) // 2


def _model(devices: int, costs: Costs, memory: float) -> _Model:
    home = v_placement(devices)
    recomputed = costs.recompute is not Recompute.NEVER
    seconds = compute_seconds(costs, home, recomputed) + costs.overhead
    return _Model(
        home,
        seconds.tolist(),
        transfer_seconds(costs, home).tolist(),
        reserved(changes(costs, home)).tolist(),
        memory * (1 + TINY),  # sums of shares are rounded
    )


class _Order:
    """All F and I, each behind what it needs: the order of each device, whatever W does.

    done    of a kind -> of a stage: how many micro-batches
    held    of a device: micro-batches' activations, if every W followed its I at once
    """

    def __init__(self, model: _Model, microbatches: int) -> None:
        self.model, self.microbatches = model, microbatches
        self.devices, self.last = model.devices, len(model.home) - 1
        self.actions: list[Action] = []
        self.done = {kind: [0] * (self.last + 1) for kind in (Kind.F, Kind.I)}
        self.held = [0.0] * self.devices

    def make(self) -> bool:
        """Whether there is such an order in the memory."""
        self._first_chunks()
        self._turns()
        while len(self.actions) < 2 * (self.last + 1) * self.microbatches:
            before = len(self.actions)
            self._input_grads()
            self._forwards()
            if len(self.actions) == before:
                return False
        return True

    def _can(self, kind: Kind, stage: int) -> bool:
        """Whether what the stage's next F or I needs is there, and the memory."""
        model, done = self.model, self.done
        k, d = done[kind][stage], model.home[stage]
        if k == self.microbatches:
            return False
        if kind == Kind.F:
            fits = self.held[d] + model.change[kind][stage] <= model.limit
            return fits and (stage == 0 or done[Kind.F][stage - 1] > k)
        return done[Kind.F][stage] > k and (stage == self.last or done[Kind.I][stage + 1] > k)

    def _put(self, kind: Kind, stage: int) -> bool:
        """The stage's next F or I, if it can be."""
        if can := self._can(kind, stage):
            self.actions.append(Action(stage, kind, self.done[kind][stage]))
            self.done[kind][stage] += 1
            size = self.model.change[Kind.F][stage]
            self.held[self.model.home[stage]] += size if kind == Kind.F else -size
        return can

    def _first_chunks(self) -> None:
        """Forwards of first chunks while micro-batch 0 is on its way to and through the second."""
        forward, change = self.model.seconds[Kind.F], self.model.change[Kind.F]
        end = np.cumsum(np.add(forward, [0.0, *self.model.delay]))  # of micro-batch 0's forwards
        ahead = self.microbatches
        for d in range(self.devices):
            s = self.last - d
            in_time = (end[s] - forward[s] - end[d]) / forward[d] + 1e-9 if forward[d] else 0
            # The turns below take d + 1 further activations of the second chunk, d of the first.
            free = self.model.limit - (d + 1) * change[s]
            room = free / change[d] - d if change[d] else ahead
            ahead = max(1, int(min(ahead, 1 + in_time, room)))
            for _ in range(ahead):
                self._put(Kind.F, d)
        for s in range(self.devices, self.last + 1):
            self._put(Kind.F, s)

    def _turns(self) -> None:
        """F of first and second chunks in turn, until a device has as many as the one before and
        is a micro-batch ahead of it in the second chunk."""
        done, last = self.done[Kind.F], self.last
        second = False
        for d in range(1, self.devices):
            for _ in range(4 * self.microbatches):  # at most
                as_many = done[d] + done[last - d] >= done[d - 1] + done[last - d + 1]
                is_ahead = (
                    done[last - d] > done[last - d + 1] or done[last - d + 1] == self.microbatches
                )
                if as_many and is_ahead:
                    break
                for e in reversed(range(d, self.devices)):
                    self._put(Kind.F, last - e if second else e)
                second = not second

    def _input_grads(self) -> None:
        """One I a device: of the first chunk if its gradient is there, else of the second."""
        last, every = self.last, range(self.devices)
        finished = [self.done[Kind.I][last - d] == self.microbatches for d in every]
        first = [finished[d] or self._can(Kind.I, d) for d in every]
        for d in reversed(every):
            if first[d]:
                self._put(Kind.I, d)
        for d in every:
            if not first[d]:
                self._put(Kind.I, last - d)

    def _forwards(self) -> None:
        """One F a device: of the second chunk if its input is there, else of the first."""
        second = [self._can(Kind.F, self.last - d) for d in range(self.devices)]
        for d in range(self.devices):
            self._put(Kind.F, self.last - d if second[d] else d)


class _Filled:
    """The order with W in its gaps.

    rows    of a device: its actions
    span    seconds, of the device that takes longest from its first start to its last end
    idle    of a device: seconds without work between them
    """

    def __init__(self, model: _Model, allowance: np.ndarray) -> None:
        devices = model.devices
        self.model, self.allowance = model, allowance.tolist()
        self.rows: list[list[Action]] = [[] for _ in range(devices)]
        self.pending: list[deque[Action]] = [deque() for _ in range(devices)]
        self.end: dict[Action, float] = {}
        self.begin, self.clock, self.idle, self.held = np.zeros((4, devices)).tolist()
        self.most_idle = 0.0

    @property
    def span(self) -> float:
        return max(np.subtract(self.clock, self.begin))

    def arrival(self, action: Action) -> float:
        """When what an F or I needs is on its device."""
        stage, kind, _ = action
        if kind == Kind.F:
            if stage == 0:
                return 0.0
            return self.end[action._replace(stage=stage - 1)] + self.model.delay[stage - 1]
        if stage == len(self.model.home) - 1:
            return self.end[action._replace(kind=Kind.F)]
        return self.end[action._replace(stage=stage + 1)] + self.model.delay[stage]

    def run(self, action: Action, arrival: float = 0.0) -> None:
        stage, kind, _ = action
        d = self.model.home[stage]
        start = max(arrival, self.clock[d])
        if self.rows[d]:
            self.idle[d] += start - self.clock[d]
            self.most_idle = max(self.most_idle, self.idle[d])
        else:
            self.begin[d] = start
        self.clock[d] = self.end[action] = start + self.model.seconds[kind][stage]
        self.held[d] += self.model.change[kind][stage]
        self.rows[d].append(action)
        if kind == Kind.I:
            self.pending[d].append(action._replace(kind=Kind.W))

    def fill(self, action: Action, arrival: float, also_late: bool) -> None:
        """Weight gradients before an F or I: those that memory or its input's delay asks for.

        also_late  one more that makes it late, where the device may not idle any longer
        """
        stage, kind, _ = action
        d = self.model.home[stage]
        pending, weight_grad = self.pending[d], self.model.seconds[Kind.W]
        while pending:
            gap = arrival - self.clock[d]
            full = self.held[d] + self.model.change[kind][stage] > self.model.limit
            fits = gap >= weight_grad[pending[0].stage]
            may_idle = max(self.most_idle, self.allowance[d]) - self.idle[d]
            if not (full or fits or (also_late and gap > may_idle)):
                break
            self.run(pending.popleft())


def _filled(
    model: _Model, order: list[Action], before_forward: bool, before_second: bool
) -> _Filled:
    """The order with W; W may make an action late before a forward, or I of a second chunk.

    A device may idle as long as the one that idles most. Which one that is is known after a first
    try, so that there is another one as long as that helps.
    """
    devices, best = model.devices, None
    allowance = np.zeros(devices)
    while True:
        filled = _Filled(model, allowance)
        for action in order:
            if action.kind == Kind.F:
                also_late = before_forward
            else:
                also_late = before_second or action.stage < devices
            arrival = filled.arrival(action)
            filled.fill(action, arrival, also_late)
            filled.run(action, arrival)
        for pending in filled.pending:
            while pending:
                filled.run(pending.popleft())
        if best and filled.span >= best.span:
            return best
        best = filled
        allowance = max(filled.idle) - np.array(filled.idle)
