"""Why a run took longer than predicted: the gap between costs and a measured timeline, by cause."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipelab.costs import Costs
from pipelab.fit import fit_seconds, late_starts, uninterrupted
from pipelab.schedule import Schedule
from pipelab.simulate import delays, durations, lay, links, simulate, waits
from pipelab.timeline import SECONDS, Parts, Timeline, scale_of


@dataclass(frozen=True, repr=False)
class Explanation:
    """Where `measured - predicted` comes from; all in seconds.

    predicted, measured  makespans
    causes               cause -> seconds that it adds to the makespan (negative: saves); they sum
                         to the gap
    spread               by how much the same run differs from itself: less than that is no claim

    Shown as a table: the causes beyond the spread, one by one, and the others as one line; seconds
    in a fitting unit, and percent of the measured makespan.
    """

    predicted: float
    measured: float
    causes: dict[str, float]
    spread: float

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

    @property
    def claimed(self) -> dict[str, float]:
        """The causes that are larger than the spread, and than rounding."""
        least = max(self.spread, 1e-9 * max(self.predicted, self.measured))
        return {cause: x for cause, x in self.causes.items() if abs(x) > least}

    def __repr__(self) -> str:
        factor, unit = scale_of(self.measured, SECONDS)
        percent = 100 / self.measured if self.measured else 0.0

        def line(name: str, seconds: float, sign: str = "") -> str:
            amount, share = f"{seconds / factor:{sign}.2f}", f"{seconds * percent:{sign}.1f}"
            return f"{name:<20} {amount:>10} {unit} {share:>7} %"

        claimed = self.claimed
        rest = {"  within the spread": self.gap - sum(claimed.values())} if self.spread else {}
        shown = {f"  {cause}": seconds for cause, seconds in claimed.items()} | rest
        lines = [line(cause, seconds, "+z") for cause, seconds in shown.items()]
        spread = [line("spread (A/A)", self.spread)] if self.spread else []
        return "\n".join(
            [
                line("predicted", self.predicted),
                *lines,
                line("measured", self.measured),
                *spread,
            ]
        )


def explain(costs: Costs, measured: Timeline, repeats: Sequence[Timeline] = ()) -> Explanation:
    """Attribute what a run took longer than these costs predict to causes, in seconds.

    The measured run's own costs (`fit`, with one transfer for each link) replace the predicted ones
    step by step. A cause is the change of the makespan that its step makes, in this order:

    stage s             its forwards, backwards and updates took longer, on a core of their own
    link s-t            what one of the two stages sent was longer on its way to the other
    overhead            what every action lost between the one before it and its own start
    start of device d   its first action began late, though it could start
    first batch         what the first of several batches took longer than the others: it warms up
    core of device d    its actions did not have a core all the time (if that was measured)
    unexplained         spans that overlap, inputs that come after their use

    The causes sum to the gap. What two make only together counts for the later one; what is late
    where there is slack costs nothing, and counts nothing. A paced run makes up in an action for
    what it lost before it, so that its overhead and its stages cancel.

    `repeats` are other timelines of the same run: where makespans differ so much anyway, nothing is
    claimed. Without them the spread is that of the run's own batches (three and more, the first
    left out), if they were independent: their standard deviation x sqrt(batches).

    Raises ValueError for a table with transfers, and for repeats of another table.

    >>> from pipelab import Costs, simulate
    >>> from pipelab.schedules import gpipe
    >>> explain(Costs(), simulate(gpipe(2, 3), Costs(forward=[1, 1.5], transfer=0.25)))
    predicted                 12.00 s    85.7 %
      stage 1                 +1.50 s   +10.7 %
      link 0-1                +0.50 s    +3.6 %
    measured                  14.00 s   100.0 %
    """
    measured.refuse_transfers("explain")
    s, predicted = measured.schedule, simulate(measured.schedule, costs)
    spread = _spread([measured, *repeats])
    if measured.on_core is None:
        causes = _of_work(costs, measured)
    else:
        alone = replace(costs, speed=1.0)
        causes = _of_work(alone, measured)
        taken = _of_cores(measured.parts(), uninterrupted(measured), s)
        expected = _of_cores(predicted.parts(), simulate(s, alone), s)
        causes |= {cause: x - expected[cause] for cause, x in taken.items()}
    causes["unexplained"] = measured.makespan - predicted.makespan - sum(causes.values())
    return Explanation(predicted.makespan, measured.makespan, causes, spread)


def _of_work(costs: Costs, measured: Timeline) -> dict[str, float]:
    """The causes of a run whose actions all have a core to themselves."""
    s, alone = measured.schedule, uninterrupted(measured)
    found = fit_seconds(alone, each_link=True)
    now = [durations(s, costs), delays(s, costs), waits(s, costs)]
    causes, before = {}, lay(s, *now).makespan

    def exchange(cause: str, part: int, new: np.ndarray, of: np.ndarray | bool) -> None:
        nonlocal before
        now[part] = np.where(of, new, now[part])
        makespan = lay(s, *now).makespan
        causes[cause], before = makespan - before, makespan

    duration, delay, wait = durations(s, found), delays(s, found), waits(s, found)
    for n in range(s.stages):
        exchange(f"stage {n}", 0, duration, measured.stage == n)
    for n in range(s.stages - 1):
        exchange(f"link {n}-{n + 1}", 1, delay, links(s) == n)
    exchange("overhead", 2, wait, True)
    late = np.maximum(wait, late_starts(alone))
    for d in range(s.devices):
        exchange(f"start of device {d}", 2, late, measured.device == d)
    if s.batches > 1:
        causes["first batch"] = alone.makespan - before
    return causes


def _of_cores(seen: Parts, alone: Timeline, s: Schedule) -> dict[str, float]:
    """What each device adds to the makespan as its actions take as long as seen, not as alone."""
    duration, _, _, _ = alone.parts()
    causes, before = {}, alone.makespan
    for d in range(s.devices):
        duration = np.where(alone.device == d, seen.duration, duration)
        makespan = lay(s, duration, seen.delay, seen.wait).makespan
        causes[f"core of device {d}"], before = makespan - before, makespan
    return causes


def _spread(runs: Sequence[Timeline]) -> float:
    """By how much the makespans of the same run differ; of one run alone, as its batches vary."""
    first, *others = runs
    for other in others:
        if other.schedule.rows != first.schedule.rows:
            raise ValueError(
                f"explain: repeats of another table, {other.schedule.name}: give timelines of the "
                f"same run, {first.schedule.name}"
            )
    if others:
        return float(np.ptp([run.makespan for run in runs]))
    batches = first.batch_seconds()
    if first.warm.all() or len(batches) < 2:
        return 0.0
    return float(batches.std(ddof=1) * np.sqrt(len(batches) + 1))
