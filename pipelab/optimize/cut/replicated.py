"""PipeDream's optimizer: stages, and how many devices share each of them.

The slowest stage or link sets the pace of a pipeline. With A(j, m) the best pace of everything
before cut j on m devices [arXiv 1806.03377, section 3.2],

    A(j, m) = min over cuts i < j, m' < m of max{ A(i, m - m'), C(i), T(i -> j, m') }

    A(i, m - m')     what is before cut i, on the other devices
    C(i)             both ways over that cut: 2 bytes / bandwidth
    T(i -> j, m')    the last stage, shared by m' devices:

        max{ sum of times, all-reduce } / m'      in the paper
        (sum of times + all-reduce) / m'          in the authors' program

    all-reduce       4 (m' - 1) / m' x bytes of the weights / bandwidth

The program also counts the link behind the last stage, and divides a link among the m' devices. All
links are alike: the program's levels (devices in a machine, machines in a cluster) are left out.
"""

import math
from collections.abc import Callable

import numpy as np

from pipelab.optimize.cut.intervals import Intervals
from pipelab.optimize.cut.profiles import Profile
from pipelab.optimize.cut.stages import CutStage, Partition
from pipelab.table.action import check_counts

MODELS = ("sum", "max")
MOST_SHARED = 1000  # devices: the time goes with their square


def pipedream(
    profile: Profile,
    devices: int,
    *,
    bandwidth: float = 1e9,
    memory: float = math.inf,
    straight: bool = False,
    model: str = "sum",
) -> Partition:
    """The plan with the best pace that uses all devices.

    bandwidth  bytes per second of every link
    memory     bytes of a device. A stage keeps a version of its weights, and its activations, for
               every micro-batch in flight: ceil(devices from here on / replicas)
    straight   one device per stage
    model      "sum", as in the authors' program, or "max", as in the paper

    ValueError for invalid arguments, or, with the bytes missing, if no plan fits.

    >>> from pipelab.optimize.cut.profiles import Layer
    >>> layers = [Layer("convolution", forward=6), Layer("head", forward=2, weights=1e10)]
    >>> [stage.replicas for stage in pipedream(Profile(tuple(layers)), 4).stages]
    [3, 1]
    """
    check_counts(devices=devices)
    if devices > MOST_SHARED:
        raise ValueError(f"devices={devices}: the optimizer takes at most {MOST_SHARED:,}")
    if model not in MODELS:
        raise ValueError(f"model={model!r}: use one of {', '.join(MODELS)}")
    if straight and devices > len(profile.layers):
        raise ValueError(
            f"{devices} devices for {len(profile.layers)} layers, one device per stage: use at "
            f"most {len(profile.layers)}"
        )
    problem = _Problem(profile, devices, bandwidth, model)

    def pace(shared: int, later: int) -> np.ndarray:
        needed = problem.needed(shared, later)
        return np.where(needed <= memory, problem.pace(shared, later), np.inf)

    # [1] the best pace, or by how much the memory falls short
    best = problem.solve(pace, straight)
    if not math.isfinite(best.value(devices)):
        least = problem.solve(problem.needed, straight).value(devices)
        raise ValueError(
            f"no plan for {devices} devices of {memory:,.0f} bytes: the best one in memory "
            f"needs {least:,.0f}, {least - memory:,.0f} more; use more devices or smaller "
            "micro-batches"
        )
    # [2] its stages; what a stage takes longer than its share of the compute is the all-reduce
    found = []
    for a, b, shared in best.stages(devices):
        layers = np.flatnonzero(problem.before[b] & ~problem.before[a])
        seconds = float(problem.shared_seconds(shared)[a, b])
        sync = max(seconds - float(problem.seconds[a, b]) / shared, 0.0)
        found.append(CutStage(tuple(layers.tolist()), seconds, shared, sync))
    return Partition(profile, tuple(found), best.value(devices))


class _Problem:
    """Sums over the layers between any two cuts, [a, b].

    before   [cut, layer], whether the layer is before the cut
    link     seconds of a micro-batch over each cut, both ways
    seconds  on one device; inf where b is not behind a
    """

    def __init__(self, profile: Profile, devices: int, bandwidth: float, model: str) -> None:
        self.devices, self.model = devices, model
        self.before = before = profile.cuts()
        self.link = 2 * profile.crossing(before) / bandwidth
        # b is behind a if it has all layers that a has, and more
        count = before.sum(axis=1)
        # Layers that two cuts both have before them.
        inside = before.astype(int) @ before.T
        behind = (inside == count[:, None]) & (count[:, None] < count)

        def between(name: str) -> np.ndarray:
            total = before @ profile.of(name)
            return np.maximum(total - total[:, None], 0.0)

        weights = between("weights")
        self.allreduce = 4 * weights / bandwidth  # of very many replicas
        self.seconds = np.where(behind, between("time"), np.inf)
        # of every micro-batch in flight: a version of the weights and what it left
        self.kept = np.where(behind, weights + between("activations"), np.inf)

    def solve(self, cost: Callable[[int, int], np.ndarray], straight: bool) -> Intervals:
        """The least maximum of cost(devices of a stage, devices behind it)."""
        table = Intervals(len(self.before), nothing=0)
        for left in range(1, self.devices + 1):
            sizes = [1] if straight else range(left, 0, -1)
            table.fill(left, [(shared, left - shared) for shared in sizes], cost)
        return table

    def needed(self, shared: int, later: int) -> np.ndarray:
        """Bytes of a device where several share a stage, with `later` devices behind it."""
        return math.ceil((shared + later) / shared) * self.kept

    def shared_seconds(self, shared: int) -> np.ndarray:
        """The seconds of a micro-batch on a stage that several devices share."""
        sync = self.allreduce * (shared - 1) / shared
        join = np.add if self.model == "sum" else np.maximum
        return join(self.seconds, sync) / shared

    def pace(self, shared: int, later: int) -> np.ndarray:
        """The same, or a slower link's; the first stage has none before it."""
        found = self.shared_seconds(shared)
        if shared + later == self.devices:  # all devices are its own or behind it
            return found
        if self.model == "max":
            return np.maximum(found, self.link[:, None])
        # its devices share the links, and the one behind counts
        return np.maximum(found, np.maximum(self.link, self.link[:, None]) / shared)
