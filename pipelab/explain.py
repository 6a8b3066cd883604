"""Why a run took longer than predicted: the gap between two timelines of one table, by cause."""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from pipelab.action import Kind
from pipelab.timeline import Timeline

CAUSES = IMBALANCE, CONTENTION, MOVING, LAUNCH, WAITING, UNEXPLAINED = (
    "imbalance",
    "contention",
    "transfer",
    "launch overhead",
    "waiting",
    "unexplained",
)


@dataclass(frozen=True, repr=False)
class Explanation:
    """Where `measured - predicted` comes from; all in seconds.

    predicted, measured  makespans
    causes               cause -> seconds that it adds to the makespan (negative: saves); they sum
                         to the gap

    Shown as a table: seconds in a fitting unit, and percent of the measured makespan.
    """

    predicted: float
    measured: float
    causes: dict[str, float]

    @property
    def gap(self) -> float:
        """Seconds that the run took longer than predicted."""
        return self.measured - self.predicted

    @property
    def error(self) -> float:
        """(predicted - measured) / measured; below 0 if the run took longer than predicted."""
        if not self.measured:
            return np.inf if self.predicted else 0.0
        return -self.gap / self.measured

    def __repr__(self) -> str:
        scale, unit = 1e6, "µs"
        if self.measured >= 1e-3:
            scale, unit = (1.0, "s") if self.measured >= 1 else (1e3, "ms")
        percent = 100 / self.measured if self.measured else 0.0

        def line(name: str, seconds: float, sign: str = "") -> str:
            amount, share = f"{seconds * scale:{sign}.2f}", f"{seconds * percent:{sign}.1f}"
            return f"{name:<17} {amount:>10} {unit} {share:>7} %"

        causes = [line(f"  {cause}", seconds, "+z") for cause, seconds in self.causes.items()]
        return "\n".join(
            [line("predicted", self.predicted), *causes, line("measured", self.measured)]
        )


class Parts(NamedTuple):
    """What a timeline is made of, in seconds per action, flat over the table.

    duration  of its compute
    delay     from the end of the action whose output it takes until that is on its device; 0 for
              one that takes no output
    wait      from when it could start, its row free and its input there, to its start
    fed       whether its input came after its row was free
    """

    duration: np.ndarray
    delay: np.ndarray
    wait: np.ndarray
    fed: np.ndarray


def parts(timeline: Timeline) -> Parts:
    """The parts of a timeline; what is negative (a start before the input is there) counts as 0.

    A row is free from the first start of the whole timeline on.
    """
    source, before = timeline.schedule.inputs, timeline.schedule.before
    arrival = timeline.input_arrival()
    free = np.where(before >= 0, timeline.end[before], timeline.start.min())
    duration = timeline.end - timeline.start
    delay = np.where(source >= 0, arrival - timeline.end[source], 0)
    wait = timeline.start - np.maximum(free, arrival)
    duration, delay, wait = np.maximum((duration, delay, wait), 0)
    return Parts(duration, delay, wait, arrival > free)


def explain(predicted: Timeline, measured: Timeline) -> Explanation:
    """Attribute the gap between the makespans of two timelines of one table to causes, in seconds.

    The table is replayed with one ingredient after the other exchanged from predicted to measured,
    in this order; a cause is the change of the makespan that its exchange makes, so that the causes
    sum to the gap:

    imbalance        what a stage's forwards, backwards, ... typically (median) take more than
                     predicted
    contention       what single actions took beyond that: speed that varies, as cores, caches and
                     clocks are shared
    transfer         the time from the end of an action until its output was on the next device
    launch overhead  what a device's actions typically (median) waited although they could start
    waiting          what single actions waited beyond that: for a core, a lock, the interpreter
    unexplained      what the replay with everything measured still misses, such as spans that
                     overlap

    Model: an action starts its wait after its row is free and its input there. What two causes make
    only together counts for the later one; delay where there is slack costs nothing and counts
    nothing. Costs of `fit` have the time lost between actions in their overhead and transfer:
    against a prediction from them a run shows less imbalance and transfer, and more launch overhead
    and waiting. Raises ValueError for different tables and for tables with transfers.

    >>> from pipelab import Costs, simulate
    >>> from pipelab.schedules import gpipe
    >>> slow = Costs(forward=[1, 1.5], transfer=0.25)
    >>> explain(simulate(gpipe(2, 3)), simulate(gpipe(2, 3), slow))
    predicted              12.00 s    85.7 %
      imbalance            +1.50 s   +10.7 %
      contention           +0.00 s    +0.0 %
      transfer             +0.50 s    +3.6 %
      launch overhead      +0.00 s    +0.0 %
      waiting              +0.00 s    +0.0 %
      unexplained          +0.00 s    +0.0 %
    measured               14.00 s   100.0 %
    """
    _check_tables(predicted, measured)
    _, stage, kind, _ = measured.schedule.columns
    device = measured.device
    old, new = parts(predicted), parts(measured)
    alike = stage * len(Kind) + kind  # the same number for the same stage and kind
    typical = np.maximum(old.duration + _medians(new.duration - old.duration, alike), 0)
    launch = np.maximum(old.wait + _medians(new.wait - old.wait, device), 0)
    replays = [
        _replay(measured, old.duration, old.delay, old.wait),
        _replay(measured, typical, old.delay, old.wait),
        _replay(measured, new.duration, old.delay, old.wait),
        _replay(measured, new.duration, new.delay, old.wait),
        _replay(measured, new.duration, new.delay, launch),
        _replay(measured, new.duration, new.delay, new.wait),
    ]
    missed = (measured.makespan - replays[-1]) - (predicted.makespan - replays[0])
    seconds = [*(b - a for a, b in pairwise(replays)), missed]
    causes = dict(zip(CAUSES, seconds, strict=True))
    return Explanation(predicted.makespan, measured.makespan, causes)


def _check_tables(predicted: Timeline, measured: Timeline) -> None:
    predicted.refuse_transfers("explain")
    measured.refuse_transfers("explain")
    a, b = predicted.schedule, measured.schedule
    if a.rows != b.rows:
        names = " and ".join(
            f"{s.name} ({s.devices} devices, {s.batches} x {s.microbatches} micro-batches)"
            for s in (a, b)
        )
        where = f"{a.devices} and {b.devices} rows"
        if a.devices == b.devices:
            where = f"row {next(d for d in range(a.devices) if a.rows[d] != b.rows[d])} differs"
        raise ValueError(
            f"explain: predicted and measured are of different tables, {names}: {where}; simulate "
            "the one that ran"
        )


def _medians(values: np.ndarray, group: np.ndarray) -> np.ndarray:
    """Each value's group's median."""
    medians = np.empty_like(values)
    for g in np.unique(group):
        medians[group == g] = np.median(values[group == g])
    return medians


def _replay(timeline: Timeline, duration: np.ndarray, delay: np.ndarray, wait: np.ndarray) -> float:
    """The makespan when every action starts its wait after it can.

    To the walk, the wait is the first part of an action's time.
    """
    walk = timeline.schedule.walk(wait + duration, delay)
    return float(np.max(walk.end) - np.min(walk.start + wait))
