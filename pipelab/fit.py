"""A measured timeline -> the costs that explain it."""

from __future__ import annotations

import numpy as np

from pipelab.action import Kind
from pipelab.costs import Costs
from pipelab.explain import parts
from pipelab.memory import Memory
from pipelab.timeline import Timeline

SLOW = 1.5  # times the median: slower actions are warming up


def fit(timeline: Timeline, memory: Memory | None = None) -> Costs:
    """The costs, in seconds and bytes, under which a simulation takes as long as this timeline; to predict other tables.

    Seconds: the mean over a stage's forwards, backwards, updates, without those that took more than 1.5 times their median
    (a first batch that warms up). `overhead` is the mean time that an action lost between the one before it and its own
    start, though its input was there. A makespan is a sum along a path: means predict it, medians fall short. A full backward
    is split evenly into input and weight gradient, since it was measured as one. `transfer` is one number: the mean time on
    the way of inputs that were waited for, plus what actions that waited for their input lost more than the others.

    Bytes, if the timeline's `memory` is given: weights and optimizer state as the device's peak, divided evenly among its
    stages; activations as its peak divided by the most micro-batches in flight, so evenly too. A cause that the memory
    does not have is 0; so is `boundary`. With recomputation, its seconds are part of the backward, and activations are a
    mean of full and recomputed ones.

    Model: an action costs the same in every table. Raises ValueError for a table with transfers and
    for the memory of another number of devices.

    >>> from pipelab import Costs, simulate
    >>> from pipelab.schedules import gpipe
    >>> fit(simulate(gpipe(2, 3), Costs(forward=[1, 3], transfer=0.5))).forward
    (1.0, 3.0)
    """
    timeline.refuse_transfers("fit")
    s = timeline.schedule
    _, stage, kind, _ = s.columns
    duration, delay, wait, fed = parts(timeline)
    # First actions wait for nothing, and an update may wait for other stages' gradients: neither shows lost time.
    prompt = ~fed & (kind != Kind.U) & ~np.isin(np.arange(len(fed)), s.bounds)
    lost = _mean(wait[prompt])
    moved = np.isin(
        np.arange(len(fed)), s.crossing
    )  # how long an input took that was early is not always known

    def seconds(of: Kind) -> np.ndarray:
        out = np.zeros(s.stages)
        for n in range(s.stages):
            found = duration[(kind == of) & (stage == n)]
            if len(found):
                out[n] = found[found <= SLOW * np.median(found)].mean()
        return out

    half = seconds(Kind.B) / 2
    held = _bytes(timeline, memory) if memory else {}
    return Costs(
        forward=seconds(Kind.F).tolist(),
        input_grad=np.where(half > 0, half, seconds(Kind.I)).tolist(),
        weight_grad=np.where(half > 0, half, seconds(Kind.W)).tolist(),
        transfer=_mean(delay[moved & fed] if (moved & fed).any() else delay[moved])
        + max(_mean(wait[fed]) - lost, 0.0),
        update=seconds(Kind.U).tolist(),
        overhead=lost,
        weights=held.get("weights", 0.0),
        optimizer=held.get("optimizer", 0.0),
        activations=held.get("activations", 0.0),
    )


def _bytes(timeline: Timeline, memory: Memory) -> dict[str, list[float]]:
    """Per stage, each byte cost that a memory shows."""
    s = timeline.schedule
    if memory.devices != s.devices:
        raise ValueError(
            f"fit: memory of {memory.devices} devices for the {s.devices} of {s.name}: give that of the same run"
        )
    stages = np.bincount(s.placement, minlength=s.devices)
    shares = {
        "weights": stages,
        "optimizer": stages,
        "activations": np.maximum(s.peak_in_flight, 1),
    }
    return {
        cause: [memory.peak(cause)[d] / share[d] for d in s.placement]
        for cause, share in shares.items()
    }


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if len(values) else 0.0
