"""A list scheduler: whenever a device is free, it starts its most urgent possible action.

A rule says what is urgent; or the order of F and I is given, and each W goes into a gap, or to
where a forward needs the memory (`refilled`).
"""

import itertools
import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import NamedTuple

from pipelab.optimize.order.problem import SLACK, OrderProblem
from pipelab.predict.costs import Costs
from pipelab.predict.memory import reserved
from pipelab.table.action import Action, Kind
from pipelab.table.schedule import Schedule

PROMISING = 1.05  # times the shortest span: drafts up to that are refined

Cell = tuple[int, Kind]  # an action without its micro-batch
Rows = Sequence[Sequence[Cell]]  # of the devices


class Rule(NamedTuple):
    """How a device chooses. Within a kind, it takes the oldest micro-batch.

    order     kinds, the most urgent first
    patience  an action is not started if a more urgent one arrives before this share of it is
              done; None: before it is done, unless the device would then have waited longer
              than any other so far
    ahead     a limit to a stage's forwards ahead of its backwards, as a share of those that fit
              before the first gradient is back; inf: limited only by memory
    """

    order: tuple[Kind, ...] = ()
    patience: float | None = 0.0
    ahead: float = math.inf


@dataclass(frozen=True)
class GreedyOrder:
    """A draft: an order of the actions that the list scheduler has found.

    rows  per device, stages and kinds
    idle  per device, seconds without work since its first action
    span  the most seconds from a device's first start to its last end; inf if swaps led to a
          deadlock
    """

    problem: OrderProblem
    rows: Rows
    idle: Sequence[float]
    span: float

    @property
    def table(self) -> Schedule:
        return self.problem.table("greedy", self.rows)


def greedy_order(
    problem: OrderProblem,
    rule: Rule,
    given: Rows | None = None,
    allowance: Sequence[float] | None = None,
    window: int = 1,
) -> GreedyOrder:
    """The order in which devices start the actions, by a rule.

    given      per device, its F and I in order; it may start any of the next `window`
    allowance  per device, seconds that it may wait even if others have waited less
    """
    devices = []
    for number, stages in enumerate(problem.stages_of):
        row = deque(given[number]) if given else None
        waits = allowance[number] if allowance else 0.0
        devices.append(_Device(number, stages, _by_rule(rule, stages), row, waits))
    return _ListScheduler(problem, rule, devices, window).run()


def _by_rule(rule: Rule, stages: Sequence[int]) -> list[Cell]:
    """A device's actions, the most urgent first. Its oldest micro-batch is in its last stage if it
    goes forward, and in its first one if it comes back."""
    orders = {kind: reversed(stages) if kind is Kind.F else stages for kind in rule.order}
    return [(stage, kind) for kind, order in orders.items() for stage in order]


@dataclass
class _Device:
    """A device at work.

    stages     its own
    urgent     its actions, the most urgent first
    given      its F and I still to come, if their order is given
    allowance  seconds that it may wait even if others have waited less
    row        what it has started
    begin      seconds: the start of its first action
    free       seconds: the end of its last action
    idle       seconds without work in between
    level      the memory that it holds
    """

    number: int
    stages: list[int]
    urgent: list[Cell]
    given: deque[Cell] | None
    allowance: float
    row: list[Cell] = field(default_factory=list)
    begin: float = 0.0
    free: float = 0.0
    idle: float = 0.0
    level: float = 0.0


class _ListScheduler:
    """The devices, and what is done or on its way between them.

    inputs  kind -> per stage, when the inputs of its next actions arrive, as far as known
    events  when to look at which device
    """

    def __init__(
        self, problem: OrderProblem, rule: Rule, devices: list[_Device], window: int
    ) -> None:
        self.problem, self.rule, self.devices, self.window = problem, rule, devices, window
        stages, kinds = range(problem.stages), problem.kinds
        self.back = kinds[1]  # B, or the I of a split one
        self.done = {kind: [0 for _ in stages] for kind in kinds}
        self.inputs = {kind: [deque[float]() for _ in stages] for kind in kinds}
        self.inputs[Kind.F][0].extend([0.0] * problem.microbatches)
        self.events = [(0.0, problem.placement[0])]
        self.change = reserved(problem.change) if problem.split else problem.change
        self.most_ahead = self._forwards_ahead()

    def run(self) -> GreedyOrder:
        """Until no event is left: at each one, its device starts what it can."""
        while self.events:
            now, number = heappop(self.events)
            if self.devices[number].free <= now:
                self._go_on(self.devices[number], now)
        rows = [device.row for device in self.devices]
        span = math.inf  # unless all actions are there
        if sum(map(len, rows)) == self.problem.actions:
            span = max(device.free - device.begin for device in self.devices)
        return GreedyOrder(self.problem, rows, [device.idle for device in self.devices], span)

    def _forwards_ahead(self) -> list[float]:
        """How many forwards each stage may be ahead of its backwards."""
        problem, later, found = self.problem, 0.0, []
        back = problem.seconds[self.back]
        for stage, forward in reversed([*enumerate(problem.seconds[Kind.F])]):
            share = self.rule.ahead
            if share < math.inf and forward:
                # `later` is the time from here to the last stage and back: later / forward more
                # forwards fit into it.
                share = max(1, math.floor(share * (1 + later / forward)))
            found.append(share)
            later += forward + back[stage] + 2 * problem.delay[stage - 1] if stage else 0.0
        return found[::-1]

    def _most_urgent(self, device: _Device) -> list[Cell]:
        """By the rule; or, in a given order, the next F and I, then the W whose I was first."""
        if device.given is None:
            return device.urgent
        waiting = [(self.inputs[Kind.W][s], s) for s in device.stages]
        ready = [(inputs[0], s) for inputs, s in waiting if inputs]
        weights = [(min(ready)[1], Kind.W)] if ready else []
        return [*itertools.islice(device.given, self.window), *weights]

    def _go_on(self, device: _Device, now: float) -> None:
        """Start the most urgent action, unless it pays to wait for another one."""
        arrival = math.inf  # of the first more urgent one
        for stage, kind in self._most_urgent(device):
            inputs = self.inputs[kind][stage]
            if not inputs or (kind is Kind.F and not self._has_room(device, stage)):
                continue
            if inputs[0] > now:  # on its way: it may be worth the wait
                arrival = min(arrival, inputs[0])
            elif arrival == math.inf or not self._waits(device, now, arrival, stage, kind):
                self._start(device, stage, kind, now)
                return
        if arrival < math.inf:  # look again then
            heappush(self.events, (arrival, device.number))

    def _waits(self, device: _Device, now: float, arrival: float, stage: int, kind: Kind) -> bool:
        """Whether the device waits for the more urgent action instead of starting this one."""
        seconds, patience = self.problem.seconds[kind][stage], self.rule.patience
        if patience is not None:
            return now + patience * seconds > arrival
        # It may wait as long as any other device has: the slowest decides the span anyway.
        most = max(device.allowance, *(other.idle for other in self.devices))
        return now + seconds > arrival and device.idle + arrival - now <= most

    def _has_room(self, device: _Device, stage: int) -> bool:
        """Whether every micro-batch here can still finish after this forward.

        Those that have been in all of the device's stages can, and free what they hold. The oldest
        of the others needs room for the rest of its forwards; once it finishes, the next one can
        have that room (the banker's algorithm).
        """
        size, done = self.change[Kind.F], self.done
        limit = self.problem.memory * (1 + SLACK)
        ahead = done[Kind.F][stage] - done[self.back][stage]
        if ahead >= self.most_ahead[stage] or device.level + size[stage] > limit:
            return False
        if len(device.stages) == 1:
            return True
        # Micro-batch number `oldest` is the first that has not been in all of them.
        forwards = [done[Kind.F][s] + (s == stage) for s in device.stages]
        oldest = min(forwards)
        pairs = zip(device.stages, forwards, strict=True)
        return sum(size[s] * max(n - oldest, 1) for s, n in pairs) <= limit

    def _start(self, device: _Device, stage: int, kind: Kind, now: float) -> None:
        problem = self.problem
        if device.row:
            device.idle += now - device.free
        else:
            device.begin = now
        device.row.append((stage, kind))
        device.level += self.change[kind][stage]
        device.free = end = now + problem.seconds[kind][stage]
        self.done[kind][stage] += 1
        self.inputs[kind][stage].popleft()
        # Look when it is free again, and at every arrival: nothing else lets a device start an
        # action.
        heappush(self.events, (end, device.number))
        if device.given and kind is not Kind.W:  # W has no place in a given order
            device.given.remove((stage, kind))
        # Its output arrives where it is needed; a W may follow its I at once.
        if kind is Kind.F and stage + 1 < problem.stages:
            self._arrives(Kind.F, stage + 1, end + problem.delay[stage])
        elif kind is Kind.F:
            self._arrives(self.back, stage, end)
        elif kind is self.back and stage:
            self._arrives(self.back, stage - 1, end + problem.delay[stage - 1])
        if kind is Kind.I:
            self._arrives(Kind.W, stage, end)

    def _arrives(self, kind: Kind, stage: int, time: float) -> None:
        self.inputs[kind][stage].append(time)
        heappush(self.events, (time, self.problem.placement[stage]))


def rules(problem: OrderProblem) -> Iterator[Rule]:
    """The rules that usually give the shortest span."""
    if not problem.split:
        yield from (Rule((Kind.B, Kind.F)), Rule((Kind.F, Kind.B)))
        return
    gradients, forwards = (Kind.I, Kind.F, Kind.W), (Kind.F, Kind.I, Kind.W)
    weights = (Kind.W, Kind.F, Kind.I)
    yield from (Rule(gradients), Rule(gradients, 0.25), Rule(gradients, 0.25, ahead=1.0))
    yield from (Rule(forwards), Rule(forwards, ahead=1.0), Rule(weights, 0.1), Rule(weights, 0.5))


def every_rule(problem: OrderProblem) -> Iterator[Rule]:
    """The rules that a search has the time to try."""
    first, second = Kind.F, problem.kinds[1]
    patience, ahead = (0.0, 0.25, 0.5, 0.75, 1.0, None), (math.inf, 1.0, 0.75, 0.5)
    for order in ((first, second, Kind.W), (second, first, Kind.W)):
        for choices in itertools.product(patience, ahead):
            yield Rule(order if problem.split else order[:2], *choices)


def drafts(problem: OrderProblem) -> Iterator[GreedyOrder]:
    """The drafts by every rule; the promising ones refined, too."""
    for each in problem.variants():
        made = [greedy_order(each, rule) for rule in rules(each)]
        if each.split:
            shortest = min(draft.span for draft in made)
            # An order for even costs, or for a little less memory, leaves room for W.
            less = replace(each, memory=max(0.965 * each.memory, each.least_memory))
            sources = [
                in_step(each),
                *made,
                greedy_order(less, Rule((Kind.I, Kind.F, Kind.W), 0.25)),
            ]
            # Several rules often find the same order of F and I.
            for rows in dict.fromkeys(_without_weights(draft.rows) for draft in sources):
                again = refilled(each, rows, window=1)
                yield again
                if again.span < PROMISING * shortest:
                    yield refined(each, again)
        yield from made


def in_step(problem: OrderProblem) -> GreedyOrder:
    """The draft for even costs, with each W right after its I. In a V this is ZB-V."""
    costs = problem.costs
    even = Costs(activations=costs.activations, weight_activations=costs.weight_activations)
    return greedy_order(replace(problem, costs=even), Rule((Kind.W, Kind.F, Kind.I)))


def refined(problem: OrderProblem, draft: GreedyOrder) -> GreedyOrder:
    """The draft with neighbouring F and I swapped if a device would wait, while that helps."""
    for _ in range(3):
        again = refilled(problem, draft.rows, window=2)
        if again.span >= draft.span:
            break
        draft = again
    return draft


def refilled(problem: OrderProblem, rows: Rows, window: int) -> GreedyOrder:
    """The draft with the F and I of these rows in their order, and W placed anew.

    A device may wait as long as the one that waits most. A first try shows how long that is; more
    tries follow while they help.
    """
    given = _without_weights(rows)
    rule, best = Rule(patience=None), None
    allowance = [0.0] * problem.devices
    while True:
        draft = greedy_order(problem, rule, given, allowance, window)
        if best and draft.span >= best.span * (1 - SLACK):
            return best
        best, longest = draft, max(draft.idle)
        # How much longer each could have waited without becoming the slowest.
        allowance = [longest - idle for idle in draft.idle]


def _without_weights(rows: Rows) -> tuple[tuple[Cell, ...], ...]:
    return tuple(tuple(cell for cell in row if cell[1] is not Kind.W) for row in rows)


def fuse(schedule: Schedule) -> Schedule:
    """The same, with each I and a W right after it fused into one B.

    That saves an action's overhead, but delays the gradient by the W.
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
