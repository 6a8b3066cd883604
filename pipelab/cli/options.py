"""Options: numbers that make sense, and those of every command that takes a schedule."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from pipelab import SCHEDULES, Costs, Reads, Recompute, Schedule, make
from pipelab.cli.files import read_csv
from pipelab.costs import PASSES
from pipelab.schedules import LARGEST, LARGEST_TRIED

SIZES = ("devices", "microbatches", "virtual", "batches")


def _one_or_more(text: str) -> float | list[float]:
    values = [float(part) for part in text.split(",")]
    return values if len(values) > 1 else values[0]


def number(kind: Callable[[str], Any], fits: Callable[[Any], bool], remedy: str) -> Callable:
    """What reads an option's number, or says what to give."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise argparse.ArgumentTypeError(f"{text!r}: give {remedy}")
        return value

    return read


COUNT = number(int, lambda n: n >= 1, "a whole number of at least 1")
SEED = number(int, lambda n: 0 <= n < 2**32, "a whole number from 0 to 2 ** 32 - 1")
RATE = number(float, lambda x: 0 <= x < 1, "a number of at least 0 and below 1")
SECONDS = number(float, lambda x: 0 < x <= 1e6, "seconds above 0, at most a million")
POSITIVE = number(float, lambda x: x > 0, "a number above 0")
FINITE = number(float, lambda x: 0 < x < math.inf, "a finite number above 0")
COST = number(_one_or_more, lambda x: True, "a number or a comma-separated list of numbers")

COSTS = {  # -> their unit
    **dict.fromkeys((*PASSES, "transfer", "update"), "seconds"),
    "activations": "bytes kept for a backward",
    "weight_activations": "bytes kept from I to W",
}

# Options that several commands have, and that mean the same everywhere.
SHARED: dict[str, dict[str, Any]] = {
    "model": {"choices": ["mlp", "gpt2"], "default": "mlp"},
    "replicas": {
        "type": COUNT,
        "default": 1,
        "metavar": "R",
        "help": "pipelines that train together (with a flush)",
    },
    "dropout": {"type": RATE, "default": 0.0, "metavar": "RATE"},
    "device": {
        "metavar": "NAME",
        "help": "such as cpu or cuda:0, for all stages (default: the GPUs in turn, else cpu)",
    },
    "recompute": {"choices": [mode.value for mode in Recompute], "default": "never"},
    "seed": {"type": SEED, "default": 0},
    "timeout": {
        "type": SECONDS,
        "default": 60.0,
        "metavar": "S",
        "help": "give up when no action ends in this time",
    },
    "json": {"action": "store_true", "help": "print one JSON object"},
    "plot": {"metavar": "FILE", "help": "write the picture (png, svg, pdf)"},
}


def share(option: Callable, *names: str) -> None:
    """Add these of the options that several commands have, by what adds one."""
    for name in names:
        option(f"--{name}", **SHARED[name])


def add_costs(option: Callable, each: str = "stage") -> None:
    """The options of COSTS, by what adds one; a list has a value for `each`."""
    for cost, unit in COSTS.items():
        name, text = cost.replace("_", "-"), f"{unit}: one number or one per {each}"
        option(f"--{name}", type=COST, default=getattr(Costs, cost), metavar="X", help=text)


def costs_of(o: argparse.Namespace) -> Costs:
    """What `add_costs` has read."""
    return Costs(**{name: getattr(o, name) for name in COSTS})


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


class Commands:
    """The commands of a parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._commands = parser.add_subparsers(
            required=True, metavar="COMMAND", parser_class=Parser
        )

    def add(self, name: str, function: Callable, text: str, epilog: str = "") -> Callable:
        """A command; returns what adds an option to it."""
        command = self._commands.add_parser(name, help=text, description=text, epilog=epilog)
        command.set_defaults(command=function, name_of_command=name)
        return command.add_argument

    def with_schedule(self, name: str, function: Callable, text: str) -> Callable:
        """One that takes a schedule by name and sizes, or from a file: see `schedule_of`."""
        epilog = (
            f"A schedule has at most {LARGEST:,} actions (zb, zb_v: {LARGEST_TRIED:,}): a forward "
            "and one or two for the backward of each stage and micro-batch."
        )
        option = self.add(name, function, text, epilog)
        option("name", metavar="NAME", help=f"{', '.join(sorted(SCHEDULES))}, or a CSV file")
        option("--devices", type=int, metavar="P")
        option("--microbatches", type=int, metavar="M", help="per batch")
        chunks = "chunks a device (interleaved, looped_bfs)"
        option("--virtual", type=int, default=1, metavar="V", help=chunks)
        option("--batches", type=int, default=1, metavar="K")
        option(
            "--memory",
            type=POSITIVE,
            metavar="A",
            help="micro-batches whose activations fit on a device (zb, zb_v)",
        )
        rules = [rule.name.lower() for rule in Reads]
        option("--reads", choices=rules, help="which weight version a forward reads")
        return option


def schedule_of(o: argparse.Namespace, costs: Costs | None = None) -> Schedule:
    """The schedule that the options name; `costs` for one that is made for them."""
    name = o.name
    if name.endswith(".csv") or (name not in SCHEDULES and Path(name).is_file()):
        for option in (*SIZES, "reads", "memory"):
            if getattr(o, option, None) not in (None, 1):
                raise ValueError(f"{name} has its own sizes: leave out --{option}")
        return read_csv(name)
    if name not in SCHEDULES:
        make(name, 1, 1)  # raises, with the nearest name
    if o.devices is None or o.microbatches is None:
        raise ValueError(f"{name} needs --devices and --microbatches")
    reads = Reads[o.reads.upper()] if o.reads else None
    more: dict[str, Any] = {"virtual": o.virtual, "batches": o.batches, "reads": reads}
    more["memory"] = getattr(o, "memory", None)  # not an option of every command
    schedule = make(name, o.devices, o.microbatches, **more, costs=costs)
    if (replicas := getattr(o, "replicas", 1)) * schedule.columns.kind.size > LARGEST:
        raise ValueError(f"--replicas {replicas}: more than {LARGEST:,} actions in all; take fewer")
    return schedule
