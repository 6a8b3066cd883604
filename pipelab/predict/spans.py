"""Spans: when each action of a table ran, and when its input came."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from pipelab.table.action import Action, Kind
from pipelab.table.schedule import Schedule


class Span(NamedTuple):
    """An action's compute, in seconds.

    version        the weight version that it reads, or that an update makes; -1 for a transfer
    sent, arrived  of its input, where that came from another device
    """

    device: int
    action: Action
    version: int
    start: float
    end: float
    sent: float | None = None
    arrived: float | None = None


def spans_of(
    schedule: Schedule,
    start: Sequence[float],
    end: Sequence[float],
    moved: Mapping[int, tuple[float | None, float | None]],
) -> tuple[Span, ...]:
    """The spans of a table's actions, in its flat order.

    moved  flat index -> when the action's input was sent and when it arrived, if from elsewhere
    """
    versions, nowhere = schedule.versions, (None, None)
    spans = []
    for i, action in enumerate(schedule.actions):
        stage, kind, number = action
        version = versions[stage, number] if kind < Kind.U else -1
        if kind is Kind.U:
            version = number + 1
        sent, arrived = moved.get(i, nowhere)
        spans.append(Span(schedule.device_of[i], action, version, start[i], end[i], sent, arrived))
    return tuple(spans)


def arrivals(schedule: Schedule, spans: Sequence[Span]) -> list[float]:
    """When each action's input is on its device (-inf: it takes none)."""
    found = []
    for span, source in zip(spans, schedule.inputs, strict=True):
        if span.arrived is not None:
            found.append(span.arrived)
        else:
            found.append(-math.inf if source is None else spans[source].end)
    return found
