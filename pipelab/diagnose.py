"""What one run loses and what would help, from its timeline alone."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from pipelab.action import Kind, ScheduleError
from pipelab.costs import PASSES, Costs
from pipelab.fit import fit
from pipelab.idle import OVERHEAD, TRANSFER, per_batch
from pipelab.schedule import Schedule
from pipelab.schedules import make
from pipelab.simulate import simulate
from pipelab.timeline import Timeline

FIRST, RAMP, ORDER, BETWEEN = "first batch", "warm-up and drain", "order", "between actions"
SHOWN = 0.0005  # shares that text leaves out are smaller
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

    idle       share of all device time
    speed      samples a second, as a multiple of those of the simulated run
    in_flight  the most activations that a device would keep, counted in those of all its layers for
               a micro-batch of the run
    """

    change: str
    idle: float
    speed: float
    in_flight: float


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """What a run loses; shown as text.

    idle      share of all device time: `bubble.of_total`
    causes    cause -> its share of all device time, largest first; they sum to `idle`
    path      "stage 1 backward" -> its share of the makespan on the critical path, largest first;
              with what passes between actions they sum to 1
    as_it_is  the run itself, simulated: what the changes are compared with
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

        lines = [f"{self.run}: this run loses {share(self.idle).strip()} of its device time"]
        for title, shares in (("", self.causes), ("its critical path", self.path)):
            lines += [title] if title else []
            lines += [f"  {share(x)}  {name}" for name, x in shares.items() if x >= SHOWN]
        lines.append("what if, simulated: idle, speed, most micro-batches in flight on a device")
        lines += [
            f"  {share(w.idle)}  {w.speed:5.2f} x  {w.in_flight:4g}  {w.change}"
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

    first batch        of the idle time until the first of several batches had ended, what goes
                       beyond the median of the others: it warms up (not without a flush: the
                       batches overlap)
    warm-up and drain  of the waiting for stages, as much as a perfectly balanced pipeline without
                       transfers and overhead has, at the most (p - 1) / (m v) of the compute
    order              what else such a pipeline waits in this order of actions

    The changes are simulations under `fit(timeline)`, where a stage that lacked a core is a slow
    one: perfect balance, each device's work (the name says how much the slowest has beyond the
    mean) spread evenly; transfers that take no time; twice the micro-batches, of the same size (a
    batch twice as large) or of half (overhead and transfer stay as they are); and other schedules
    of the same micro-batches, where a device's work is divided evenly among its chunks. Raises
    ValueError for a table with transfers.

    >>> found = diagnose(simulate(make("gpipe", 2, 4), Costs(forward=[1, 2])))
    >>> {cause: round(share, 3) for cause, share in found.causes.items()}
    {'warm-up and drain': 0.171, 'waiting for stage 1': 0.092}
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
    idle = per_batch(timeline)  # [stages, transfer, overhead; batch]
    first = 0.0
    if s.batches > 1 and not s.asynchronous:
        in_all = idle.sum(axis=0)
        first = max(in_all[0] - np.median(in_all[1:]), 0.0)
        beyond = np.maximum(idle[:, 0] - np.median(idle[:, 1:], axis=1), 0)
        idle[:, 0] -= beyond * (first / (beyond.sum() or 1.0))
    *waiting, transfer, overhead = idle.sum(axis=1)
    even = replace(_balanced(costs), transfer=0.0, overhead=0.0)
    ideal = simulate(s, even)
    of_ideal = per_batch(ideal).sum(axis=1)[: s.stages]
    in_order = np.minimum(waiting, of_ideal)
    group = s.total if s.asynchronous else s.microbatches
    compute = ideal.busy.sum() - s.stages * s.updates * float(even.of("update", s.stages)[0])
    ramp = min(in_order.sum(), compute * (s.devices - 1) / (group * s.stages / s.devices))
    return {
        **{f"waiting for stage {i}": x for i, x in enumerate(waiting - in_order)},
        RAMP: ramp,
        ORDER: in_order.sum() - ramp,
        TRANSFER: transfer,
        OVERHEAD: overhead,
        FIRST: first,
    }


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
        in_flight = size * max(t.peak_in_flight) * schedule.devices / schedule.stages
        return WhatIf(change, t.bubble.of_total, speed, in_flight)

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
        half = {name: np.divide(getattr(costs, name), 2).tolist() for name in PASSES}
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
    with suppress(ScheduleError):
        return make(
            name, s.devices, microbatches, virtual=virtual, batches=s.batches, reads=s.reads
        )
    return None


def _balanced(costs: Costs) -> Costs:
    """The same work, evenly spread over the stages."""
    means: dict[str, Any] = {n: float(np.mean(getattr(costs, n))) for n in (*PASSES, "update")}
    return replace(costs, **means)


def _of_devices(s: Schedule, costs: Costs) -> Costs:
    """The costs of a device's stages as those of one."""
    sums: dict[str, Any] = {
        name: np.bincount(s.placement, costs.of(name, s.stages), s.devices).tolist()
        for name in (*PASSES, "update")
    }
    return replace(costs, **sums, transfer=float(np.mean(costs.transfer)))
