"""Schedule + Costs -> Timeline: every action starts as soon as its row and its input allow."""

from collections.abc import Sequence

import numpy as np

from pipelab.action import Kind
from pipelab.costs import Costs
from pipelab.schedule import Schedule
from pipelab.timeline import Timeline
from pipelab.validate import check_deadlock, check_static


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
    costs = costs or Costs()
    check_static(schedule)
    return lay(
        schedule, durations(schedule, costs), delays(schedule, costs), waits(schedule, costs)
    )


def lay(schedule: Schedule, duration: np.ndarray, delay: np.ndarray, wait: np.ndarray) -> Timeline:
    """The timeline of a valid table whose actions take these seconds each, flat over the table.

    An action waits, then computes; its input is `delay` on its way. ScheduleError for a deadlock.
    """
    walk = schedule.walk(wait + duration, delay)
    check_deadlock(schedule, walk.head)
    start, end = walk.start + wait, np.array(walk.end)
    sent, arrived = np.full((2, len(start)), np.nan)
    moved = schedule.crossing
    sent[moved] = end[schedule.inputs[moved]]
    arrived[moved] = sent[moved] + delay[moved]
    return Timeline(schedule, start, end, sent, arrived, "simulated")


def compute_seconds(
    costs: Costs, placement: Sequence[int] | np.ndarray, recomputed: bool = False
) -> np.ndarray:
    """[kind, stage]: seconds of an action, without its overhead; of a micro-batch whose forward
    runs again before its backward, or of one that kept its activations."""
    home, n = np.array(placement), len(placement)
    table = np.zeros((len(Kind), n))
    table[Kind.F] = costs.of("forward", n)
    table[Kind.I] = costs.of("input_grad", n)
    table[Kind.W] = costs.of("weight_grad", n)
    table[Kind.B] = table[Kind.I] + table[Kind.W]
    table[Kind.U] = costs.of("update", n)
    table /= costs.of("speed", home.max() + 1)[home]
    if recomputed:
        table[[Kind.B, Kind.I]] += table[Kind.F]
    return table


def transfer_seconds(costs: Costs, placement: Sequence[int] | np.ndarray) -> np.ndarray:
    """[stage]: seconds from a stage to the next one (and back); 0 on the same device."""
    home = np.array(placement)
    return np.where(home[1:] == home[:-1], 0.0, costs.links(len(home)))


def durations(schedule: Schedule, costs: Costs) -> np.ndarray:
    """Seconds of every action, flat over the table."""
    _, stage, kind, microbatch = schedule.columns
    table = compute_seconds(costs, schedule.placement)
    way = costs.links(schedule.stages)
    table[[Kind.SEND_F, Kind.RECV_B], :-1] = table[[Kind.RECV_F, Kind.SEND_B], 1:] = way
    seconds = table[kind, stage]
    recomputed = costs.recompute.mask(schedule.total, schedule.microbatches)[microbatch]
    again = recomputed & ((kind == Kind.B) | (kind == Kind.I))
    seconds[again] += table[Kind.F, stage[again]]
    return seconds


def waits(schedule: Schedule, costs: Costs) -> np.ndarray:
    """Seconds that every action loses before it starts."""
    return np.where(schedule.columns.kind <= Kind.U, costs.overhead, 0.0)


def delays(schedule: Schedule, costs: Costs) -> np.ndarray:
    """Seconds that each action's input is on its way; 0 for one from the same device."""
    moved = schedule.crossing
    delay = np.zeros(len(schedule.inputs))
    delay[moved] = costs.links(schedule.stages)[links(schedule)[moved]]
    return delay


def links(schedule: Schedule) -> np.ndarray:
    """Of every action that takes an output, the link between the stages: s for s and s + 1."""
    stage = schedule.columns.stage
    return np.minimum(stage, stage[schedule.inputs])
