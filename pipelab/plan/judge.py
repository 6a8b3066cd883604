"""What a choice takes: its step and memory by the simulator, and where the step goes."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from pipelab.action import Kind
from pipelab.costs import Recompute
from pipelab.memory import memory
from pipelab.plan.bounds import even_share, least_seconds, work
from pipelab.plan.problem import ASYNCHRONOUS, Choice, Problem
from pipelab.schedule import Schedule
from pipelab.schedules import make
from pipelab.search import gap
from pipelab.simulate import simulate
from pipelab.timeline import Timeline


@dataclass(frozen=True)
class Plan:
    """A choice and what it takes.

    step    seconds of a batch, its flush and all-reduce included
    """

    problem: Problem
    choice: Choice
    step: float

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.problem.batch / self.step

    @cached_property
    def memory(self) -> float:
        """Bytes of the fullest device at its peak."""
        costs = self.problem.costs(self.choice)
        return max(memory(simulate(table(self.choice), costs), costs).peak())

    @cached_property
    def gap(self) -> float:
        """How far the step is above a lower bound: for any order in the same stages and memory, see
        `pipelab.search.gap`. Without a flush above the work of the busiest device."""
        costs = self.problem.costs(self.choice)
        if self.choice.schedule in ASYNCHRONOUS:
            return self.step / least_seconds(self.choice, costs) - 1
        return gap(table(self.choice), costs)

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of the step by cause; they add up to it. One may be below 0.

        Each is what the step, or a bound of it, gains when one more cause is counted.
        """
        choice, costs = self.choice, self.problem.costs(self.choice)
        schedule = table(choice)
        flat = replace(costs, update=0.0, transfer=0.0, bandwidth=np.inf)
        local = replace(self.problem, machine=self.problem.machine.without_links())
        no_recompute = choice._replace(recompute=Recompute.NEVER)
        bare = replace(costs, overhead=0.0)
        total = {
            "compute": even_share(choice, local.costs(choice)),
            "tensor": even_share(choice, costs),
            "imbalance": work(no_recompute, bare).max(),
            "recompute": work(choice, bare).max(),
            "overhead": work(choice, costs).max(),
            "bubble": seconds(choice, simulate(schedule, flat)),
            "transfer": seconds(choice, simulate(schedule, replace(costs, update=0.0))),
            "all-reduce": self.step,
        }
        gains = np.diff(list(total.values()), prepend=0.0)
        gains[np.abs(gains) < 1e-9 * self.step] = 0.0  # rounding
        return dict(zip(total, gains.tolist(), strict=True))

    def to_json(self) -> dict[str, Any]:
        return self.choice.to_json() | {
            "step": self.step,
            "throughput": self.throughput,
            "memory": self.memory,
            "gap": self.gap,
            "parts": self.parts,
        }


def judge(problem: Problem, choice: Choice) -> Plan:
    """Simulate it."""
    timeline = simulate(table(choice), problem.costs(choice))
    return Plan(problem, choice, seconds(choice, timeline))


def table(choice: Choice) -> Schedule:
    """One batch; without a flush four spells, each long enough to fill or drain the pipeline."""
    p, m = choice.pipeline, choice.microbatches
    batches = 4 * _spell(choice) if choice.schedule in ASYNCHRONOUS else 1
    return make(choice.schedule, p, m, virtual=choice.virtual, batches=batches)


def seconds(choice: Choice, timeline: Timeline) -> float:
    """Of a batch: the whole timeline; without a flush the inner spells, on the slowest device.

    Where links are slow enough to set the pace, it is not the same in every batch: a long run takes
    up to 2 % more or less (150 random pipelines).
    """
    if choice.schedule not in ASYNCHRONOUS:
        return float(timeline.end.max())  # with what the first action loses before it starts
    spell = _spell(choice)
    last = np.zeros((4, choice.pipeline))  # [spell, device]: the last backward's end
    backward = timeline.kind == Kind.B
    which = timeline.microbatch[backward] // (spell * choice.microbatches)
    np.maximum.at(last, (which, timeline.device[backward]), timeline.end[backward])
    return float((last[2] - last[0]).max()) / (2 * spell)


def _spell(choice: Choice) -> int:
    """Batches with at least twice as many micro-batches as the pipeline has devices."""
    return -(-2 * choice.pipeline // choice.microbatches)
