"""simulate, schedule, validate: tables alone."""

import argparse
import json
from collections.abc import Callable

from pipelab import Costs, Recompute, ScheduleError, simulate, validate
from pipelab.cli.files import check_targets, read_csv, write, write_figure
from pipelab.cli.options import COST, Commands, schedule_of, share
from pipelab.cli.report import Failure, describe, idle_table
from pipelab.costs import PASSES

COSTS = {
    **dict.fromkeys((*PASSES, "transfer", "update"), "seconds"),
    "activations": "bytes kept for a backward",
    "weight_activations": "bytes kept from I to W",
}


def add_to(commands: Commands) -> None:
    """The three commands."""
    option = commands.with_schedule("simulate", simulate_command, "predict a schedule's timeline")
    add_costs(option)
    option("--csv", metavar="FILE", help="write the table")
    share(option, "recompute", "json", "plot")
    option("--trace", metavar="FILE", help="write a Chrome trace")

    option = commands.with_schedule("schedule", schedule_command, "print a schedule's table")
    forms = ["pipelab", "torch"]
    option(
        "--csv", nargs="?", const="pipelab", choices=forms, help="as CSV: ours, or what torch loads"
    )
    option("--transfers", action="store_true", help="with every SEND and RECV written out")

    option = commands.add(
        "validate", validate_command, "check a table: complete, in order, no deadlock"
    )
    option("file", metavar="FILE")


def add_costs(option: Callable, each: str = "stage") -> None:
    """The options of COSTS, by what adds one; a list has a value for `each`."""
    for cost, unit in COSTS.items():
        name, text = cost.replace("_", "-"), f"{unit}: one number or one per {each}"
        option(f"--{name}", type=COST, default=getattr(Costs, cost), metavar="X", help=text)


def simulate_command(o: argparse.Namespace) -> None:
    check_targets(o, "csv", "trace", "plot")
    given = {name: getattr(o, name) for name in COSTS}
    costs = Costs(**given, recompute=Recompute(o.recompute))
    schedule = schedule_of(o, costs)
    timeline = simulate(schedule, costs)
    if o.plot:
        write_figure(o.plot, "timeline", timeline)
    if o.csv:
        write(o.csv, lambda path: path.write_text(schedule.to_csv()))
    if o.trace:
        write(o.trace, lambda path: path.write_text(json.dumps(timeline.to_trace())))
    if o.json:
        print(json.dumps(describe(timeline)))
    else:
        print(timeline.summary())
        print(idle_table(timeline))


def schedule_command(o: argparse.Namespace) -> None:
    schedule = validate(schedule_of(o))
    if o.transfers and o.csv == "torch":
        raise ValueError("--csv torch is compute only: leave out --transfers")
    if o.transfers:
        schedule = schedule.with_transfers()
    forms = {"pipelab": schedule.to_csv, "torch": schedule.to_torch_csv, None: schedule.__str__}
    print(forms[o.csv]().rstrip("\n"))


def validate_command(o: argparse.Namespace) -> None:
    schedule = read_csv(o.file)
    try:
        validate(schedule)
    except ScheduleError as error:
        raise Failure(f"not valid: {error}") from None
    transfers = ", its transfers safe for rendezvous" if schedule.has_transfers else ""
    print(
        f"valid: {schedule.devices} devices, {schedule.stages} stages, {schedule.batches} x "
        f"{schedule.microbatches} micro-batches, complete, in order, no deadlock{transfers}"
    )
