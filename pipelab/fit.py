"""A measured timeline -> the costs that explain it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from pipelab.action import Kind
from pipelab.costs import PASSES, Costs
from pipelab.memory import CAUSES, Memory
from pipelab.simulate import delays, durations, lay, links, waits
from pipelab.timeline import Timeline

SECONDS = (*PASSES, "update", "transfer", "overhead")


def fit(timeline: Timeline, memory: Memory | None = None) -> Costs:
    """The costs under which a simulation takes as long as this timeline; to predict other tables.

    The first batch, which warms up, is left out where there are more (`Timeline.warmed_up`).

    Seconds: the mean over a stage's forwards, backwards, updates. `overhead` is the mean time that
    an action lost between the one before it and its own start, though its input was there. A full
    backward is split evenly into input and weight gradient, since it was measured as one.
    `transfer` is one number: the mean time on the way of inputs that were waited for, plus what
    actions that waited for their input lost more than the others.

    What varies makes others wait, so that a run takes longer than its means: all seconds are scaled
    by the one factor (near 1) with which the run, its first batch as it was, takes as long as it
    did.

    `speed`, where a run measured it: per device, the share of its compute in which it had a core;
    below 1, devices took turns on cores. Costs are then those of a core to itself.

    Bytes, if the timeline's `memory` is given: weights and optimizer state as the device's peak,
    divided evenly among its stages; activations as its peak divided by the most micro-batches in
    flight, so evenly too. Where backwards are split, activations are what forwards left, and
    `weight_activations` what was left of it between I and W. A cause that the memory does not have
    is 0; so is `boundary`. With recomputation, its seconds are part of the backward, and
    activations are a mean of full and recomputed ones, or, with split backwards, what is kept of a
    forward until its I.

    Model: an action costs the same in every table, and a device has a core for the same share of
    its time. Raises ValueError for a table with transfers and for the memory of another number of
    devices.

    >>> from pipelab import Costs, simulate
    >>> from pipelab.schedules import gpipe
    >>> fit(simulate(gpipe(2, 3), Costs(forward=[1, 3], transfer=0.5))).forward
    (1.0, 3.0)
    """
    timeline.refuse_transfers("fit")
    costs = fit_seconds(timeline)
    return replace(costs, **_bytes(timeline, memory)) if memory else costs


def fit_seconds(timeline: Timeline, each_link: bool = False) -> Costs:
    """The seconds of `fit`; with a `transfer` for each link, if asked for."""
    alone = uninterrupted(timeline)
    means = _means(alone, each_link)
    if timeline.on_core is not None:
        busy, had = timeline.warmed_up().busy, alone.warmed_up().busy
        share = np.divide(had, busy, out=np.ones_like(had), where=(had > 0) & (had < busy))
        means = replace(means, speed=share)

    def scaled(factor: float) -> Costs:
        return replace(means, **{n: np.multiply(getattr(means, n), factor) for n in SECONDS})

    return _as_long_as(timeline, scaled)


def _as_long_as(timeline: Timeline, costs: Callable[[float], Costs]) -> Costs:
    """Those of the factor with which the run takes as long as it did, its first batch as it was.

    Without a flush the others wait for the first batch, too, which their costs must not make up.
    """
    s, warm, starts = timeline.schedule, timeline.warm, late_starts(timeline)
    duration, delay, wait, _ = timeline.parts()

    def makespan(factor: float) -> float:
        tried = costs(factor)
        laid = lay(
            s,
            np.where(warm, durations(s, tried), duration),
            np.where(warm, delays(s, tried), delay),
            np.where(warm, np.maximum(waits(s, tried), starts), wait),
        )
        return laid.makespan

    return costs(_solve(makespan, timeline.makespan))


def uninterrupted(timeline: Timeline) -> Timeline:
    """The timeline as it would be if every action had had its core to itself.

    The same one where that was not measured.
    """
    if timeline.on_core is None:
        return timeline
    duration, delay, wait, _ = timeline.parts()
    return lay(timeline.schedule, np.minimum(timeline.on_core, duration), delay, wait)


def late_starts(timeline: Timeline) -> np.ndarray:
    """What the first action of each row waited, though it could start; 0 for the others."""
    return np.where(timeline.schedule.before < 0, timeline.parts().wait, 0)


def _means(timeline: Timeline, each_link: bool) -> Costs:
    s, kind, warm = timeline.schedule, timeline.kind, timeline.warm
    duration, delay, wait, fed = timeline.parts()
    # First actions wait for no action, and an update may wait for other stages' gradients: neither
    # shows lost time.
    lost = _mean(wait[warm & ~fed & (kind != Kind.U) & (s.before >= 0)])
    crosses = warm & np.isin(np.arange(len(kind)), s.crossing)
    extra = max(_mean(wait[warm & fed & (s.before >= 0)]) - lost, 0.0)

    def seconds(of: Kind) -> np.ndarray:
        each = [
            duration[warm & (kind == of) & (timeline.stage == stage)] for stage in range(s.stages)
        ]
        return np.array([_mean(found) for found in each])

    def transfer(link: int | None) -> float:
        moved = crosses & ((links(s) == link) | (link is None))
        # How long an input took that came early is not always known.
        late = moved & fed
        return _mean(delay[late if late.any() else moved]) + extra

    half = seconds(Kind.B) / 2
    return Costs(
        forward=seconds(Kind.F).tolist(),
        input_grad=np.where(half > 0, half, seconds(Kind.I)).tolist(),
        weight_grad=np.where(half > 0, half, seconds(Kind.W)).tolist(),
        transfer=[transfer(link) for link in range(s.stages - 1)] if each_link else transfer(None),
        update=seconds(Kind.U).tolist(),
        overhead=lost,
    )


def _solve(makespan: Callable[[float], float], target: float) -> float:
    """The factor at which a makespan, which grows with it, is the target; secants from 1.

    A makespan is the longest of many sums, so a convex function of the factor, made of straight
    pieces: a few steps hit it exactly. 1 if it does not depend on the factor.
    """
    x, y, other = 1.0, makespan(1.0), 0.0
    y_other = makespan(other)
    for _ in range(20):
        if abs(y - target) <= 1e-12 * target or y == y_other:
            break
        nearer = max(x + (target - y) * (other - x) / (y_other - y), 0.0)
        other, y_other = x, y
        x, y = nearer, makespan(nearer)
    return x


def _bytes(timeline: Timeline, memory: Memory) -> dict[str, Any]:
    """Per stage, each byte cost that a memory shows."""
    s = timeline.schedule
    if memory.devices != s.devices:
        raise ValueError(
            f"fit: memory of {memory.devices} devices for the {s.devices} of {s.name}: give that "
            "of the same run"
        )
    stages = np.bincount(s.placement, minlength=s.devices)
    in_flight = np.maximum(s.peak_in_flight, 1)
    shares = {"weights": stages, "optimizer": stages, "activations": in_flight}
    found = {
        cause: [memory.peak(cause)[d] / share[d] for d in s.placement]
        for cause, share in shares.items()
    }
    if (timeline.kind == Kind.I).any():
        found |= _split_activations(timeline, memory)
    return found


def _split_activations(timeline: Timeline, memory: Memory) -> dict[str, list[float]]:
    """What each stage keeps of a micro-batch until I, and from I to W.

    While an action runs, its device holds the first as often as it has forwards without I (or B),
    and the second as often as it has I without W, of each stage: linear equations, solved by least
    squares. Not while I runs, when some of both is there.
    """
    s = timeline.schedule
    found = {name: np.zeros(s.stages) for name in ("activations", "weight_activations")}
    for d, (a, b) in enumerate(zip(s.bounds, s.bounds[1:], strict=False)):
        kind, middle = timeline.kind[a:b], (timeline.start[a:b] + timeline.end[a:b]) / 2
        stages = [stage for stage, home in enumerate(s.placement) if home == d]
        mine = timeline.stage[a:b] == np.array(stages)[:, None]  # [stage, action]

        def before(*kinds: Kind, mine: np.ndarray = mine, kind: np.ndarray = kind) -> np.ndarray:
            done = mine & np.isin(kind, kinds)
            return np.cumsum(done, axis=1) - done

        forwards = np.cumsum(mine & (kind == Kind.F), axis=1)
        until_input = forwards - before(Kind.B, Kind.I)
        until_weight = before(Kind.I) - before(Kind.W)
        held = np.concatenate([until_input, until_weight])
        time, level = memory.settled(d)
        now = np.searchsorted(time, middle, side="right") - 1
        bytes_now = level[CAUSES.index("activations")][now]
        clear = (kind != Kind.I) & (timeline.end[a:b] > timeline.start[a:b]) & (now >= 0)
        sizes = np.linalg.lstsq(held[:, clear].T, bytes_now[clear])[0]
        split = mine[:, kind == Kind.I].any(axis=1)
        found["activations"][stages], kept = np.split(sizes, 2)
        found["weight_activations"][stages] = np.where(split, kept, found["activations"][stages])
    return {name: np.maximum(sizes, 0.0).tolist() for name, sizes in found.items()}


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else 0.0
