"""DualPipeV"""

from collections import deque

import numpy as np

from pipelab.action import Kind, check_counts
from pipelab.building import v_schedule
from pipelab.schedule import Schedule


def dualpipe_v(devices: int, microbatches: int, batches: int = 1) -> Schedule:
    check_counts(devices=devices, microbatches=microbatches, batches=batches)
    full = [_row(d, devices, max(microbatches, 2 * devices)) for d in range(devices)]
    rows = [row[row[:, 2] < microbatches] for row in full]
    return v_schedule("dualpipe_v", rows, devices, microbatches, batches)


def _row(d: int, p: int, m: int) -> np.ndarray:
    """Device d's row for one batch of m >= 2 p micro-batches."""
    later = p - d - 1  # devices behind this one
    first, second = d, 2 * p - d - 1
    forward, backward = [(s, Kind.F) for s in (first, second)], [(s, Kind.B) for s in (first, second)]
    inputs, weights = [(s, Kind.I) for s in (first, second)], [(-1, Kind.W)]
    drain = [backward[1], backward[0]] * (d + 1)
    split = [(s, Kind.I) for s, _ in drain[d + 1 :]]
    steps = [
        *[forward[0]] * (2 * later),
        *[forward[0], forward[1]] * (d + 1),
        *[inputs[1], *weights, forward[1]] * later,
        *[forward[0], backward[1], forward[1], backward[0]] * (m - 2 * p + d + 1),
        *[backward[1], forward[1], backward[0]] * later,
        *drain[: d + 1],
        *split,
        *[*weights, inputs[0]] * later,
        *weights * (d + 1),
    ]
    done = dict.fromkeys([*forward, *backward], 0)
    pending: deque = deque()
    row = []
    for s, kind in steps:
        if kind == Kind.W:
            s, k = pending.popleft()
        else:
            which = s, Kind.F if kind == Kind.F else Kind.B
            k = done[which]
            done[which] += 1
        if kind == Kind.I:
            pending.append((s, k))
        row.append((s, kind, k))
    return np.array(row)
