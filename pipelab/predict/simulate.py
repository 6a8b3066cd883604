"""Schedule + Costs -> Timeline: every action starts as soon as its row and its input allow."""

from collections.abc import Sequence
from operator import add
from typing import Any

from pipelab.predict.costs import PASSES, Costs
from pipelab.predict.timeline import Timeline
from pipelab.table.action import HOST, Kind
from pipelab.table.schedule import Schedule
from pipelab.table.validate import check_deadlock, check_static, check_type


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """The timeline under fixed costs (default: forward, input and weight gradient 1, the rest 0).

    An action starts when the action before it in its row has ended and its input has arrived. In a
    table with transfers, SEND and RECV meet (rendezvous) and both take the link's time; otherwise
    transfers overlap with compute. Raises ScheduleError if the table is not valid, CostError if the
    costs do not fit it. Time is linear in the table.

    >>> from pipelab.schedules import gpipe
    >>> t = simulate(gpipe(4, 8))
    >>> t.makespan, round(t.bubble.of_total, 4), t.bubble.over_ideal
    (33.0, 0.2727, 0.375)
    """
    costs = Costs() if costs is None else costs
    check_static(schedule)
    check_type(Costs, costs=costs)
    costs = costs.of_copies(schedule)
    return lay(
        schedule, durations(schedule, costs), delays(schedule, costs), waits(schedule, costs)
    )


def lay(
    schedule: Schedule, duration: Sequence[float], delay: Sequence[float], wait: Sequence[float]
) -> Timeline:
    """The timeline of a valid table whose actions take these seconds each, flat over the table.

    An action waits, then computes; its input travels for `delay`. ScheduleError for a deadlock.
    """
    walk = schedule.walk([*map(add, wait, duration)], delay)
    check_deadlock(schedule, walk.head)
    start = [*map(add, walk.start, wait)]
    moved = {}
    for i in schedule.crossing:
        sent = walk.end[schedule.inputs[i]]  # type: ignore[index]
        moved[i] = sent, sent + delay[i]
    return Timeline(schedule, schedule.spans(start, walk.end, moved), "simulated")


def compute_seconds(
    costs: Costs, placement: Sequence[int], recomputed: bool = False
) -> dict[Kind, list[float]]:
    """Kind -> of each stage, the seconds of an action, without its overhead; of a micro-batch whose
    forward runs again before its backward, or of one that kept its activations."""
    n, speed = len(placement), costs.of("speed", max(placement) + 1)
    forward, input_grad, weight_grad, update = (
        [x / speed[d] for x, d in zip(costs.of(name, n), placement, strict=True)]
        for name in (*PASSES, "update")
    )
    if recomputed:
        input_grad = [*map(add, input_grad, forward)]
    return {
        Kind.F: forward,
        Kind.B: [*map(add, input_grad, weight_grad)],
        Kind.I: input_grad,
        Kind.W: weight_grad,
        Kind.U: update,
    }


def transfer_seconds(costs: Costs, placement: Sequence[int]) -> list[float]:
    """Seconds from each stage to the next one (and back); 0 on the same device."""
    links = costs.links(len(placement))
    return [0.0 if placement[s] == placement[s + 1] else link for s, link in enumerate(links)]


def durations(schedule: Schedule, costs: Costs) -> list[float]:
    """Seconds of every action, flat over the table."""
    link = costs.links(schedule.stages)
    forth, back = [*link, 0.0], [0.0, *link]  # of a stage: to the next one, and to the one before
    moves = {Kind.SEND_F: forth, Kind.RECV_B: forth, Kind.RECV_F: back, Kind.SEND_B: back}
    kept, inputs = (costs.of(name, schedule.stages) for name in ("activations", "boundary"))
    once, again = (
        compute_seconds(costs, schedule.placement, recomputed)
        | moves
        | {kind: [size / costs.host for size in sizes] for kind in HOST}
        for recomputed, sizes in ((False, kept), (True, [*map(min, inputs, kept)]))
    )
    recomputed = costs.recomputed(schedule.total, schedule.microbatches)
    seconds = [
        (again if recomputed[number] else once)[kind][stage]
        for stage, kind, number in schedule.actions
    ]
    of_slices, n = costs.of_slices(schedule), schedule.per_sequence
    if schedule.slices:
        for i, (_, kind, number) in enumerate(schedule.actions):
            if kind is not Kind.U:  # a transfer or a copy takes its share of the bytes
                share = of_slices if kind < Kind.U else schedule.slices
                seconds[i] *= share[number % n]
    if schedule.joined:
        saved = _saved(costs, schedule.placement)
        for i in schedule.joined:
            f, b = schedule.actions[i - 1 : i + 1]
            if b.kind in HOST:  # each takes its own time
                continue
            less = sum(saved[a.stage] * of_slices[a.microbatch % n] for a in (f, b)) / 2
            both = max(seconds[i - 1] + seconds[i] - less, *seconds[i - 1 : i + 1])
            seconds[i - 1] = seconds[i] = both
    return seconds


def _saved(costs: Costs, placement: Sequence[int]) -> list[float]:
    """Seconds that a forward and a backward of each stage save where they overlap."""
    n, speed = len(placement), costs.of("speed", max(placement) + 1)
    alone = zip(*(costs.of(name, n) for name in PASSES), strict=True)
    together = costs.of("together", n)
    return [(sum(a) - t) / speed[d] for a, t, d in zip(alone, together, placement, strict=True)]


def waits(schedule: Schedule, costs: Costs) -> list[float]:
    """Seconds that every action loses before it starts, when its input is there."""
    return [costs.overhead if a.kind <= Kind.U else 0.0 for a in schedule.actions]


def delays(schedule: Schedule, costs: Costs) -> list[float]:
    """Seconds that each action's input travels; 0 for one from the same device."""
    delay = [0.0] * len(schedule.actions)
    seconds, link = costs.links(schedule.stages), links(schedule)
    latency = costs.of("transfer", max(schedule.stages - 1, 0))
    for i in schedule.crossing:
        s: Any = link[i]
        share = schedule.share(schedule.actions[i].microbatch)
        delay[i] = latency[s] + share * (seconds[s] - latency[s])
    return delay


def links(schedule: Schedule) -> list[int | None]:
    """The link that each action's input takes, s between stages s and s + 1; None: no input."""
    actions = schedule.actions
    return [
        None if source is None else min(action.stage, actions[source].stage)
        for action, source in zip(actions, schedule.inputs, strict=True)
    ]
