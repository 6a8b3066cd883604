"""bound: how good a schedule can be, and how good the named ones are."""

import math
from json import dumps
from typing import Any

from pipelab import Costs, Schedule, simulate
from pipelab.cli.options import Count, Json, Positive
from pipelab.cli.report import GAP, gap_text
from pipelab.optimize.bounds import Bound
from pipelab.optimize.order import bound, gap, memory_used
from pipelab.schedules import make_all
from pipelab.table.action import HOST, Kind
from pipelab.table.placement import loop_placement, v_placement

ONE = "one stage a device"


def bound_command(
    devices: Count,
    microbatches: Count,
    costs: Costs,
    memory: Positive = None,
    whole: bool = False,
    virtual: Count = 2,
    json: Json = False,
) -> None:
    """Seconds that no schedule in the same stages can beat, and every named schedule's gap.

    Args:
        devices: one stage each, and those of the named schedules
        microbatches: of the batch
        memory: how many micro-batches' activations fit on a device (default: no limit)
        whole: bounds of schedules that do not split backwards
        virtual: chunks a device (interleaved, looped_bfs)
    """
    split = not whole
    bounds = {ONE: bound(costs, devices, microbatches, memory, split=split)}
    made, left_out = make_all(devices, microbatches, costs, virtual=virtual, memory=memory)
    found: list[dict[str, Any]] = []
    for name, (schedule, own) in made.items():
        used, timeline = max(memory_used(schedule, own)), simulate(schedule, own)
        fits = memory is None or used <= memory
        stages, others = _stages(schedule), _others(schedule)
        if stages not in bounds and not others:
            home = schedule.placement
            bounds[stages] = bound(own, devices, microbatches, memory, placement=home, split=split)
        record = {"schedule": name, "makespan": timeline.makespan, "memory": used, "fits": fits}
        record |= {"gap": gap(schedule, own, timeline), "stages": stages}
        halves = ["split backwards"] if whole and Kind.W in schedule.kinds else []
        found.append(record | {"not_bounded": [*others, *halves]})
    found.sort(key=lambda record: record["makespan"])
    if json:
        limit, least = memory if memory != math.inf else None, bounds[ONE]
        sizes = {"devices": devices, "microbatches": microbatches, "memory": limit, "split": split}
        one = {"makespan": least.makespan, "binding": least.binding, "bounds": least.by}
        every = {stages: {"makespan": x.makespan, "bounds": x.by} for stages, x in bounds.items()}
        named = {"by_stages": every, "schedules": found, "left_out": left_out}
        print(dumps({**sizes, **one, **named}))
        return
    _print(bounds, found, "whole" if whole else "split", limited=memory is not None)
    for why in left_out.values():
        print(f"left out: {why}")


def _print(
    bounds: dict[str, Bound], found: list[dict[str, Any]], backwards: str, limited: bool
) -> None:
    """The bounds, then every schedule's line."""
    for stages, least in bounds.items():
        print(f"lower bound, {stages}, {backwards} backwards   seconds")
        for name, seconds in least.by.items():
            print(f"{name:<45} {seconds:>9.6g}")
        print()
    print(f"schedule          seconds   memory{'  fits' if limited else ''}     gap")
    for each in found:
        fits = ("   yes" if each["fits"] else "    no") if limited else ""
        notes = [*([each["stages"]] if each["stages"] != ONE else []), *each["not_bounded"]]
        line = (
            f"{each['schedule']:<15} {each['makespan']:>9.6g} {each['memory']:>8.4g}{fits}"
            f" {gap_text(each['gap']):>7}   {', '.join(notes)}"
        )
        print(line.rstrip())
    print("memory: micro-batches whose activations a device keeps at its peak", GAP, sep="\n")
    print("A bound holds for its own stages a device and this memory: others may be faster.")


def _stages(schedule: Schedule) -> str:
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


def _others(schedule: Schedule) -> list[str]:
    """What `bound` has no bound for."""
    found = {
        "copies of the model": schedule.copies > 1,
        "slices of sequences": bool(schedule.slices),
        "overlapping actions": bool(schedule.overlapped),
        "offloading": bool(HOST & schedule.kinds),
    }
    return [name for name, there in found.items() if there]
