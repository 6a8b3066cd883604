"""What the schedules that are made for costs and a memory limit share."""

from collections.abc import Iterable

from pipelab.costs import Costs
from pipelab.memory import memory_used
from pipelab.schedule import Schedule
from pipelab.simulate import simulate

TINY = 1e-9  # of a limit of memory: less is rounding


def fastest(tables: Iterable[Schedule], costs: Costs, memory: float) -> Schedule | None:
    """Of the tables that fit in memory (in micro-batches) the one whose longest device span is
    shortest, then whose makespan is, then that holds least; None where none fits."""

    def span(table: Schedule) -> tuple[float, float, int]:
        timeline = simulate(table, costs)
        return timeline.span, timeline.makespan, max(timeline.peak_in_flight)

    fitting = [t for t in tables if max(memory_used(t, costs)) <= memory * (1 + TINY)]
    return min(fitting, key=span, default=None)
