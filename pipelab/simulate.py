"""Schedule + Costs -> Timeline: every action starts as soon as its row and its input allow."""

from __future__ import annotations

import gc
from contextlib import contextmanager

import numpy as np

from pipelab.action import Kind
from pipelab.costs import Costs
from pipelab.earliest import earliest
from pipelab.schedule import Schedule
from pipelab.timeline import Timeline
from pipelab.validate import check_deadlock, check_static


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """The timeline of a schedule under fixed costs (default: forward, input and weight gradient 1, the rest 0).

    An action starts when the action before it in its row has ended and its input has arrived. In a table with transfers,
    SEND and RECV meet (rendezvous) and both take the link's time; otherwise transfers overlap with compute.
    Raises ScheduleError if the table is not valid, CostError if the costs do not fit it. Time is linear in the table.

    >>> from pipelab.schedules import gpipe
    >>> t = simulate(gpipe(4, 8))
    >>> t.makespan, round(t.bubble.of_total, 4), t.bubble.over_ideal
    (33.0, 0.2727, 0.375)
    """
    check_static(schedule)
    duration, delay = durations(schedule, costs or Costs()), delays(schedule, costs or Costs())
    with _no_collector():
        start, end, head = earliest(
            schedule.bounds,
            schedule.needs.tolist(),
            schedule.columns.device.tolist(),
            duration.tolist(),
            delay.tolist(),
        )
        check_deadlock(schedule, head)
        starts, ends = (np.fromiter(x, float, len(x)) for x in (start, end))
    sent, arrived = np.full_like(starts, np.nan), np.full_like(starts, np.nan)
    moved = schedule.crossing
    sent[moved] = ends[schedule.inputs[moved]]
    arrived[moved] = sent[moved] + delay[moved]
    return Timeline(schedule, starts, ends, sent, arrived, "simulated")


def durations(schedule: Schedule, costs: Costs) -> np.ndarray:
    """Seconds of every action, flat over the table."""
    n = schedule.stages
    device, stage, kind, microbatch = schedule.columns
    forward, input_grad, weight_grad = (
        costs.of(name, n) for name in ("forward", "input_grad", "weight_grad")
    )
    table = np.zeros((len(Kind), n))
    table[Kind.F], table[Kind.I], table[Kind.W], table[Kind.U] = (
        forward,
        input_grad,
        weight_grad,
        costs.of("update", n),
    )
    table[Kind.B] = input_grad + weight_grad
    again = costs.recompute.mask(schedule.total, schedule.microbatches)
    seconds = table[kind, stage]
    rerun = np.isin(kind, (Kind.B, Kind.I))
    seconds[rerun] += np.where(again[microbatch[rerun]], forward[stage[rerun]], 0)
    seconds /= costs.of("speed", schedule.devices)[device]
    seconds[kind <= Kind.U] += costs.overhead
    if schedule.has_transfers:
        link = np.append(costs.links(n), 0)
        up, down = (
            np.isin(kind, (Kind.SEND_F, Kind.RECV_B)),
            np.isin(kind, (Kind.RECV_F, Kind.SEND_B)),
        )
        seconds[up], seconds[down] = link[stage[up]], link[stage[down] - 1]
    return seconds


def delays(schedule: Schedule, costs: Costs) -> np.ndarray:
    """Seconds that each action's input is on its way; 0 for one that does not come from another device."""
    link, out = costs.links(schedule.stages), np.zeros(len(schedule.columns.stage))
    moved = schedule.crossing
    stage = schedule.columns.stage
    out[moved] = link[np.minimum(stage[moved], stage[schedule.inputs[moved]])]
    return out


@contextmanager
def _no_collector():
    """Millions of small objects and no garbage: the cyclic collector only costs time here."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
