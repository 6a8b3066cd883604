"""Where the idle time of a timeline goes."""

from itertools import pairwise

import numpy as np

from pipelab.action import Kind
from pipelab.timeline import Timeline

TRANSFER, HELD, FORWARD, GRADIENT, NOTHING, OVERHEAD = CAUSES = (
    "transfer",
    "held back by the order",
    "waiting for a forward",
    "waiting for a gradient",
    "nothing left",
    "overhead",
)


def attribution(t: Timeline) -> dict[str, np.ndarray]:
    """Idle seconds of each device by cause; they add up to makespan - busy exactly.

    Before an action whose input was sent at e: `transfer` from e until it arrived; before e
    `held back by the order` if the input of a later forward of the row has arrived already and
    the action is no forward, else `waiting for a forward` or `for a gradient`. After the last
    action: `nothing left`. `overhead` is what a measured run shows between the arrival of an
    action's input and its start; 0 in a simulation. Raises ValueError for a table with
    transfers.
    """
    t.refuse_transfers("attribution")
    idle = {cause: np.zeros(t.schedule.devices) for cause in CAUSES}
    begin, finish = float(t.start.min()), float(t.end.max())
    arrival = t.input_arrival()
    for d, (a, b) in enumerate(pairwise(t.schedule.bounds)):
        forward = t.kind[a:b] == Kind.F
        # [1] The gap before each action: from when the row is free to the action's start.
        free = np.append(begin, np.maximum.accumulate(t.end[a:b]))
        opens = free[:-1]
        closes = np.maximum(t.start[a:b], opens)
        # [2] In it, when the input was sent and arrived; an input that never moved: at once.
        sent = np.minimum(np.fmax(t.sent[a:b], opens), closes)
        arrived = np.minimum(np.fmax(t.arrived[a:b], sent), closes)
        # [3] In it, from when on a later forward of the row could have run instead.
        ready = np.where(forward, arrival[a:b], np.inf)
        soonest = np.minimum.accumulate(ready[::-1])[::-1]
        later = np.clip(np.append(soonest, np.inf)[1:], opens, sent)
        held = np.where(forward, 0, sent - later)
        waiting = sent - opens - held
        # [4] Sums over the row.
        idle[TRANSFER][d] = (arrived - sent).sum()
        idle[OVERHEAD][d] = (closes - arrived).sum()
        idle[HELD][d] = held.sum()
        idle[FORWARD][d] = waiting[forward].sum()
        idle[GRADIENT][d] = waiting[~forward].sum()
        idle[NOTHING][d] = finish - free[-1]
    return idle


def per_batch(t: Timeline) -> np.ndarray:
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
