"""What the workers recorded, as a `Timeline` and a `Memory`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipelab.executors.worker import Bytes, Record
from pipelab.memory import CAUSES, Memory
from pipelab.schedule import Schedule
from pipelab.timeline import Timeline


def timeline_of(schedule: Schedule, records: Sequence[Record], paced: bool) -> Timeline:
    start, end, arrived = (
        np.concatenate([getattr(r, f) for r in records]).astype(float)
        for f in ("start", "end", "arrived")
    )
    sent = np.full(len(start), np.nan)
    sent[schedule.crossing] = end[schedule.inputs[schedule.crossing]]
    return Timeline(
        schedule,
        start,
        end,
        sent,
        np.maximum(arrived, sent),
        "measured",
        sum(r.late for r in records) if paced else None,
    )


def memory_of(timeline: Timeline, records: Sequence[Record]) -> Memory:
    """Steps of memory: what an action takes counts from its start, what it gives back from its end.

    Activations between the two as the most that was held; an input from its arrival to its action's start as a buffer.
    """
    s, found = timeline.schedule, []
    for d, (record, a) in enumerate(zip(records, s.bounds, strict=False)):
        first = float(timeline.start.min())
        start, end, arrived = (
            x[a : s.bounds[d + 1]] for x in (timeline.start, timeline.end, timeline.arrived)
        )
        n = len(start)
        kept = np.array([record.at_start, *record.kept], float).reshape(n + 1, len(Bytes._fields))
        held, most = np.array([0, *record.held], float), np.array(record.most, float)
        received, order = np.array(record.received, float), 4 * np.arange(n)
        steps = [
            (start, order + 1, "activations", most - held[:-1]),
            (end, order + 2, "activations", held[1:] - most),
        ]
        for cause, level in zip(Bytes._fields, kept.T, strict=True):
            steps.append((np.array([first]), np.array([-1]), cause, level[:1]))
            change = np.diff(level)
            steps.append((start, order + 1, cause, np.maximum(change, 0)))
            steps.append((end, order + 2, cause, np.minimum(change, 0)))
        waited = np.flatnonzero(arrived < start)
        steps.append((arrived[waited], order[waited] - 1, "buffers", received[waited]))
        steps.append((start[waited], order[waited], "buffers", -received[waited]))
        for time, place, cause, change in steps:
            some = np.flatnonzero(change)
            same = np.full((2, some.size), [[d], [CAUSES.index(cause)]])
            found.append(np.stack([same[0], time[some], place[some], same[1], change[some]]))
    device, time, order, cause, change = np.concatenate(found, axis=1)
    by_time = np.lexsort((order, time))
    device, time, cause, change = (x[by_time] for x in (device, time, cause, change))
    return Memory(s.devices, device.astype(int), time, cause.astype(int), change, "measured")
