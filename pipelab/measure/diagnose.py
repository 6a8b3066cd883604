"""Where a run loses time, and what would help, from its timeline alone."""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, pairwise
from statistics import fmean, median
from typing import Any

from pipelab.measure.fit import fit
from pipelab.predict.attribution import Cause, waited_for
from pipelab.predict.costs import PASSES, Costs
from pipelab.predict.simulate import simulate
from pipelab.predict.timeline import Timeline
from pipelab.schedules import make
from pipelab.table.action import WORDS, ScheduleError
from pipelab.table.schedule import Schedule
from pipelab.table.validate import check_type

FIRST, RAMP, ORDER, BETWEEN = "first batch", "warm-up and drain", "order", "between actions"
WAITING = "waiting for stage {}"
SHOWN = 0.0005  # shares that text leaves out are smaller


@dataclass(frozen=True)
class WhatIf:
    """A change, simulated with the run's own costs.

    idle       share of all device time
    speed      samples a second, as a multiple of those of the simulated run
    in_flight  the most activations that a device would hold, in those of all its layers for a
               micro-batch of the run
    """

    change: str
    idle: float
    speed: float
    in_flight: float


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """A run's losses; shown as text.

    idle      share of all device time: `bubble.of_total`
    causes    cause -> its share of all device time, largest first; they sum to `idle`
    path      "stage 1 backward" -> its share of the makespan on the critical path, largest first;
              with the time between actions they sum to 1
    as_it_is  the run itself, simulated: the baseline for the changes
    what_ifs  changes
    """

    run: str
    idle: float
    causes: dict[str, float]
    path: dict[str, float]
    as_it_is: WhatIf
    what_ifs: tuple[WhatIf, ...]

    def to_json(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __repr__(self) -> str:
        def share(value: float) -> str:
            return f"{100 * value:5.1f} %"

        def listed(shares: dict[str, float]) -> list[str]:
            return [f"  {share(x)}  {name}" for name, x in shares.items() if x >= SHOWN]

        return "\n".join(
            [
                f"{self.run}: this run loses {share(self.idle).strip()} of its device time",
                *listed(self.causes),
                "its critical path",
                *listed(self.path),
                "what if, simulated: idle, speed, most micro-batches in flight on a device",
                *(
                    f"  {share(w.idle)}  {w.speed:5.2f} x  {w.in_flight:4g}  {w.change}"
                    for w in (self.as_it_is, *self.what_ifs)
                ),
            ]
        )


def diagnose(timeline: Timeline) -> Diagnosis:
    """Where a run loses time, by causes that sum to its idle time, and what changes would gain.

    The command `pipelab diagnose` prints it; `explain`, the function, compares a run with a
    prediction.

    Every idle instant of a device has one cause. The device's next action can start (`overhead`),
    or its input is on its way (`transfer`). If the input is not made yet, its maker's device
    decides: it computes for a stage (`waiting for stage s`), or is idle for a cause of its own. A
    device with nothing left waits for the one that ends last. Three causes are then split off:

    first batch        of the idle time until the first of several batches had ended, what goes
                       beyond the median of the others: it warms up (not without a flush: the
                       batches overlap)
    warm-up and drain  of the waiting for stages, as much as a perfectly balanced pipeline without
                       transfers and overhead has, at the most (p - 1) / (m v) of the compute
    order              the rest of what such a pipeline waits in this order of actions

    The changes are simulations under `fit(timeline)`: perfect balance, each device's work spread
    evenly (the name says how far the slowest exceeds the mean); messages that take no time,
    with what an action that waited for one loses before it starts (in `fit` a part of the transfer,
    above of the overhead); twice the micro-batches, of the same size (a batch twice as large) or
    half (overhead and transfer stay the same); and other schedules of the same micro-batches, with
    a device's work divided evenly among its chunks. Raises ValueError for a table with transfers.

    >>> from pipelab import Costs, make, simulate
    >>> found = diagnose(simulate(make("gpipe", 2, 4), Costs(forward=[1, 2])))
    >>> {cause: round(share, 3) for cause, share in found.causes.items()}
    {'warm-up and drain': 0.171, 'waiting for stage 1': 0.092}
    """
    check_type(Timeline, timeline=timeline)
    timeline.refuse_transfers("diagnose")
    s, costs = timeline.schedule, fit(timeline)
    total = s.devices * timeline.makespan or 1.0
    causes = {cause: seconds / total for cause, seconds in _causes(timeline, costs).items()}
    as_it_is, *others = _what_ifs(s, costs)
    return Diagnosis(
        f"{s.name} on {s.devices} devices, {s.batches} x {s.microbatches} micro-batches",
        timeline.bubble.of_total,
        _largest_first(causes),
        _largest_first(_path(timeline)),
        as_it_is,
        tuple(others),
    )


def _largest_first(shares: dict[str, float]) -> dict[str, float]:
    return dict(sorted(((k, x) for k, x in shares.items() if x > 0), key=lambda item: -item[1]))


# ---- where the idle time goes


def _causes(timeline: Timeline, costs: Costs) -> dict[str, float]:
    """Idle seconds of all devices by cause."""
    s = timeline.schedule
    idle = _by_batch(timeline)
    first = 0.0
    if s.batches > 1 and not s.asynchronous:
        in_all = [sum(seconds) for seconds in zip(*idle.values(), strict=True)]
        first = max(in_all[0] - median(in_all[1:]), 0.0)
        beyond = {cause: max(x[0] - median(x[1:]), 0.0) for cause, x in idle.items()}
        share = first / (sum(beyond.values()) or 1.0)
        for cause, seconds in idle.items():
            seconds[0] -= share * beyond[cause]
    found = {cause: sum(seconds) for cause, seconds in idle.items()}
    even = replace(_balanced(costs), transfer=0.0, overhead=0.0)
    ideal = simulate(s, even)
    of_ideal = _by_batch(ideal)
    in_order = 0.0
    for cause in (WAITING.format(stage) for stage in range(s.stages)):
        least = min(found[cause], sum(of_ideal[cause]))
        found[cause] -= least
        in_order += least
    group = s.total if s.asynchronous else s.microbatches
    compute = sum(ideal.busy) - s.stages * s.updates * even.of("update", s.stages)[0]
    ramp = min(in_order, compute * (s.devices - 1) / (group * s.stages / s.devices))
    return found | {RAMP: ramp, ORDER: in_order - ramp, FIRST: first}


def _by_batch(t: Timeline) -> dict[str, list[float]]:
    """Idle seconds of all devices by cause, in each batch: until its last action has ended."""
    s = t.schedule
    limits = [*accumulate([min(t.start), *t.batch_ends], max)]
    causes = [WAITING.format(stage) for stage in range(s.stages)]
    idle = {cause: [0.0] * s.batches for cause in (*causes, Cause.TRANSFER, Cause.OVERHEAD)}
    for begin, end, who in waited_for(s, t.spans):
        seconds = idle[causes[who] if isinstance(who, int) else who]
        for b, (since, until) in enumerate(pairwise(limits)):
            seconds[b] += max(min(end, until) - max(begin, since), 0.0)
    # Spans that overlap, by rounding, leave a rest.
    known = sum(map(sum, idle.values()))
    idle[Cause.OVERHEAD][-1] += s.devices * t.makespan - sum(t.busy) - known
    return idle


def _path(t: Timeline) -> dict[str, float]:
    """Shares of the makespan on the critical path."""
    shares: dict[str, float] = defaultdict(float)
    for i in t.critical_path():
        action = t.schedule.actions[i]
        name = f"stage {action.stage} {WORDS[action.kind]}"
        shares[name] += (t.end[i] - t.start[i]) / (t.makespan or 1.0)
    return shares | {BETWEEN: 1 - sum(shares.values())}


# ---- what would help


def _what_ifs(s: Schedule, costs: Costs) -> Iterator[WhatIf]:
    """First the run as it is."""
    run = simulate(s, costs)

    def tried(change: str, schedule: Schedule, costs: Costs, size: float = 1.0) -> WhatIf:
        t = simulate(schedule, costs)
        samples = size * schedule.total / s.total
        speed = samples * run.makespan / t.makespan if t.makespan else 1.0
        in_flight = size * max(t.peak_in_flight) * schedule.devices / schedule.stages
        return WhatIf(change, t.bubble.of_total, speed, in_flight)

    yield tried("as it is", s, costs)
    most = run.ideal or 1.0
    excess = f"device {run.busy.index(run.ideal)} hands on {1 - fmean(run.busy) / most:.0%}"
    yield tried(f"perfect balance: {excess} of its work", s, _balanced(costs))
    yield tried("messages and waking up for them take no time", s, replace(costs, transfer=0.0))
    if not s.training:
        return
    virtual = max(s.stages // s.devices, 1)
    twice = _made(s, s.name, 2 * s.microbatches, virtual)
    if twice and s == _made(s, s.name, s.microbatches, virtual):
        change = f"twice the micro-batches, m = {twice.microbatches}, of"
        n = s.model_stages
        half: dict[str, Any] = {name: [x / 2 for x in costs.of(name, n)] for name in PASSES}
        yield tried(f"{change} the same size", twice, costs)
        yield tried(f"{change} half the size", twice, replace(costs, **half), 0.5)
    whole = _of_devices(s, costs)
    for name, chunks in (("gpipe", 1), ("pipedream_flush", 1), ("interleaved", max(virtual, 2))):
        other = _made(s, name, s.microbatches, chunks)
        if other and other.name != s.name:
            change = f"{name}, {chunks} chunks a device" if chunks > 1 else name
            yield tried(change, other, whole.split(chunks))


def _made(s: Schedule, name: str, microbatches: int, virtual: int) -> Schedule | None:
    """The named schedule for the same devices and batches, if there is one of these sizes."""
    with suppress(ScheduleError):
        return make(
            name, s.devices, microbatches, virtual=virtual, batches=s.batches, reads=s.reads
        )
    return None


def _balanced(costs: Costs) -> Costs:
    """The same work, evenly spread over the stages."""
    lists = {name: getattr(costs, name) for name in (*PASSES, "update")}
    even: dict[str, Any] = {name: fmean(values) for name, values in lists.items()}
    return replace(costs, **even)


def _of_devices(s: Schedule, costs: Costs) -> Costs:
    """The costs of a device's stages as those of one."""
    sums: dict[str, Any] = {name: [0.0] * s.devices for name in (*PASSES, "update")}
    for name, seconds in sums.items():
        # Those of one copy of the model, as a micro-batch takes one.
        for stage, device in enumerate(s.placement[: s.model_stages]):
            seconds[device] += costs.of(name, s.model_stages)[stage]
    return replace(costs, **sums, together=None)
