"""bound: what no schedule can beat, and how far the named ones are from it."""

import argparse
import json
import math
from collections.abc import Callable
from typing import Any

from pipelab import Costs, simulate
from pipelab.cli.options import COUNT, POSITIVE, Commands, add_costs, costs_of, share
from pipelab.compare import GAP, aligned
from pipelab.schedules import make_all
from pipelab.search import bound, gap, memory_used

CELLS: dict[str, Callable[[Any], str]] = {
    "schedule": str,
    "makespan": "{:.6g}".format,
    "memory": "{:.4g}".format,
    "fits": lambda fits: "yes" if fits else "no",
    "gap": "{:.1%}".format,
}


def add_to(commands: Commands) -> None:
    """The command."""
    option = commands.add(
        "bound", bound_command, "seconds that no schedule can beat, and every named schedule's gap"
    )
    option("--devices", type=COUNT, required=True, metavar="P", help="with one stage each")
    option("--microbatches", type=COUNT, required=True, metavar="M")
    add_costs(option, "device")
    option(
        "--memory",
        type=POSITIVE,
        metavar="A",
        help="micro-batches whose activations fit on a device (default: no limit)",
    )
    option("--whole", action="store_true", help="bounds of schedules whose backwards are not split")
    chunks = "chunks a device (interleaved, looped_bfs)"
    option("--virtual", type=COUNT, default=2, metavar="V", help=chunks)
    share(option, "json")


def bound_command(o: argparse.Namespace) -> None:
    costs = costs_of(o)
    least = bound(costs, o.devices, o.microbatches, o.memory, split=not o.whole)
    schedules, left_out = _named(o, costs)
    if o.json:
        limit = o.memory if o.memory != math.inf else None
        sizes = {"devices": o.devices, "microbatches": o.microbatches, "memory": limit}
        bounds = {"makespan": least.makespan, "binding": least.binding, "bounds": least.by}
        named = {"schedules": schedules, "left_out": left_out}
        print(json.dumps({**sizes, "split": not o.whole, **bounds, **named}))
        return
    backwards = "whole" if o.whole else "split"
    rows = [[f"lower bound, one stage a device, {backwards} backwards", "seconds"]]
    rows += [[name, f"{seconds:.6g}"] for name, seconds in least.by.items()]
    table = [["schedule", "seconds", "memory", "fits", "gap"]]
    table += [[cell(found[key]) for key, cell in CELLS.items()] for found in schedules]
    if o.memory is None:
        table = [[*row[:3], row[4]] for row in table]
    print(aligned(rows), "", aligned(table), sep="\n")
    print("memory: micro-batches whose activations a device keeps at its peak", GAP, sep="\n")
    for why in left_out.values():
        print(f"left out: {why}")


def _named(o: argparse.Namespace, costs: Costs) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Of every named schedule one batch, the fastest first; and why some are left out."""
    found = []
    made, left_out = make_all(o.devices, o.microbatches, costs, virtual=o.virtual, memory=o.memory)
    for name, (schedule, own) in made.items():
        used = max(memory_used(schedule, own))
        found.append(
            {
                "schedule": name,
                "makespan": simulate(schedule, own).makespan,
                "memory": used,
                "fits": o.memory is None or used <= o.memory,
                "gap": gap(schedule, own),
            }
        )
    return sorted(found, key=lambda x: x["makespan"]), left_out
