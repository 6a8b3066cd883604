"""A measured timeline -> the costs that explain it."""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import pairwise
from operator import add
from statistics import fmean
from typing import Any

from pipelab.predict.costs import PASSES, Costs
from pipelab.predict.memory import Memory
from pipelab.predict.simulate import delays, durations, lay, links, waits
from pipelab.predict.timeline import Timeline
from pipelab.table.action import HOST, Kind
from pipelab.table.validate import check_type


def fit(timeline: Timeline, memory: Memory | None = None) -> Costs:
    """Costs whose simulation takes as long as this timeline, to predict other tables.

    The first batch, which warms up, is left out if there are more (`Timeline.warmed_up`).

    Seconds: the mean over a stage's forwards, backwards, updates. Those that overlap count only for
    `together`, unless a stage has no others. `overhead` is the mean time between an action and its
    predecessor, if its input was there. A full backward, measured as one, is split evenly into
    input and weight gradient. `transfer` is one number: the mean travel time of inputs that were
    waited for, plus the extra time that actions lost after such a wait.

    Variation makes devices wait, so a run takes longer than its means: all seconds are scaled by
    one factor (near 1) to match the run's length, with its first batch as it was.

    Bytes, if the timeline's `memory` is given: weights and optimizer state as the device's peak,
    divided evenly among its stages; activations as its peak divided by the most micro-batches in
    flight, also evenly; `host` from the seconds of offloads and reloads. With split backwards,
    activations are what forwards left, and `weight_activations` what remained between I and W.
    Causes missing in the memory are 0, as is `boundary`. Recomputation counts as part of the
    backward, and activations are a mean of full and recomputed ones or, with split backwards, what
    is kept from a forward to its I.

    Model: an action costs the same in every table. Raises ValueError for a table with transfers.

    >>> from pipelab import Costs, simulate
    >>> from pipelab.schedules import gpipe
    >>> fit(simulate(gpipe(2, 3), Costs(forward=[1, 3], transfer=0.5))).forward
    (1.0, 3.0)
    """
    check_type(Timeline, timeline=timeline)
    if memory is not None:
        check_type(Memory, memory=memory)
    timeline.refuse_transfers("fit")
    return fit_seconds(timeline, memory=memory)


def _host(timeline: Timeline, costs: Costs) -> float:
    """Bytes per second of copies to and from the host, where there are both."""
    s, kept = timeline.schedule, costs.of_copies(timeline.schedule)
    sizes = kept.of("activations", s.stages)
    spans = [span for span in timeline.spans if span.action.kind in HOST]
    seconds = sum(span.end - span.start for span in spans)
    moved = sum(s.share(a.microbatch) * sizes[a.stage] for _, a, *_ in spans)
    return moved / seconds if moved and seconds else math.inf


def fit_seconds(timeline: Timeline, each_link: bool = False, memory: Memory | None = None) -> Costs:
    """The seconds of `fit`, with bytes of a memory; with a `transfer` for each link, if asked for.

    Without a flush, the other batches wait for the first one, too; so it keeps its measured times.
    """
    s, warm, starts = timeline.schedule, timeline.warm, late_starts(timeline)
    duration, delay, wait, _ = timeline.parts()
    mean_costs = _mean_costs(timeline, each_link)
    if memory:
        mean_costs = replace(mean_costs, **_bytes(timeline, memory))
        mean_costs = replace(mean_costs, host=_host(timeline, mean_costs))

    def scaled(factor: float) -> Costs:
        found: dict[str, Any] = {"overhead": factor * mean_costs.overhead}
        for name in (*PASSES, "update", "transfer", "together"):
            seconds = getattr(mean_costs, name)
            if seconds is None:
                continue
            several = isinstance(seconds, tuple)
            found[name] = [factor * x for x in seconds] if several else factor * seconds
        return replace(mean_costs, **found)

    def mixed(new: Iterable[float], old: list[float]) -> list[float]:
        return [x if of_warm else y for x, y, of_warm in zip(new, old, warm, strict=True)]

    def makespan(factor: float) -> float:
        costs = scaled(factor).of_copies(s)
        later = map(max, waits(s, costs), starts)
        laid = mixed(durations(s, costs), duration), mixed(delays(s, costs), delay)
        return lay(s, *laid, mixed(later, wait)).makespan

    return scaled(_solve(makespan, timeline.makespan))


def late_starts(timeline: Timeline) -> list[float]:
    """How long the first action of each row waited though it could start; 0 for the others."""
    pairs = zip(timeline.schedule.before, timeline.parts().wait, strict=True)
    return [wait if before is None else 0.0 for before, wait in pairs]


def _mean_costs(timeline: Timeline, each_link: bool) -> Costs:
    s, warm, link = timeline.schedule, timeline.warm, links(timeline.schedule)
    duration, delay, wait, fed = timeline.parts()
    took: dict[Any, list[float]] = defaultdict(list)  # by kind and stage
    paired: dict[Any, list[float]] = defaultdict(list)  # the same, of those that overlap
    together: dict[int, list[float]] = defaultdict(list)  # by stage
    on_way: dict[Any, list[float]] = defaultdict(list)  # by link, and whether it was waited for
    lost_ready: list[float] = []  # before a start whose input was there already
    lost_fed: list[float] = []  # before one that had waited for it
    pairs, crossing = {i for i in s.joined if s.actions[i].kind not in HOST}, set(s.crossing)
    for i, (stage, kind, _) in enumerate(s.actions):
        if not warm[i]:
            continue
        overlaps = i in pairs or i + 1 in pairs
        (paired if overlaps else took)[kind, stage].append(duration[i])
        if i in pairs:
            took_both = max(timeline.end[i - 1 : i + 1]) - min(timeline.start[i - 1 : i + 1])
            for one in (stage, s.actions[i - 1].stage):
                together[one % s.model_stages].append(took_both)
        if i in crossing:
            on_way[link[i], fed[i]].append(delay[i])
        # First actions wait for no action, and an update may wait for other stages' gradients:
        # neither shows lost time.
        if s.before[i] is not None and (fed[i] or kind < Kind.U):
            (lost_fed if fed[i] else lost_ready).append(wait[i])
    lost = _mean(lost_ready)
    extra = max(_mean(lost_fed) - lost, 0.0)

    def seconds(kind: Kind) -> list[float]:
        """By stage of the model, of all its copies."""
        found = []
        for stage in range(s.model_stages):
            keys = [(kind, one) for one in range(stage, s.stages, s.model_stages)]
            alone = [x for key in keys for x in took[key]]
            mean = _mean(alone or [x for key in keys for x in paired[key]])
            found.append(mean * (1 if kind is Kind.U else s.per_sequence))  # of whole sequences
        return found

    def transfer(of_links: Iterable[int]) -> float:
        links = [n + c * s.model_stages for n in of_links for c in range(s.copies)]
        late, early = ([x for n in links for x in on_way[n, f]] for f in (True, False))
        return _mean(late or early) + extra  # how long one took that came early is not always known

    whole, every = seconds(Kind.B), range(s.model_stages - 1)
    input_grad, weight_grad = (
        [b / 2 or half for b, half in zip(whole, seconds(kind), strict=True)]
        for kind in (Kind.I, Kind.W)
    )
    forward = seconds(Kind.F)
    alone = map(add, forward, map(add, input_grad, weight_grad))
    both = [s.per_sequence * _mean(together[n]) or x for n, x in enumerate(alone)]
    return Costs(
        forward=forward,
        input_grad=input_grad,
        weight_grad=weight_grad,
        together=both if pairs else None,
        transfer=[transfer([n]) for n in every] if each_link else transfer(every),
        update=seconds(Kind.U),
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
    stages = Counter(s.placement)
    in_flight = [max(peak, 1) / s.per_sequence for peak in s.peak_in_flight]
    shares: dict[str, Any] = {"weights": stages, "optimizer": stages, "activations": in_flight}
    found = {
        cause: [memory.peak(cause)[d] / share[d] for d in s.placement[: s.model_stages]]
        for cause, share in shares.items()
    }
    return found | (_split_activations(timeline, memory) if Kind.I in s.kinds else {})


def _split_activations(timeline: Timeline, memory: Memory) -> dict[str, list[float]]:
    """The bytes each stage keeps of a micro-batch until I, and from I to W.

    While an action runs, its device holds the first as often as it has forwards without I (or B),
    and the second as often as it has I without W, of each stage: linear equations, solved by least
    squares. Not while I runs, when some of both is there, nor where two actions overlap.
    """
    import numpy as np

    s = timeline.schedule
    found = {name: [0.0] * s.stages for name in ("activations", "weight_activations")}
    for d, (a, b) in enumerate(pairwise(s.bounds)):
        stages = [stage for stage, home in enumerate(s.placement) if home == d]
        times, levels = memory.over_time(d)
        until_input: Counter[int] = Counter()
        until_weight: Counter[int] = Counter()
        held, level = [], []
        for i, span in enumerate(timeline.spans[a:b], a):
            _, (stage, kind, _), _, start, end, *_ = span
            until_input[stage] += kind in (Kind.F, Kind.RELOAD)
            now = bisect_right(times, (start + end) / 2) - 1
            alone = s.joined.isdisjoint((i, i + 1)) and kind is not Kind.I
            if now >= 0 and alone and end > start:
                held.append([count[one] for count in (until_input, until_weight) for one in stages])
                level.append(levels["activations"][now])
            until_input[stage] -= kind in (Kind.B, Kind.I, Kind.OFFLOAD)
            until_weight[stage] += (kind is Kind.I) - (kind is Kind.W)
        sizes = np.linalg.lstsq(np.array(held), np.array(level))[0]
        split = {a.stage for a in s.rows[d] if a.kind is Kind.I}
        for i, stage in enumerate(stages):
            whole, kept = max(sizes[i], 0.0), max(sizes[i + len(stages)], 0.0)
            found["activations"][stage] = whole
            found["weight_activations"][stage] = kept if stage in split else whole
    return {
        name: [s.per_sequence * size for size in sizes[: s.model_stages]]
        for name, sizes in found.items()
    }


def _mean(values: list[float]) -> float:
    return fmean(values) if values else 0.0
