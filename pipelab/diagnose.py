"""What one run loses and what would help, from its timeline alone."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from pipelab.action import Kind, ScheduleError
from pipelab.costs import Costs
from pipelab.fit import fit
from pipelab.schedule import Schedule
from pipelab.schedules import SCHEDULES, make, with_chunks
from pipelab.simulate import simulate
from pipelab.timeline import HELD, OVERHEAD, TRANSFER, Timeline

START_UP, WARM_UP, BETWEEN = "start-up", "warm-up batch", "between actions"
SHOWN = 0.0005  # shares that text leaves out are smaller
COMPUTE = ("forward", "input_grad", "weight_grad")
WORDS = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.U: "update",
}


@dataclass(frozen=True)
class WhatIf:
    """A change, simulated with the run's own costs.

    loss       share of all device time that would be lost
    speed      samples a second, as a multiple of those of the simulated run
    in_flight  the most micro-batches that a device would keep activations of
    """

    change: str
    loss: float
    speed: float
    in_flight: int


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What a run loses; shown as text.

    loss      share of all device time that is idle: `bubble.of_total`
    causes    cause -> its share of all device time, largest first; they sum to the loss
    path      "stage 1 backward" -> its share of the makespan on the critical path, largest first;
              with what passes between actions they sum to 1
    as_it_is  the run itself, simulated: what the changes are compared with
    what_ifs  changes
    """

    run: str
    loss: float
    causes: dict[str, float]
    path: dict[str, float]
    as_it_is: WhatIf
    what_ifs: tuple[WhatIf, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def __repr__(self) -> str:
        def share(value: float) -> str:
            return f"{100 * value:5.1f} %"

        lines = [f"{self.run}: this run loses {share(self.loss).strip()} of its device time"]
        for title, shares in (("", self.causes), ("its critical path", self.path)):
            lines += [title] if title else []
            lines += [f"  {share(x)}  {name}" for name, x in shares.items() if x >= SHOWN]
        lines.append("what if, simulated: lost, speed, most micro-batches in flight on a device")
        lines += [
            f"  {share(w.loss)}  {w.speed:5.2f} x  {w.in_flight:4}  {w.change}"
            for w in (self.as_it_is, *self.what_ifs)
        ]
        return "\n".join(lines)


def diagnose(timeline: Timeline) -> Diagnosis:
    """What a run loses, by causes that add up to its idle time, and what changes would make of it.

    Every idle instant of a device has one cause. The device's next action can start (`overhead`),
    its input is on its way (`transfer`), or the input is not made yet; then what its maker's device
    does at that instant decides: it computes for a stage (`waiting for stage s`), or is idle itself
    for a cause of its own. A device with nothing left waits for the one that ends last. Then what
    has another name is taken out:

    warm-up batch           of the idle time while the first of several batches was under way, what
                            goes beyond the median of the others (not without a flush: the batches
                            overlap)
    start-up                of the waiting for stages, as much as a perfectly balanced pipeline
                            without transfers and overhead has, at the most (p - 1) / (m v) of the
                            compute: the ramp at both ends of a batch
    held back by the order  what else such a pipeline waits in this order of actions

    The changes are simulations under `fit(timeline)`, where a stage that lacked a core is a slow
    one: perfect balance, each device's work (the name says how much the slowest has beyond the
    mean) spread evenly; transfers that take no time; twice the micro-batches, of the same size (a
    batch twice as large) or of half (overhead and transfer stay as they are); and other schedules
    of the same micro-batches, where a device's work is divided evenly among its chunks. Raises
    ValueError for a table with transfers.

    >>> found = diagnose(simulate(make("gpipe", 2, 4), Costs(forward=[1, 2])))
    >>> {cause: round(share, 3) for cause, share in found.causes.items()}
    {'start-up': 0.171, 'waiting for stage 1': 0.092}
    """
    timeline.refuse_transfers("diagnose")
    # A stage that lacked a core is a slow one here.
    s, costs = timeline.schedule, fit(replace(timeline, on_core=None))
    total = s.devices * timeline.makespan or 1.0
    causes = {cause: float(x) / total for cause, x in _causes(timeline, costs).items()}
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
    idle = _idle(timeline)  # [stages, transfer, overhead; batch]
    warm_up = 0.0
    if s.batches > 1 and not s.asynchronous:
        in_all = idle.sum(axis=0)
        warm_up = max(in_all[0] - np.median(in_all[1:]), 0.0)
        beyond = np.maximum(idle[:, 0] - np.median(idle[:, 1:], axis=1), 0)
        idle[:, 0] -= beyond * (warm_up / (beyond.sum() or 1.0))
    *waiting, transfer, overhead = idle.sum(axis=1)
    even = replace(_balanced(costs), transfer=0.0, overhead=0.0)
    ideal = simulate(s, even)
    of_ideal = _idle(ideal).sum(axis=1)[: s.stages]
    in_order = np.minimum(waiting, of_ideal)
    group = s.total if s.asynchronous else s.microbatches
    compute = ideal.busy.sum() - s.stages * s.updates * float(even.of("update", s.stages)[0])
    ramp = min(in_order.sum(), compute * (s.devices - 1) / (group * s.stages / s.devices))
    return {
        **{f"waiting for stage {i}": x for i, x in enumerate(waiting - in_order)},
        START_UP: ramp,
        HELD: in_order.sum() - ramp,
        TRANSFER: transfer,
        OVERHEAD: overhead,
        WARM_UP: warm_up,
    }


def _idle(t: Timeline) -> np.ndarray:
    """Idle seconds [cause, batch]: the stages that devices wait for, then transfer, overhead."""
    s = t.schedule
    transfer, overhead = s.stages, s.stages + 1
    # [1] Instants between which nothing begins, ends, leaves or arrives; the batch under way.
    moments = np.unique(np.concatenate([t.start, t.end, t.sent, t.arrived]))
    moments = moments[(moments >= t.start.min()) & (moments <= t.end.max())]
    width, instant = np.diff(moments), (moments[1:] + moments[:-1]) / 2
    ends = np.zeros(s.batches)
    np.maximum.at(ends, t.batch, t.end)
    batch = np.minimum(np.searchsorted(np.maximum.accumulate(ends), instant), s.batches - 1)
    # [2] For each device what it does then: its cause, or the device that knows it.
    arrival = t.input_arrival()
    sent = np.where(np.isnan(t.sent), arrival, t.sent)
    last = int(t.device[np.argmax(t.end)])
    cause = np.full((s.devices, len(instant)), -1)
    asks = np.full_like(cause, last)
    busy = np.zeros(cause.shape, bool)
    for d, (a, b) in enumerate(pairwise(s.bounds)):
        ended = np.searchsorted(np.maximum.accumulate(t.end[a:b]), instant, side="right")
        left = np.flatnonzero(ended < b - a)
        head, now = a + ended[left], instant[left]
        asks[d, left] = t.device[s.inputs[head]]
        busy[d, left] = t.start[head] <= now
        answers = [busy[d, left], arrival[head] <= now, sent[head] <= now]
        cause[d, left] = np.select(answers, [t.stage[head], overhead, transfer], -1)
    # [3] Ask on, from device to device.
    for _ in range(s.devices):
        cause = np.where(cause < 0, np.take_along_axis(cause, asks, axis=0), cause)
    cause[cause < 0] = overhead
    # [4] Sums; spans that overlap by rounding leave a rest.
    idle = np.zeros((s.stages + 2, s.batches))
    device, place = np.nonzero(~busy)
    np.add.at(idle, (cause[device, place], batch[place]), width[place])
    idle[overhead, -1] += s.devices * t.makespan - t.busy.sum() - idle.sum()
    return idle


def _path(t: Timeline) -> dict[str, float]:
    """Shares of the makespan on the critical path."""
    shares: dict[str, float] = {}
    for i in t.critical_path():
        name = f"stage {t.stage[i]} {WORDS[Kind(t.kind[i])]}"
        shares[name] = shares.get(name, 0.0) + float(t.end[i] - t.start[i]) / (t.makespan or 1.0)
    return shares | {BETWEEN: 1 - sum(shares.values())}


# ---- what would help


def _what_ifs(s: Schedule, costs: Costs) -> Iterator[WhatIf]:
    """First the run as it is."""
    run = simulate(s, costs)

    def tried(change: str, schedule: Schedule, costs: Costs, size: float = 1.0) -> WhatIf:
        t = simulate(schedule, costs)
        samples = size * schedule.total / s.total
        speed = samples * run.makespan / t.makespan if t.makespan else 1.0
        return WhatIf(change, t.bubble.of_total, speed, max(schedule.peak_in_flight))

    yield tried("as it is", s, costs)
    work = run.busy / (run.busy.max() or 1.0)
    slowest = int(np.argmax(work))
    excess = f"device {slowest} hands on {1 - work.mean():.0%} of its work"
    yield tried(f"perfect balance: {excess}", s, _balanced(costs))
    yield tried("transfers take no time", s, replace(costs, transfer=0.0))
    if not s.training:
        return
    virtual = max(s.stages // s.devices, 1)
    if s == _made(s, s.name, s.microbatches, virtual) and (
        twice := _made(s, s.name, 2 * s.microbatches, virtual)
    ):
        m = f"m = {twice.microbatches}"
        half = {name: np.divide(getattr(costs, name), 2).tolist() for name in COMPUTE}
        yield tried(f"twice the micro-batches, {m}, of the same size", twice, costs)
        yield tried(
            f"twice the micro-batches, {m}, of half the size", twice, replace(costs, **half), 0.5
        )
    whole = _of_devices(s, costs)
    for name, chunks in (("gpipe", 1), ("pipedream_flush", 1), ("interleaved", max(virtual, 2))):
        other = _made(s, name, s.microbatches, chunks)
        if other and other.name != s.name:
            yield tried(
                f"{name}, {chunks} chunks a device" if chunks > 1 else name,
                other,
                whole.split(chunks),
            )


def _made(s: Schedule, name: str, microbatches: int, virtual: int) -> Schedule | None:
    """The named schedule for the same devices and batches, if there is one of these sizes."""
    if name not in SCHEDULES or (virtual > 1 and not with_chunks(name)):
        return None
    sizes = {"virtual": virtual, "batches": s.batches}
    with suppress(ScheduleError):
        return make(name, s.devices, microbatches, reads=s.reads, **sizes)
    return None


def _balanced(costs: Costs) -> Costs:
    """The same work, evenly spread over the stages."""
    means: dict[str, Any] = {n: float(np.mean(getattr(costs, n))) for n in (*COMPUTE, "update")}
    return replace(costs, **means)


def _of_devices(s: Schedule, costs: Costs) -> Costs:
    """The costs of a device's stages as those of one."""
    sums: dict[str, Any] = {
        name: np.bincount(s.placement, costs.of(name, s.stages), s.devices).tolist()
        for name in (*COMPUTE, "update")
    }
    return replace(costs, **sums, transfer=float(np.mean(costs.transfer)))
