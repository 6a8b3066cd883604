"""Bounds that no order of a choice's actions can beat: seconds and bytes, without a table.

The search skips what these rule out, and simulates the rest. Costs are `Problem.sizes` of stages:
those of a choice, or all into which layers can be cut (`cuts`).
"""

import math
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import takewhile
from typing import Any

import numpy as np

from pipelab.optimize.plan.choices import ASYNCHRONOUS, IN_A_V, MADE, PAIRED, SLICED, TrainingChoice
from pipelab.predict.costs import Recompute
from pipelab.predict.theory import THEORY
from pipelab.schedules import make, takes
from pipelab.table.action import Kind

SLACK = 1 + 1e-9  # bounds and simulations add up the same numbers in another order
Sizes = Mapping[str, Any]  # numbers, or arrays of them


def work(choice: TrainingChoice, sizes: Sizes) -> np.ndarray:
    """Seconds that each stage computes per batch, without its updates."""
    m = choice.microbatches
    again = {Recompute.NEVER: 0, Recompute.EXCEPT_LAST: m - 1, Recompute.ALWAYS: m}
    once = sizes["forward"] + sizes["input_grad"] + sizes["weight_grad"]
    actions = 3 if choice.schedule in ("zb_h1", "zb_h2") else 2  # others may keep backwards whole
    if "together" in sizes:  # in pairs, it may take less, and lose one overhead
        once, actions = sizes["together"], 1
    once = once + choice.slices * actions * sizes["overhead"]
    return m * once + again[choice.recompute] * sizes["forward"]


def passing(choice: TrainingChoice, sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of a micro-batch, or of a slice, through each stage and over the link after it: on
    the way there, and back."""
    step = sizes["overhead"] + sizes["link"] / choice.slices
    back = sizes["input_grad"] + (0.0 if choice.split else sizes["weight_grad"])
    if choice.recompute is Recompute.ALWAYS:
        back = back + sizes["forward"]
    return sizes["forward"] / choice.slices + step, back / choice.slices + step


def least_seconds(choice: TrainingChoice, sizes: Sizes) -> float:
    """The bound on a batch: warm-up, a device's work, drain; the longest of all devices.

        F0 F1 F2 ...                             device d starts after the forwards before it; its
           .  .  F0 F1 .. the work of d .. B7    last backward is followed by those of the stages
                                          B7     before d, then by an update

    With one chunk a device and free transfers, this is what GPipe and 1F1B take. With split
    backwards, only input gradients are on the way back, and weight gradients may fill the drain.
    Without a flush, it is the busiest device's work.
    """
    p = choice.pipeline
    own = of_devices(choice, work(choice, sizes))
    updates = of_devices(choice, sizes["update"] + sizes["overhead"])
    if choice.schedule in ASYNCHRONOUS:
        often = choice.microbatches if choice.schedule == "pipedream" else 1
        return float((own + often * updates).max())
    there, back = (np.append(0.0, np.cumsum(x[: p - 1])) for x in passing(choice, sizes))
    # the device's own weight gradients, of all micro-batches, may come later
    late = np.zeros(p)
    if choice.split:
        late = of_devices(choice, sizes["weight_grad"] + sizes["overhead"])
    # [1] all the way back to device 0, whose last weight gradient and update follow
    last = sizes["weight_grad"][0] if choice.split else 0.0
    drained = there + own - choice.microbatches * late + back + last + updates[0]
    # [2] the device's own update
    return float(np.maximum(drained, there + own + updates).max())


def least_bytes(choice: TrainingChoice, sizes: Sizes) -> float:
    """Bytes of the fullest device when its first backward starts: all its warm-up is in flight.

    After a round of `interleaved`, as much is in flight, and each chunk has its gradient, too.
    """
    each = counts(choice)
    in_last_chunk = np.arange(len(choice.balance)) >= choice.pipeline * (choice.virtual - 1)
    size = held(choice, sizes, each, in_last_chunk)
    gradients = in_last_chunk * sizes["weights"]
    length = max(choice.pipeline, choice.longest)  # of a round
    whole = choice.microbatches // length * length
    if choice.schedule == "interleaved" and whole >= length + each[1].max():
        size, gradients = size + sizes["weights"] - gradients, sizes["weights"]
    fullest = of_devices(choice, size)
    if choice.recompute is Recompute.EXCEPT_LAST:  # the last micro-batch is in all of its chunks
        last = sizes["optimizer"] + sizes["weights"] + sizes["activations"] + gradients
        fullest = np.maximum(fullest, of_devices(choice, last))
    return float(fullest.max())


def least_of_any_cut(choice: TrainingChoice, whole: Sizes) -> tuple[float, float]:
    """Seconds and bytes that no cut of the layers can beat, from all layers in one stage: some
    device has at least the average. This is cheap, and the same for every cut."""
    in_flight = _fewest_in_flight(
        *(choice.schedule, choice.pipeline, choice.virtual, choice.microbatches, choice.longest),
        choice.slices,
    )
    kept = whole["activations"] if choice.recompute is Recompute.NEVER else 0.0
    # At the end of the batch all gradients are held; before the first backward, none.
    size = whole["optimizer"] + whole["weights"] + max(whole["weights"], in_flight * kept)
    return float(work(choice, whole)) / choice.pipeline, size / choice.pipeline


def fitting(choice: TrainingChoice, sizes: Sizes, memory: float) -> tuple[float, float]:
    """How many micro-batches' activations fit into `memory` bytes, beside weights, gradients and
    the optimizer's state, on the device where the most fit; and the most bytes of one on any."""
    beside = of_devices(choice, sizes["optimizer"] + 2 * sizes["weights"])
    each = of_devices(choice, sizes["activations"])
    fit = np.divide(memory - beside, each, out=np.full_like(each, math.inf), where=each > 0)
    return float(fit.max()), float(each.max())


def held(
    choice: TrainingChoice, sizes: Sizes, counts: Sequence[Any], backward: np.ndarray | bool
) -> np.ndarray:
    """Bytes of a stage.

    counts    versions of its weights, micro-batches in flight, those that wait for W (see `counts`)
    backward  whether one runs, with its gradient and all activations
    """
    versions, in_flight, waiting = counts
    activations, weights = sizes["activations"], sizes["weights"]
    kept = activations
    if choice.recompute is not Recompute.NEVER:
        kept = np.minimum(sizes["boundary"], activations)
    size = sizes["optimizer"] + versions * weights + in_flight * kept
    size = size + waiting * (sizes["weight_activations"] - kept)
    return size + backward * (weights + activations - kept)


def counts(choice: TrainingChoice) -> Any:
    """Per stage: versions of its weights, micro-batches in flight, and those that wait for W."""
    sizes = choice.pipeline, choice.virtual, choice.microbatches
    return _counts(choice.schedule, *sizes, max(choice.pipeline, choice.longest), choice.slices)


@cache
def _fewest_in_flight(schedule: str, p: int, v: int, m: int, longest: int, slices: int) -> int:
    """Of all stages, without micro-batches that wait for W, since these keep less than all."""
    _, in_flight, waiting = _counts(schedule, p, v, m, max(p, longest), slices)
    return max(int((in_flight - waiting).min()), 0)


@cache
def _counts(schedule: str, p: int, v: int, m: int, longest: int, slices: int) -> Any:
    if schedule in (*MADE, *IN_A_V, *PAIRED, *SLICED):
        return _counts_of_table(schedule, p, v, m, slices)
    theory = THEORY[schedule]
    # Interleaved is built for full rounds, and then drops the absent micro-batches.
    absent = -m % p if v > 1 and longest == p else 0
    sizes = p, m + absent, v, 2 * p if schedule in ASYNCHRONOUS else 1
    found = []
    for stage in range(p * v):
        chunk, device = divmod(stage, p)
        # Chunks take turns: a round of forwards each. Any of those may be among the absent ones.
        held_at_once = theory.in_flight(device, *sizes)
        if longest > p:
            held_at_once = min(m * v, held_at_once + (v - 1) * (longest - p))
        turns = np.arange(held_at_once) // longest % v
        flight = max(int((turns == chunk).sum()) - absent, 0)
        waiting = theory.for_weights(device, p, m) or 0
        found.append((theory.versions(device, *sizes), flight, waiting))
    return np.transpose(found)


def _counts_of_table(schedule: str, p: int, v: int, m: int, slices: int) -> Any:
    """`counts` by forwards before a device's first backward; 1 if the table depends on costs."""
    flights = [1.0] * (p * v)
    if schedule not in MADE:
        flights = [0.0] * (p * v)
        chunks = v if takes(schedule, "virtual") else 1
        each = slices if takes(schedule, "slices") else None
        for row in make(schedule, p, min(m, 3 * p), virtual=chunks, slices=each).rows:
            for action in takewhile(lambda action: action.kind is Kind.F, row):
                flights[action.stage] += 1 / slices
    return np.array([[1] * (p * v), flights, [0] * (p * v)])


def of_devices(choice: TrainingChoice, stages: np.ndarray) -> np.ndarray:
    """Per device, the sum over its stages."""
    return np.bincount(choice.home, stages, choice.pipeline)
