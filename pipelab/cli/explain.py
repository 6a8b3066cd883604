"""explain: what a run loses, from the traces that it left."""

import argparse
import json

from pipelab import SCHEDULES, Timeline, diagnose
from pipelab.cli.files import check_targets, read_csv, write_figure
from pipelab.cli.options import Commands, share


def add_to(commands: Commands) -> None:
    """The command."""
    option = commands.add("explain", explain_command, "what a run loses, and what would help")
    option(
        "traces",
        nargs="+",
        metavar="TRACE",
        help="JSON of torch.profiler (a file for each rank) or of simulate --trace, or CSV of "
        "spans: stage,kind,microbatch,start,end",
    )
    names = ", ".join(sorted(SCHEDULES))
    option("--schedule", metavar="NAME", help=f"what ran, to be checked: {names}, or a CSV file")
    share(option, "json", "plot")


def explain_command(o: argparse.Namespace) -> None:
    check_targets(o, "plot")
    schedule = o.schedule
    if schedule is not None and schedule.endswith(".csv"):
        schedule = read_csv(schedule)
    timeline = Timeline.from_trace(o.traces, schedule)
    found = diagnose(timeline)
    if o.plot:
        write_figure(o.plot, "timeline", timeline)
    print(json.dumps(found.to_json()) if o.json else found)
