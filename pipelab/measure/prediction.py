"""Why a run took longer than predicted: the gap between costs and a measured timeline, by cause."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import stdev

from pipelab.measure.fit import fit_seconds, late_starts
from pipelab.predict.costs import Costs
from pipelab.predict.simulate import delays, durations, lay, links, waits
from pipelab.predict.timeline import Timeline
from pipelab.show.units import SECONDS, scale_of
from pipelab.table.validate import check_type


@dataclass(frozen=True, repr=False)
class Explanation:
    """Where `measured - predicted` comes from; all in seconds.

    predicted, measured  makespans
    causes               cause -> seconds that it adds to the makespan (negative: saves); they sum
                         to the gap
    spread               how much a repeated run varies: smaller causes are not claimed
    source               of the timeline: "measured" or "simulated"

    Shown as a table: each cause beyond the spread, and the others in one line; seconds in a fitting
    unit, and percent of the measured makespan.
    """

    predicted: float
    measured: float
    causes: dict[str, float]
    spread: float
    source: str = "measured"

    @property
    def gap(self) -> float:
        """Seconds that the run took longer than predicted."""
        return self.measured - self.predicted

    @property
    def error(self) -> float:
        """(predicted - measured) / measured; below 0 if the run took longer than predicted."""
        if not self.measured:
            return math.inf if self.predicted else 0.0
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

        lines = [line("predicted", self.predicted)]
        lines += [line(f"  {cause}", x, "+z") for cause, x in self.claimed.items()]
        measured = line(self.source, self.measured)
        if not self.spread:
            return "\n".join([*lines, measured])
        rest = line("  within the spread", self.gap - sum(self.claimed.values()), "+z")
        return "\n".join([*lines, rest, measured, line("spread (A/A)", self.spread)])


def explain(costs: Costs, measured: Timeline, repeats: Sequence[Timeline] = ()) -> Explanation:
    """Attribute the seconds that a run took longer than these costs predict to causes.

    `diagnose`, which the command `pipelab diagnose` prints, shows a run's own losses instead.

    The measured run's own costs (`fit`, with one transfer for each link) replace the predicted ones
    step by step. Each step's change of the makespan is a cause, in this order:

    stage s             its forwards, backwards and updates took longer
    link s-t            what one of the two stages sent was longer on its way to the other
    overhead            what every action lost between the one before it and its own start
    start of device d   its first action began late, though it could start
    first batch         what the first of several batches took longer than the others: it warms up
    unexplained         spans that overlap, inputs that come after their use

    The causes sum to the gap. An effect that takes two causes counts for the later one; lateness
    within slack costs nothing, and counts nothing. A paced run makes up for losses within the next
    action, so its overhead and its stages cancel.

    `repeats` are other timelines of the same run: differences no larger than between their
    makespans are not claimed. Without them the spread is that of the run's own batches (at least
    three, without the first), taken as independent: their standard deviation x sqrt(batches).

    Raises ValueError for a table with transfers, and for repeats of another table.

    >>> from pipelab import Costs, make, simulate
    >>> explain(Costs(), simulate(make("gpipe", 2, 3), Costs(forward=[1, 1.5], transfer=0.25)))
    predicted                 12.00 s    85.7 %
      stage 1                 +1.50 s   +10.7 %
      link 0-1                +0.50 s    +3.6 %
    simulated                 14.00 s   100.0 %
    """
    check_type(Costs, costs=costs)
    check_type(Timeline, measured=measured)
    measured.refuse_transfers("explain")
    s, spread = measured.schedule, _spread([measured, *repeats])
    found, costs = fit_seconds(measured, each_link=True).of_copies(s), costs.of_copies(s)
    now = {"duration": durations(s, costs), "delay": delays(s, costs), "wait": waits(s, costs)}
    predicted = before = lay(s, **now).makespan
    causes = {}

    def exchange(cause: str, part: str, new: Sequence[float], where: Iterable[bool]) -> None:
        nonlocal before
        now[part] = [x if here else y for x, y, here in zip(new, now[part], where, strict=True)]
        makespan = lay(s, **now).makespan
        causes[cause], before = makespan - before, makespan

    duration, delay, wait, link = durations(s, found), delays(s, found), waits(s, found), links(s)
    for n in range(s.stages):
        exchange(f"stage {n}", "duration", duration, (a.stage == n for a in s.actions))
    for n in range(s.stages - 1):
        exchange(f"link {n}-{n + 1}", "delay", delay, (each == n for each in link))
    exchange("overhead", "wait", wait, (True for _ in wait))
    late = [*map(max, wait, late_starts(measured))]
    for d in range(s.devices):
        exchange(f"start of device {d}", "wait", late, (device == d for device in s.device_of))
    if s.batches > 1:
        causes["first batch"] = measured.makespan - before
    causes["unexplained"] = measured.makespan - predicted - sum(causes.values())
    return Explanation(predicted, measured.makespan, causes, spread, measured.source)


def _spread(runs: Sequence[Timeline]) -> float:
    """By how much the makespans of the same run differ; of one run alone, as its batches vary."""
    first, *others = runs
    for other in others:
        check_type(Timeline, repeats=other)
        if other.schedule.rows != first.schedule.rows:
            raise ValueError(
                f"explain: repeats of another table, {other.schedule.name}: give timelines of the "
                f"same run, {first.schedule.name}"
            )
    if others:
        makespans = [run.makespan for run in runs]
        return max(makespans) - min(makespans)
    batches = first.batch_seconds()
    if all(first.warm) or len(batches) < 2:
        return 0.0
    return stdev(batches) * math.sqrt(len(batches) + 1)
