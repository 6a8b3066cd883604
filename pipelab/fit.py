"""A measured timeline -> the costs that explain it."""

from __future__ import annotations

import numpy as np

from pipelab.action import Kind
from pipelab.costs import Costs
from pipelab.timeline import Timeline


def fit(timeline: Timeline) -> Costs:
    """The median seconds of each stage's forward, backward and update, and of the transfers.

    A full backward is split evenly into input and weight gradient, since it was measured as one.

    >>> from pipelab import Costs, simulate
    >>> from pipelab.schedules import gpipe
    >>> fit(simulate(gpipe(2, 3), Costs(forward=[1, 3], transfer=0.5))).forward
    (1.0, 3.0)
    """
    seconds = timeline.end - timeline.start

    def median(kind: Kind, stage: int) -> float:
        found = seconds[(timeline.kind == kind) & (timeline.stage == stage)]
        return float(np.median(found)) if found.size else 0.0

    stages = range(timeline.schedule.stages)
    full = [median(Kind.B, s) / 2 for s in stages]
    moved = timeline.transfers
    latency = np.maximum(moved["arrived"] - moved["sent"], 0)
    return Costs(
        forward=[median(Kind.F, s) for s in stages],
        input_grad=[full[s] or median(Kind.I, s) for s in stages],
        weight_grad=[full[s] or median(Kind.W, s) for s in stages],
        update=[median(Kind.U, s) for s in stages],
        transfer=float(np.median(latency)) if latency.size else 0.0,
    )
