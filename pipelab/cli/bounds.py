"""How good a schedule can be, and how good the named ones are: what `compare` predicts."""

from collections.abc import Mapping
from typing import Any

from pipelab import Costs, Schedule, simulate
from pipelab.optimize.bounds import Bound
from pipelab.optimize.order import bound, memory_used
from pipelab.table.action import HOST, Kind
from pipelab.table.placement import loop_placement, v_placement

ONE = "one stage a device"
MEMORY = (
    "memory: micro-batches whose activations a device keeps at its peak\n"
    "A bound holds for its own stages a device and this memory: others may be faster."
)


def bounds_of(
    made: Mapping[str, tuple[Schedule, Costs]], costs: Costs, memory: float | None, split: bool
) -> dict[str, Bound]:
    """The bound of each kind of stages that the tables have, by its name."""
    table, _ = made["gpipe"]
    devices, microbatches = table.devices, table.microbatches
    bounds = {ONE: bound(costs, devices, microbatches, memory, split=split)}
    for schedule, own in made.values():
        stages, home = stages_of(schedule), schedule.placement
        if stages not in bounds and not not_bounded(schedule):
            bounds[stages] = bound(own, devices, microbatches, memory, placement=home, split=split)
    return bounds


def beside(schedule: Schedule, costs: Costs, memory: float | None, whole: bool) -> dict[str, Any]:
    """A schedule's part of the JSON object: its seconds and memory, and what has no bound."""
    used, others = max(memory_used(schedule, costs)), not_bounded(schedule)
    halves = ["split backwards"] if whole and Kind.W in schedule.kinds else []
    return {
        "makespan": simulate(schedule, costs).makespan,
        "memory": used,
        "fits": memory is None or used <= memory,
        "stages": stages_of(schedule),
        "not_bounded": [*others, *halves],
    }


def bounds_report(bounds: Mapping[str, Bound]) -> dict[str, Any]:
    """The bounds' part of the JSON object."""
    least = bounds[ONE]
    every = {stages: {"makespan": x.makespan, "bounds": x.by} for stages, x in bounds.items()}
    one = {"makespan": least.makespan, "binding": least.binding, "bounds": least.by}
    return one | {"by_stages": every}


def bounds_text(bounds: Mapping[str, Bound], whole: bool) -> list[str]:
    lines = []
    for stages, least in bounds.items():
        backwards = "whole" if whole else "split"
        lines.append(f"lower bound, {stages}, {backwards} backwards   seconds")
        lines += [f"{name:<45} {seconds:>9.6g}" for name, seconds in least.by.items()]
        lines.append("")
    return lines


def stages_of(schedule: Schedule) -> str:
    """How many stages a device has, and their placement."""
    devices, stages = schedule.devices, schedule.stages
    if stages == devices:
        return ONE
    for shape, placement in (
        ("a loop", loop_placement(devices, stages // devices)),
        ("a V", v_placement(devices)),
    ):
        if schedule.placement == placement:
            return f"{stages // devices} stages a device in {shape}"
    return f"{stages // devices} stages a device"


def not_bounded(schedule: Schedule) -> list[str]:
    """What `bound` has no bound for."""
    found = {
        "copies of the model": schedule.copies > 1,
        "slices of sequences": bool(schedule.slices),
        "overlapping actions": bool(schedule.overlapped),
        "offloading": bool(HOST & schedule.kinds),
    }
    return [name for name, there in found.items() if there]
