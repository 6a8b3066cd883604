"""plan: which schedule, stages, replicas and micro-batch for a model on a machine."""

import argparse
import json
from dataclasses import replace
from typing import Any

from pipelab.cli.files import check_targets, read_profile, write_figure
from pipelab.cli.options import COUNT, Commands, number, share
from pipelab.plan import ASYNCHRONOUS, FLUSH, MACHINES, SPLIT, Machine, Problem, Transformer, plan

TRANSFORMER = ("layers", "hidden", "heads", "sequence", "vocabulary")
MACHINE = {  # options of a machine -> their help
    "flops": "FLOP/s of a device, at most",
    "share": "of the FLOP/s that is reached (default: 0.5)",
    "memory": "bytes of a device",
    "bandwidth": "bytes/s of a device's link to another node",
    "inside": "bytes/s of its link inside the node (default: as --bandwidth)",
    "node": "devices of a node (default: 1)",
    "latency": "seconds of a message (default: 5e-6)",
    "overhead": "seconds that every action takes on top (default: 0)",
}
COUNTS = number(
    lambda text: [int(part) for part in text.split(",")],
    lambda counts: min(counts) >= 1,
    "whole numbers of at least 1, comma-separated",
)
AT_LEAST_0 = number(float, lambda x: 0 <= x < 1e6, "a number from 0 to a million")


def add_to(commands: Commands) -> None:
    """The command."""
    option = commands.add(
        "plan",
        plan_command,
        "which schedule, stages, replicas and micro-batch train a model fastest on a machine",
        "The model is a transformer of the given sizes in half precision, or a measured profile.",
    )
    for name in TRANSFORMER:
        option(f"--{name}", type=COUNT, metavar="N")
    option("--profile", metavar="FILE", help="JSON of `profile`, or PipeDream's graph.txt")
    option(
        "--samples",
        type=COUNT,
        metavar="N",
        help="that the profile's micro-batch had (default: as the file says, else 1)",
    )
    option("--machine", metavar="NAME", help="such as A100-80GB; its numbers can be replaced:")
    for name, text in MACHINE.items():
        option(f"--{name}", type=COUNT if name == "node" else float, metavar="N", help=text)
    option("--devices", type=COUNT, required=True, metavar="N", help="all of them")
    option("--batch", type=COUNT, required=True, metavar="N", help="samples, of all devices")
    option(
        "--tensor",
        type=COUNTS,
        default=[1],
        metavar="T",
        help="how many devices may share every layer: one number, or several (1,2,4,8)",
    )
    option(
        "--optimizer",
        type=AT_LEAST_0,
        metavar="X",
        help="bytes of its state a byte of weights (default: 7, or 2 with --profile)",
    )
    option(
        "--split",
        action="store_true",
        help=f"also schedules whose backwards are split: {', '.join(SPLIT)}",
    )
    option(
        "--asynchronous",
        action="store_true",
        help="also schedules that train with weights of several versions",
    )
    share(option, "json")
    option(
        "--plot", metavar="FILE", help="throughput over memory; its frontier in the answer as well"
    )


def plan_command(o: argparse.Namespace) -> None:
    check_targets(o, "plot")
    problem = Problem(
        _planned_model(o),
        _machine(o),
        o.devices,
        o.batch,
        tensor=tuple(o.tensor),
        schedules=(
            *FLUSH,
            *(SPLIT if o.split else ()),
            *(ASYNCHRONOUS if o.asynchronous else ()),
        ),
        optimizer=o.optimizer,
    )
    answer = plan(problem, frontier=bool(o.plot))
    if o.plot:
        write_figure(o.plot, "plan", answer)
    print(json.dumps(answer.to_json()) if o.json else answer)


def _planned_model(o: argparse.Namespace) -> Any:
    """A measured profile, or a transformer of the given sizes."""
    sizes = {name: getattr(o, name) for name in TRANSFORMER}
    missing = " ".join(f"--{name}" for name, size in sizes.items() if size is None)
    if not o.profile:
        if missing:
            raise ValueError(f"no model: add {missing}, or give --profile FILE")
        return Transformer(**sizes)
    if any(sizes.values()):
        raise ValueError(f"{o.profile} has its own layers: leave out --{' --'.join(TRANSFORMER)}")
    profile = read_profile(o.profile)
    return replace(profile, samples=o.samples or profile.samples)


def _machine(o: argparse.Namespace) -> Any:
    """A machine by its name, by its numbers, or both: the numbers replace its own."""
    numbers = {name: value for name in MACHINE if (value := getattr(o, name)) is not None}
    if o.machine in MACHINES:
        return replace(MACHINES[o.machine], **numbers)
    if o.machine:
        raise ValueError(f"unknown machine {o.machine!r}: there are {', '.join(MACHINES)}")
    if o.profile:
        numbers.setdefault("flops", 1.0)  # the profile has seconds of its own
    missing = [f"--{name}" for name in ("flops", "memory", "bandwidth") if name not in numbers]
    if missing:
        raise ValueError(
            f"no machine: add {' '.join(missing)}, or give --machine {', '.join(MACHINES)}"
        )
    return Machine("this machine", **numbers)
