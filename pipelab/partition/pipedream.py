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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from pipelab.partition.layers import Profile
from pipelab.partition.stages import Partition, Stage

MOST_DEVICES = 2048  # the steps grow with their square
MOST_ENTRIES = 50_000_000  # of a table, three arrays of them
MODELS = ("sum", "max")


@dataclass(frozen=True)
class Level:
    """So many of what the level below is (first: devices), joined by links of so many bytes/s."""

    count: int
    bandwidth: float = 1e9


@dataclass(frozen=True)
class _Table:
    """The dynamic program's answers: [units - 1, a, b], from cut a to cut b.

    pace   the best one, inf where there is none
    cut    where its last stage begins
    units  that the last stage has
    """

    pace: np.ndarray
    cut: np.ndarray
    units: np.ndarray


def pipedream(
    profile: Profile,
    devices: int | Sequence[Level],
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

    >>> from pipelab.partition.layers import Layer
    >>> layers = [Layer("convolution", forward=6), Layer("head", forward=2, weights=1e10)]
    >>> [stage.replicas for stage in pipedream(Profile(tuple(layers)), 4).stages]
    [3, 1]
    """
    levels = list(devices) if isinstance(devices, Sequence) else [Level(devices, bandwidth)]
    _check(levels, memory, model, len(profile.layers) if straight else None)
    problem = _Problem(profile, levels, memory, model)
    # [1] level after level, from the devices up
    tables: list[_Table] = []
    for number, level in enumerate(levels):
        inside = tables[-1].pace[-1] if tables else problem.time
        top = number == len(levels) - 1
        starts = [0] if top else range(problem.end)
        pace = partial(problem.pace, number, inside)
        tables.append(_solve(pace, level.count, problem.end, starts, straight))
    best = float(tables[-1].pace[-1, 0, problem.end])
    # [2] the plan, or why there is none
    if not math.isfinite(best):
        count = levels[0].count
        needed = _solve(problem.needed, count, problem.end, [0], straight)
        least = needed.pace[-1, 0, problem.end]
        raise ValueError(
            f"no plan for {count} devices of {memory:,.0f} bytes: the best one in memory "
            f"needs {least:,.0f}, {least - memory:,.0f} more; use more devices or smaller "
            "micro-batches"
        )
    before = problem.cuts.before
    plan = []
    for a, b, replicas, seconds in problem.stages(tables, 0, problem.end):
        layers = np.flatnonzero(before[b] & ~before[a])
        sync = seconds - float(problem.time[a, b]) / replicas
        plan.append(Stage(tuple(layers.tolist()), seconds, replicas, max(sync, 0.0)))
    return Partition(profile, tuple(plan), best)


class _Problem:
    """What a stage between any two cuts, [a, b], takes on every level."""

    def __init__(
        self, profile: Profile, levels: Sequence[Level], memory: float, model: str
    ) -> None:
        self.levels, self.memory, self.model = levels, memory, model
        self.cuts = cuts = profile.cuts()
        self.end = len(cuts.before) - 1
        size = sum(level.count for level in levels) * len(cuts.before) ** 2
        if size > MOST_ENTRIES:
            raise ValueError(
                f"{_devices(levels):,} devices and {len(cuts.before):,} cuts: a table of {size:,} "
                f"entries, at most {MOST_ENTRIES:,}; use fewer devices, or join layers"
            )
        self.time, self.weights, activations = (
            cuts.between(profile.of(name)) for name in ("time", "weights", "activations")
        )
        self.per_microbatch = self.weights + activations  # a version and what it left
        self.crossing = profile.crossing(cuts)

    def pace(
        self, number: int, inside: np.ndarray, units: int, later: int, first: bool
    ) -> np.ndarray:
        """Seconds, or inf; the first stage has no link before it."""
        found = self._shared(number, inside, units, first)
        if not first:
            link = 2 * self.crossing / self.levels[number].bandwidth
            link = link / units if self.model == "sum" else link
            found = np.maximum(found, link[:, None])
            found = np.maximum(found, link) if self.model == "sum" else found
        fits = self.needed(units, later) <= self.memory
        return np.where(self.cuts.follows & fits, found, np.inf)

    def needed(self, units: int, later: int, first: bool = False) -> np.ndarray:
        """Bytes of a device, in place of seconds."""
        in_flight = math.ceil((units + later) / units)
        return np.where(self.cuts.follows, in_flight * self.per_microbatch, np.inf)

    def _shared(self, number: int, inside: np.ndarray, units: int, first: bool) -> np.ndarray:
        """Seconds where a level's `units`, each taking `inside`, share a stage."""
        sync = 4 * (units - 1) * self.weights / (self.levels[number].bandwidth * units)
        if self.model == "max":
            return np.maximum(inside, sync) / units
        below = _devices(self.levels[:number])  # in a unit
        return (inside + (sync / below if first else sync)) / units

    def stages(self, tables: Sequence[_Table], a: int, b: int) -> list[tuple[int, int, int, float]]:
        """The plan of the last of these tables' levels between two cuts, on all that it has.

        Of each stage (first cut, last cut, devices, seconds).
        """
        if not tables:
            return [(a, b, 1, float(self.time[a, b]))]
        *below, table = tables
        left = self.levels[len(below)].count
        found: list[tuple[int, int, int, float]] = []
        while left:
            begin, mine = int(table.cut[left - 1, a, b]), int(table.units[left - 1, a, b])
            for first, last, devices, seconds in reversed(self.stages(below, begin, b)):
                whole = np.full_like(self.time, seconds)
                seconds = float(self._shared(len(below), whole, mine, begin == a)[begin, b])
                found.insert(0, (first, last, mine * devices, seconds))
            b, left = begin, left - mine
        return found


def _solve(
    cost: Callable[[int, int, bool], np.ndarray],
    count: int,
    end: int,
    starts: Iterable[int],
    straight: bool,
) -> _Table:
    """The dynamic program on `count` units.

    cost    (units of a stage, units of the stages behind it, whether it is the first) -> [a, b]
    starts  the cuts that a plan may begin at
    """
    pace = np.full((count, end + 1, end + 1), np.inf)
    cut, units = np.zeros(pace.shape, int), np.zeros(pace.shape, int)
    for row in range(count):
        m = row + 1
        later = count - m
        # [1] one stage
        if m == 1 or not straight:
            pace[row] = cost(m, later, True)
            cut[row], units[row] = np.arange(end + 1)[:, None], m
        # [2] one more behind the best plan with the other units
        for mine in range(1, 2 if straight else m):
            if mine == m:
                break
            behind = cost(mine, later, False)
            for a in starts:
                paces = np.maximum(pace[row - mine, a][:, None], behind)  # [cut, b]
                at = paces.argmin(0)
                value = paces[at, np.arange(end + 1)]
                better = value < pace[row, a]
                pace[row, a][better] = value[better]
                cut[row, a][better], units[row, a][better] = at[better], mine
    return _Table(pace, cut, units)


def _devices(levels: Sequence[Level]) -> int:
    return math.prod(level.count for level in levels)


def _check(levels: Sequence[Level], memory: float, model: str, layers: int | None) -> None:
    if model not in MODELS:
        raise ValueError(f"model={model!r}: use one of {', '.join(MODELS)}")
    for level in levels:
        if not isinstance(level.count, int) or isinstance(level.count, bool):
            raise ValueError(f"count={level.count!r} of a level: give a whole number of at least 1")
    if not levels or any(level.count < 1 or not level.bandwidth > 0 for level in levels):
        raise ValueError(f"{levels}: give at least one device, and a bandwidth above 0")
    if (most := max(level.count for level in levels)) > MOST_DEVICES:
        raise ValueError(f"{most} devices on one level: use at most {MOST_DEVICES:,}")
    if not memory > 0:
        raise ValueError(f"memory={memory}: give bytes above 0")
    if memory < math.inf and len(levels) > 1:
        raise ValueError("memory with several levels is not supported: give one number of devices")
    if layers is not None and _devices(levels) > layers:
        raise ValueError(
            f"{_devices(levels)} devices for {layers} layers, one device a stage: use at most "
            f"{layers}"
        )
