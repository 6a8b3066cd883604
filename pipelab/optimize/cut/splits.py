"""Splits of a chain of layers into stages of one device each: the largest stage as small as can be.

method        what is balanced                                               whose word
uniform       layers                                                         DeepSpeed
parameters    bytes of weights                                               DeepSpeed
type:REGEX    layers whose class matches, such as type:GPT2Block             DeepSpeed
time          seconds of forward and backward                                torchgpipe
size          bytes of activations, and of weights with their gradients      torchgpipe
"""

import math
import re
from collections.abc import Callable

import numpy as np

from pipelab.optimize.cut.intervals import split_intervals
from pipelab.optimize.cut.profiles import Profile
from pipelab.optimize.cut.stages import CutStage, Partition
from pipelab.optimize.cut.uniform import check_stages

METHODS = ("uniform", "parameters", "type:REGEX", "time", "size", "pipedream")


def split_layers(
    profile: Profile, stages: int, method: str = "time", *, memory: float = math.inf
) -> Partition:
    """The layers, in order, in this many stages, by one of the methods above.

    memory  bytes of a device: of weights, their gradients, and the activations of as many
            micro-batches as 1F1B keeps, stages - s on stage s

    Among splits with the smallest largest stage, the most even one (least sum of squares).
    ValueError for an unknown method, more stages than layers, or, with the bytes missing, too
    little memory.

    >>> from pipelab.optimize.cut.profiles import Layer
    >>> layers = tuple(Layer(str(t), forward=t) for t in (1, 2, 3, 4))
    >>> split_layers(Profile(layers), 2).balance
    [3, 1]
    """
    n = len(profile.layers)
    check_stages(stages, n)
    cost = sums(_weights_of(profile, method))
    weights, activations = sums(profile.of("weights")), sums(profile.of("activations"))

    def held(stage: int) -> np.ndarray:
        return 2 * weights + (stages - stage) * activations

    def limited(matrix: np.ndarray) -> Callable[[int], np.ndarray]:
        return lambda stage: np.where(held(stage) <= memory, matrix, np.inf)

    # [1] the smallest largest stage
    largest, _ = split_intervals(limited(cost), stages)
    if largest == math.inf:
        least, _ = split_intervals(held, stages)
        raise ValueError(
            f"no split into {stages} stages fits devices of {memory:,.0f} bytes: the best one in "
            f"memory needs {least:,.0f}, {least - memory:,.0f} more; use more devices or smaller "
            "micro-batches"
        )
    # [2] among those, the stages that are most alike
    # A sum of floats in another order may be a last digit larger.
    squares = np.where(cost <= largest * (1 + 1e-12), cost**2, np.inf)
    _, balance = split_intervals(limited(squares), stages, np.add)
    layers = np.split(np.arange(n), np.cumsum(balance)[:-1])
    seconds = profile.of("time")
    found = tuple(CutStage(tuple(each.tolist()), float(seconds[each].sum())) for each in layers)
    return Partition(profile, found, max(stage.time for stage in found))


def _weights_of(profile: Profile, method: str) -> np.ndarray:
    """The weight of each layer in the balance."""
    if method == "uniform":
        return np.ones(len(profile.layers))
    if method == "size":
        return profile.of("activations") + 2 * profile.of("weights")
    if method in ("time", "parameters"):
        return profile.of("time" if method == "time" else "weights")
    kind, _, pattern = method.partition(":")
    if kind != "type":
        raise ValueError(f"method={method!r}: use one of {', '.join(METHODS)}")
    try:
        matches = [bool(re.search(pattern, layer.kind, re.I)) for layer in profile.layers]
    except re.error as error:
        raise ValueError(f"method={method!r}: not a regular expression ({error})") from None
    if not any(matches):
        kinds = sorted({layer.kind for layer in profile.layers})
        raise ValueError(f"method={method!r}: no layer matches; there are {', '.join(kinds)}")
    return np.array(matches, float)


def sums(values: np.ndarray) -> np.ndarray:
    """[a, b]: the sum of layers a to b - 1; inf where there are none."""
    # Differences of rounded sums may be a little below 0.
    ends = np.append(0.0, np.cumsum(values))
    return np.where(np.tri(len(ends), dtype=bool), np.inf, np.maximum(ends - ends[:, None], 0.0))
