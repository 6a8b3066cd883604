"""A measured timeline -> the costs that explain it."""

from typing import Any

import numpy as np

from pipelab.action import Kind
from pipelab.costs import Costs
from pipelab.explain import parts
from pipelab.memory import Memory
from pipelab.timeline import Timeline

SLOW = 1.5  # times the median: slower actions are warming up


def fit(timeline: Timeline, memory: Memory | None = None) -> Costs:
    """The costs under which a simulation takes as long as this timeline; to predict other tables.

    Seconds: the mean over a stage's forwards, backwards, updates, without those that took more than
    1.5 times their median (a first batch that warms up). `overhead` is the mean time that an action
    lost between the one before it and its own start, though its input was there. A makespan is a
    sum along a path: means predict it, medians fall short. A full backward is split evenly into
    input and weight gradient, since it was measured as one. `transfer` is one number: the mean time
    on the way of inputs that were waited for, plus what actions that waited for their input lost
    more than the others.

    Bytes, if the timeline's `memory` is given: weights and optimizer state as the device's peak,
    divided evenly among its stages; activations as its peak divided by the most micro-batches in
    flight, so evenly too. A cause that the memory does not have is 0; so is `boundary`. With
    recomputation, its seconds are part of the backward, and activations are a mean of full and
    recomputed ones.

    Model: an action costs the same in every table. Raises ValueError for a table with transfers and
    for the memory of another number of devices.

    >>> from pipelab import Costs, simulate
    >>> from pipelab.schedules import gpipe
    >>> fit(simulate(gpipe(2, 3), Costs(forward=[1, 3], transfer=0.5))).forward
    (1.0, 3.0)
    """
    timeline.refuse_transfers("fit")
    s, kind = timeline.schedule, timeline.kind
    duration, delay, wait, fed = parts(timeline)
    index = np.arange(len(kind))
    # First actions wait for no action, and an update may wait for other stages' gradients: neither
    # shows lost time.
    lost = _mean(wait[~fed & (kind != Kind.U) & ~np.isin(index, s.bounds)])
    # How long an input took that came early is not always known.
    moved = np.isin(index, s.crossing)
    late = moved & fed
    extra = max(_mean(wait[fed]) - lost, 0.0)

    def seconds(of: Kind) -> np.ndarray:
        means = np.zeros(s.stages)
        for stage in range(s.stages):
            found = duration[(kind == of) & (timeline.stage == stage)]
            if found.size:
                means[stage] = found[found <= SLOW * np.median(found)].mean()
        return means

    half = seconds(Kind.B) / 2
    return Costs(
        forward=seconds(Kind.F).tolist(),
        input_grad=np.where(half > 0, half, seconds(Kind.I)).tolist(),
        weight_grad=np.where(half > 0, half, seconds(Kind.W)).tolist(),
        transfer=_mean(delay[late if late.any() else moved]) + extra,
        update=seconds(Kind.U).tolist(),
        overhead=lost,
        **(_bytes(timeline, memory) if memory else {}),
    )


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
    return {
        cause: [memory.peak(cause)[d] / share[d] for d in s.placement]
        for cause, share in shares.items()
    }


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else 0.0
