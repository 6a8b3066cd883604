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

The program also counts the link behind the last stage, and shares a link among the m' devices. On
several levels (devices in a machine, machines in a cluster), the times of a level are the paces of
the one below on all that it has; with "sum", the all-reduce of a level's first stage is divided by
the devices of the levels below.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipelab.optimize.cut.intervals import Intervals
from pipelab.optimize.cut.profiles import Profile
from pipelab.optimize.cut.stages import Partition, Stage

MODELS = ("sum", "max")


@dataclass(frozen=True)
class NetworkLevel:
    """So many of what the level below is (first: devices), joined by links of so many bytes/s."""

    count: int
    bandwidth: float = 1e9


def pipedream(
    profile: Profile,
    devices: int | Sequence[NetworkLevel],
    *,
    bandwidth: float = 1e9,
    memory: float = math.inf,
    straight: bool = False,
    model: str = "sum",
) -> Partition:
    """The plan with the best pace that uses all devices.

    devices   how many, with links of `bandwidth` bytes a second; or levels, from the devices of a
              machine up
    memory    bytes of a device, on one level. A stage keeps a version of its weights, and its
              activations, for every micro-batch in flight: ceil(devices from here on / replicas)
    straight  one device a stage
    model     "sum", as the authors' program has it, or "max", as the paper has

    ValueError for arguments that make no sense, and where no plan fits: by how much.

    >>> from pipelab.optimize.cut.profiles import Layer
    >>> layers = [Layer("convolution", forward=6), Layer("head", forward=2, weights=1e10)]
    >>> [stage.replicas for stage in pipedream(Profile(tuple(layers)), 4).stages]
    [3, 1]
    """
    levels = list(devices) if isinstance(devices, Sequence) else [NetworkLevel(devices, bandwidth)]
    _check(levels, memory, model, len(profile.layers) if straight else math.inf)
    problem = _Problem(profile, model, memory, straight)
    # [1] level after level, from the devices up
    plans: _Problem | _Plans = problem
    for number, level in enumerate(levels, 1):
        plans = _Plans(problem, level, plans, top=number == len(levels))
    pace = float(plans.pace[0, -1])
    # [2] the plan, or why there is none
    if not math.isfinite(pace):
        least = problem.solve(levels[0].count, problem.needed).value(levels[0].count)
        raise ValueError(
            f"no plan for {levels[0].count} devices of {memory:,.0f} bytes: the best one in memory "
            f"needs {least:,.0f}, {least - memory:,.0f} more; use more devices or smaller "
            "micro-batches"
        )
    found = []
    for a, b, replicas, seconds in plans.stages(0, len(problem.before) - 1):
        layers = np.flatnonzero(problem.before[b] & ~problem.before[a])
        sync = seconds - float(problem.pace[a, b]) / replicas
        found.append(Stage(tuple(layers.tolist()), seconds, replicas, max(sync, 0.0)))
    return Partition(profile, tuple(found), pace)


class _Problem:
    """What lies between any two cuts, [a, b], on one device: the level below all others.

    pace  seconds; inf where b is not behind a
    """

    devices: int = 1

    def __init__(self, profile: Profile, model: str, memory: float, straight: bool) -> None:
        self.model, self.memory, self.straight = model, memory, straight
        self.before = before = profile.cuts()
        self.link = 2 * profile.crossing(before)  # bytes, both ways, at every cut
        count = before.sum(axis=1)
        inside = before.astype(int) @ before.T
        behind = (inside == count[:, None]) & (count[:, None] < count)

        def between(name: str) -> np.ndarray:
            total = before @ profile.of(name)
            return np.maximum(total - total[:, None], 0.0)

        self.weights = between("weights")
        self.pace = np.where(behind, between("time"), np.inf)
        # of every micro-batch in flight: a version of the weights and what it left
        self.kept = np.where(behind, self.weights + between("activations"), np.inf)

    def stages(self, a: int, b: int) -> list[tuple[int, int, int, float]]:
        return [(a, b, 1, float(self.pace[a, b]))]

    def needed(self, units: int, later: int) -> np.ndarray:
        """Bytes of a device where `units` share a stage, with `later` devices behind it."""
        return math.ceil((units + later) / units) * self.kept

    def solve(self, count: int, cost: Any, end: int = -1) -> Intervals:
        """The least maximum of cost(units of a stage, units behind it) up to a cut, on `count`."""
        table = Intervals(len(self.before), nothing=0, end=end)
        for left in range(1, count + 1):
            sizes = [1] if self.straight else range(left, 0, -1)
            table.fill(left, [(units, left - units) for units in sizes], cost)
        return table


class _Plans:
    """The best plans of a level between any two cuts, on all that it has.

    pace     [a, b] seconds; of the top level only up to the last cut
    devices  that it has
    """

    def __init__(
        self, problem: _Problem, level: NetworkLevel, below: "_Problem | _Plans", top: bool
    ) -> None:
        self.problem, self.level, self.below = problem, level, below
        self.devices: int = level.count * below.devices
        last = len(problem.before) - 1
        self.tables = {
            end: problem.solve(level.count, self._pace, end)
            for end in range(last if top else 1, last + 1)
        }
        self.pace = np.full_like(problem.pace, np.inf)
        for end, table in self.tables.items():
            self.pace[:, end] = table.values[level.count]

    def _pace(self, units: int, later: int) -> np.ndarray:
        """[a, b] seconds of a stage, or inf; the first one has no link before it."""
        found = self._shared(self.below.pace, self.problem.weights, units, later)
        if units + later < self.level.count:
            link = self.problem.link / self.level.bandwidth
            if (
                self.problem.model == "sum"
            ):  # its devices share the links, and the one behind counts
                link = link / units
                found = np.maximum(found, link)
            found = np.maximum(found, link[:, None])
        return np.where(self.problem.needed(units, later) <= self.problem.memory, found, np.inf)

    def _shared(self, inside: Any, weights: Any, units: int, later: int) -> Any:
        """Seconds where `units`, each taking `inside`, share a stage."""
        sync = 4 * (units - 1) * weights / (self.level.bandwidth * units)
        if self.problem.model == "max":
            return np.maximum(inside, sync) / units
        first = units + later == self.level.count
        return (inside + (sync / self.below.devices if first else sync)) / units

    def stages(self, a: int, b: int) -> list[tuple[int, int, int, float]]:
        """Of the best plan between two cuts: first cut, last cut, devices, seconds of each."""
        found, later = [], self.level.count
        for first, end, units in self.tables[b].stages(self.level.count, a):
            later -= units
            for begin, stop, devices, seconds in self.below.stages(first, end):
                weights = self.problem.weights[first, end]
                seconds = float(self._shared(seconds, weights, units, later))
                found.append((begin, stop, units * devices, seconds))
        return found


def _check(levels: Sequence[NetworkLevel], memory: float, model: str, layers: float) -> None:
    devices = math.prod(level.count for level in levels)
    if model not in MODELS:
        raise ValueError(f"model={model!r}: use one of {', '.join(MODELS)}")
    if devices < 1:
        raise ValueError(f"{levels}: give at least one device")
    if memory < math.inf and len(levels) > 1:
        raise ValueError("memory with several levels is not supported: give one number of devices")
    if devices > layers:
        raise ValueError(
            f"{devices} devices for {layers} layers, one device a stage: use at most {layers}"
        )
