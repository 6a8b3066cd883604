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
from itertools import pairwise

import numpy as np

from pipelab.partition.layers import Profile
from pipelab.partition.stages import Partition, Stage

MOST_LAYERS = 5000  # a table of all pairs has to fit the memory
METHODS = ("uniform", "parameters", "type:REGEX", "time", "size", "pipedream")


def split_layers(
    profile: Profile, stages: int, method: str = "time", *, memory: float = math.inf
) -> Partition:
    """The layers in their order, in so many stages, by one of the methods above.

    memory  bytes of a device: of weights, their gradients, and the activations of as many
            micro-batches as 1F1B keeps, stages - s on stage s

    Of the splits with the smallest largest stage, the one whose stages are most alike (least sum of
    squares). ValueError for an unknown method, for more stages than layers, and where memory does
    not suffice: by how much.

    >>> from pipelab.partition.layers import Layer
    >>> layers = tuple(Layer(str(t), forward=t) for t in (1, 2, 3, 4))
    >>> split_layers(Profile(layers), 2).balance
    [3, 1]
    """
    n = len(profile.layers)
    if not 1 <= stages <= n:
        raise ValueError(f"{stages} stages for {n} layers: a stage needs at least one layer")
    if n > MOST_LAYERS:
        raise ValueError(f"{n:,} layers: at most {MOST_LAYERS:,} are split; join some of them")
    if not memory > 0:
        raise ValueError(f"memory={memory}: give bytes above 0")
    cost = _sums(_weights_of(profile, method))
    weights, activations = _sums(profile.of("weights")), _sums(profile.of("activations"))

    def held(s: int) -> np.ndarray:
        return 2 * weights + (stages - s) * activations

    def limited(matrix: np.ndarray) -> Callable[[int], np.ndarray]:
        return lambda s: (
            matrix if memory == math.inf else np.where(held(s) <= memory, matrix, np.inf)
        )

    # [1] the smallest largest stage
    largest, _ = _best(limited(cost), n, stages, np.maximum)
    if largest == math.inf:
        least, _ = _best(held, n, stages, np.maximum)
        raise ValueError(
            f"no split into {stages} stages fits devices of {memory:,.0f} bytes: the best one in "
            f"memory needs {least:,.0f}, {least - memory:,.0f} more; use more devices or smaller "
            "micro-batches"
        )
    # [2] among those, the stages that are most alike
    squares = np.where(cost <= largest * (1 + 1e-12), cost**2, np.inf)
    _, bounds = _best(limited(squares), n, stages, np.add)
    seconds = profile.of("time")
    found = [Stage(tuple(range(a, b)), float(seconds[a:b].sum())) for a, b in pairwise(bounds)]
    return Partition(profile, tuple(found), max(stage.time for stage in found))


def _weights_of(profile: Profile, method: str) -> np.ndarray:
    """What each layer counts."""
    counts = {
        "uniform": np.ones(len(profile.layers)),
        "parameters": profile.of("weights"),
        "time": profile.of("time"),
        "size": profile.of("activations") + 2 * profile.of("weights"),
    }
    if method in counts:
        return counts[method]
    kind, colon, pattern = method.partition(":")
    if kind != "type" or not colon:
        raise ValueError(f"method={method!r}: use one of {', '.join(METHODS)}")
    try:
        matches = [bool(re.search(pattern, x.kind, re.IGNORECASE)) for x in profile.layers]
    except re.error as error:
        raise ValueError(f"method={method!r}: no regular expression ({error})") from None
    if not any(matches):
        kinds = sorted({layer.kind for layer in profile.layers})
        raise ValueError(f"method={method!r}: no layer matches; there are {', '.join(kinds)}")
    return np.array(matches, float)


def _sums(values: np.ndarray) -> np.ndarray:
    """[b, a]: the sum of layers a to b - 1; inf where there are none."""
    ends = np.concatenate([[0.0], np.cumsum(values)])
    sums = np.maximum(ends[:, None] - ends, 0.0)
    return np.where(np.tri(len(ends), k=-1, dtype=bool), sums, np.inf)


def _best(
    cost: Callable[[int], np.ndarray], layers: int, stages: int, join: Callable
) -> tuple[float, list[int]]:
    """The least sum or maximum (`join`) over the stages of cost(stage)[b, a], and the bounds."""
    best = np.full(layers + 1, np.inf)
    best[0] = 0.0
    begins = []
    for s in range(stages):
        values = join(cost(s), best)  # [b, a]: the last stage is a to b - 1
        begins.append(values.argmin(1))
        best = values[np.arange(layers + 1), begins[-1]]
    bounds = [layers]
    for begin in reversed(begins):
        bounds.insert(0, int(begin[bounds[0]]))
    return float(best[-1]), bounds
