"""How far two arrays are apart: in another order of their sums, or in rounding."""

from math import inf
from typing import Any

import numpy as np

EPS_32 = float(np.finfo(np.float32).eps)
LIMIT = (
    3.0  # the largest ratio of a right run; another order of its sums has been seen to reach 1.5
)


def ratio(
    run: Any, replayed: Any, size: Any, eps: float, *, terms: int = 1, rounded: float = 0.0
) -> float:
    """The largest |run - replayed| of an element beside what another order of its sums explains.

                    |run - replayed|             w = max(1, sqrt(terms) / 3): many terms may be off
        ratio = --------------------------       by the root of their number, and 3 is the limit
                w eps sum|terms replayed|

    size     of each element: the sum of its terms' absolute values
    eps      of the type in which they are added up
    rounded  where the sum is rounded once more, to a coarser type: half its eps. Only what lies
             beyond that counts
    """
    if np.shape(run) != np.shape(replayed):
        return inf
    gap = distance(run, replayed)
    finite = np.where(np.isfinite(replayed), replayed, 0)
    gap = np.maximum(0.0, gap - rounded * np.abs(finite))
    # Less than the smallest normal number may be rounded to zero.
    tiny = np.finfo(np.float32 if eps >= EPS_32 else np.float64).tiny
    limit = max(1.0, terms**0.5 / LIMIT) * eps * (np.abs(size) + tiny)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratios = np.where(gap == 0, 0.0, gap / limit)
    return float(np.where(np.isnan(ratios), inf, ratios).max(initial=0.0))


def far(run: Any, replayed: Any, truth: Any, eps: float) -> float:
    """How many times further from the truth the run is than one device, over the whole array.

    An eps of the truth counts as near.
    """
    if np.shape(run) != np.shape(truth):
        return inf
    error = norm(distance(run, truth))
    near = norm(distance(replayed, truth)) + eps * norm(np.where(np.isfinite(truth), truth, 0))
    if not error or error == inf or not near:
        return inf if error else 0.0
    return error / near


def distance(a: Any, b: Any) -> np.ndarray:
    """|a - b| of each element: 0 where both are equal or nan, infinite where one is nan."""
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(np.subtract(a, b, dtype=np.result_type(b, np.float64)))
        gap = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, gap)
    return np.where(np.isnan(gap), inf, gap)


def norm(array: Any) -> float:
    """The norm of all elements, which may be large or small."""
    largest = float(np.abs(array).max(initial=0.0))
    if not 0 < largest < inf:
        return largest
    return float(np.linalg.norm(np.ravel(array) / largest)) * largest
