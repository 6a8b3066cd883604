"""The step and memory of a choice by the simulator, and where the step's time goes."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from pipelab.optimize.bounds import Bound, gap_of_longer
from pipelab.optimize.plan.choice_costs import costs_of, exchanged, lengths_of, sizes_of_stages
from pipelab.optimize.plan.choices import ASYNCHRONOUS, MADE, PAIRED, Problem, TrainingChoice
from pipelab.optimize.plan.limits import least_seconds, of_devices, work
from pipelab.optimize.plan.repeat import IN_ROUNDS, ends_of, makespan, settled, table_of
from pipelab.predict.costs import Costs, Recompute
from pipelab.predict.memory import memory
from pipelab.predict.simulate import delays, durations, lay, waits
from pipelab.table.action import Kind
from pipelab.table.schedule import Schedule


@dataclass(frozen=True)
class Estimate:
    """A choice and its costs.

    step    seconds of a batch, its flush and all-reduce included
    """

    problem: Problem
    choice: TrainingChoice
    step: float

    @property
    def throughput(self) -> float:
        """Samples per second."""
        return self.problem.batch / self.step

    @cached_property
    def memory(self) -> float:
        """Bytes of the fullest device at its peak."""
        costs = costs_of(self.problem, self.choice)
        table = table_for(self.choice, costs, whole=False)
        timeline = lay(table, durations(table, costs), delays(table, costs), waits(table, costs))
        return max(memory(timeline, costs).peak())

    @cached_property
    def gap(self) -> float:
        """How far the step is above a lower bound for any order in the same stages and memory (see
        `pipelab.optimize.bounds.gap`); without a flush, with pairs or with slices, above
        `least_seconds`."""
        problem, choice = self.problem, self.choice
        pairs = problem.pairs and choice.schedule in PAIRED
        if pairs or choice.slices > 1 or choice.schedule in ASYNCHRONOUS:
            least = Bound(
                {"busiest device": least_seconds(choice, sizes_of_stages(problem, choice))}
            )
            return least.gap(self.step)
        costs = costs_of(problem, choice)
        part, makespan = table_for(choice, costs, whole=False), self.step - costs.overhead
        return gap_of_longer(part, costs, choice.microbatches, makespan)

    @cached_property
    def parts(self) -> dict[str, float]:
        """Seconds of the step by cause; they add up to it. One may be below 0.

        Each is what one more cause adds to the step, or to a bound on it.

        compute     of layers, on a device of the pipeline's average
        tensor      messages among devices that share layers or sequences
        experts     messages to experts and back that no pair hides
        ZeRO        all-gathers of weights in every pass
        imbalance   of the device with most work
        recompute   what a backward makes again, its messages too
        overhead    of every action
        bubble      waiting, with free transfers
        transfer    waiting for transfers between stages
        update      a pass over gradients and state
        all-reduce  of gradients among replicas (with ZeRO, also of weights)
        """
        problem, choice, costs = self.problem, self.choice, costs_of(self.problem, self.choice)
        quiet = replace(problem, blocking=False)  # transfers apart from the devices' own seconds
        no_links = replace(costs_of(quiet, choice), update=0.0, transfer=0.0, bandwidth=np.inf)
        free = replace(
            problem.machine,
            bandwidth=np.inf,
            inside=np.inf,
            spine=np.inf,
            latency=0.0,
            overhead=0.0,
        )
        once = choice._replace(recompute=Recompute.NEVER, keep="all")
        sizes, alone = sizes_of_stages(quiet, choice), replace(quiet, machine=free)
        whole = sizes_of_stages(replace(quiet, zero=min(problem.zero or 0, 1)), once)
        # Seconds of every stage, each with one more cause.
        own = work(once, sizes_of_stages(alone, once))
        tensor = work(once, _without_experts(quiet, once, whole) | {"overhead": 0.0})
        experts = work(once, whole | {"overhead": 0.0})
        plain = work(once, sizes_of_stages(quiet, once) | {"overhead": 0.0})
        again = work(choice, sizes | {"overhead": 0.0})
        passed = replace(costs, update=costs_of(alone, choice).update)  # over the state, once
        total = {
            "compute": own.sum() / choice.pipeline,
            "tensor": tensor.sum() / choice.pipeline,
            "experts": experts.sum() / choice.pipeline,
            "ZeRO": plain.sum() / choice.pipeline,
            "imbalance": of_devices(choice, plain).max(),
            "recompute": of_devices(choice, again).max(),
            "overhead": of_devices(choice, work(choice, sizes)).max(),
            "bubble": steady_seconds(choice, no_links, costs),
            "transfer": steady_seconds(choice, replace(costs, update=0.0), costs),
            "update": steady_seconds(choice, passed, costs),
            "all-reduce": self.step,
        }
        # Each total counts one more cause than the one before it.
        gains = np.diff(list(total.values()), prepend=0.0)
        gains[np.abs(gains) < 1e-9 * self.step] = 0.0  # rounding
        return dict(zip(total, gains.tolist(), strict=True))

    def to_json(self) -> dict[str, Any]:
        names = ("step", "throughput", "memory", "gap", "parts")
        own = {name: getattr(self, name) for name in names}
        return self.choice.to_json() | own | {"lengths": lengths_of(self.problem, self.choice)}


def _without_experts(
    problem: Problem, choice: TrainingChoice, sizes: dict[str, Any]
) -> dict[str, Any]:
    """Sizes of stages whose tokens travel to their experts in no time."""
    bounds = np.cumsum((0, *choice.balance))
    sent = exchanged(problem, choice, bounds[:-1], bounds[1:])
    alone = {name: size for name, size in sizes.items() if name != "together"}
    return alone | {name: alone[name] - sent for name in ("forward", "input_grad")}


def estimate(problem: Problem, choice: TrainingChoice) -> Estimate:
    """Simulate it."""
    found = Estimate(problem, choice, steady_seconds(choice, costs_of(problem, choice)))
    if choice.schedule in MADE:
        _ = found.memory  # while its table is at hand
    return found


def table_for(choice: TrainingChoice, costs: Costs, whole: bool = True) -> Schedule:
    """The table of a batch; without a flush, of four spells, each long enough to fill or drain the
    pipeline.

    whole  False: only enough micro-batches for everything to repeat
    """
    name, p, m = choice.schedule, choice.pipeline, choice.microbatches
    batches = 4 * _spell(choice) if name in ASYNCHRONOUS else 1
    if not whole and name in IN_ROUNDS:
        m, _ = settled(name, p, m, costs, **_sizes(choice))
    return table_of(name, p, m, batches=batches, costs=costs, **_sizes(choice))


def _sizes(choice: TrainingChoice) -> dict[str, Any]:
    names = ("virtual", "longest", "slices")
    return {name: getattr(choice, name) for name in names} | {"memory": choice.room}


def steady_seconds(choice: TrainingChoice, costs: Costs, planned: Costs | None = None) -> float:
    """Seconds of a batch: of all actions; without a flush, of inner spells on the slowest device.
    A searched table is the one for the `planned` costs, by default these.

    If slow links set the pace, batches differ: in a long run they take up to 2 % more or less (150
    random pipelines).
    """
    if choice.schedule in MADE:
        return max(ends_of(table_for(choice, planned or costs), costs))
    if choice.schedule not in ASYNCHRONOUS:
        p, m = choice.pipeline, choice.microbatches
        return makespan(choice.schedule, p, m, costs, **_sizes(choice))
    schedule = table_for(choice, costs)
    ends = ends_of(schedule, costs)
    spell = _spell(choice) * choice.microbatches
    # The first of the four spells fills the pipeline, and the last drains it.
    last = [[0.0] * choice.pipeline for _ in range(4)]  # [spell][device]: the last backward's end
    for action, device, end in zip(schedule.actions, schedule.device_of, ends, strict=True):
        if action.kind is Kind.B:
            which = last[action.microbatch // spell]
            which[device] = max(which[device], end)
    # From the end of the first spell to that of the third: two spells of steady state.
    return max(b - a for a, b in zip(last[0], last[2], strict=True)) / (2 * _spell(choice))


def _spell(choice: TrainingChoice) -> int:
    """How many batches have at least twice as many micro-batches as the pipeline has devices."""
    return -(-2 * choice.pipeline // choice.microbatches)
