"""Activations as schedules are limited in them: in micro-batches, of all of a device's stages.

A micro-batch whose activations every stage of a device keeps counts 1 there; a stage has its share
of that. (Bytes over time, with everything else that a device holds, are `pipelab.memory`.)
"""

from collections.abc import Sequence

import numpy as np

from pipelab.action import Kind
from pipelab.costs import Costs
from pipelab.schedule import Schedule


def shares(costs: Costs, placement: Sequence[int] | np.ndarray, name: str) -> np.ndarray:
    """Of every stage: its `activations`, or its `weight_activations`, in those that its device
    keeps for a micro-batch. A device's stages are alike where it keeps no bytes."""
    home = np.array(placement)
    whole = np.bincount(home, costs.of("activations", len(home)))[home]
    even = 1 / np.bincount(home)[home]
    return np.divide(costs.of(name, len(home)), whole, out=even, where=whole > 0)


def changes(costs: Costs, placement: Sequence[int] | np.ndarray) -> np.ndarray:
    """[kind, stage]: what an action takes (F, as it starts) or gives back (below 0, at its end).

    I gives back what W does not need; where W needs more than I did, I takes that.
    """
    whole, late = (shares(costs, placement, name) for name in ("activations", "weight_activations"))
    change = np.zeros((len(Kind), len(whole)))
    change[Kind.F], change[Kind.B] = whole, -whole
    change[Kind.I], change[Kind.W] = late - whole, -late
    return change


def reserved(change: np.ndarray) -> np.ndarray:
    """The same for split backwards, if a forward takes at once what its I may take more: then W can
    always follow."""
    more = np.maximum(change[Kind.I], 0)
    change = change.copy()
    change[Kind.F] += more
    change[Kind.I] -= more
    return change


def memory_used(schedule: Schedule, costs: Costs) -> list[float]:
    """Per device, the most that it keeps at once: in activations of a micro-batch, as
    `pipelab.search.bound` counts memory.

    >>> from pipelab.schedules import gpipe, interleaved
    >>> memory_used(gpipe(2, 4), Costs()), memory_used(interleaved(2, 4), Costs())
    ([4.0, 4.0], [2.5, 1.5])
    """
    device, stage, kind, _ = schedule.columns
    steps = changes(costs, schedule.placement)[kind, stage]
    rows = (steps[device == d] for d in range(schedule.devices))
    return [float(np.cumsum(row).max(initial=0).round(9)) for row in rows]
