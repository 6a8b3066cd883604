"""search: the best schedule for costs and a memory limit."""

import argparse
import json
import sys

from pipelab import Costs, simulate
from pipelab.cli.files import check_targets, write, write_figure
from pipelab.cli.options import COUNT, POSITIVE, Commands, number, share
from pipelab.cli.report import describe, idle_table
from pipelab.cli.tables import COSTS, add_costs
from pipelab.search import search

PLACEMENTS = ("loop", "v")
TIME = number(float, lambda x: 0 <= x <= 1e6, "seconds, at most a million")
WORKERS = number(int, lambda n: n >= 0, "a whole number of at least 0")


def add_to(commands: Commands) -> None:
    """The command."""
    option = commands.add(
        "search",
        search_command,
        "find the fastest schedule of one batch for costs and a memory limit, and prove how good",
        "Needs OR-Tools (the extra `search`). Ctrl-C ends the search with the best so far.",
    )
    option("--devices", type=COUNT, required=True, metavar="P")
    option("--microbatches", type=COUNT, required=True, metavar="M")
    add_costs(option)
    option(
        "--memory",
        type=POSITIVE,
        metavar="A",
        help="micro-batches whose activations fit on a device (default: P; inf: no limit)",
    )
    option("--placement", choices=PLACEMENTS, default="loop", help="of stages on devices")
    option("--virtual", type=COUNT, default=1, metavar="V", help="stages a device (loop)")
    option("--whole", action="store_true", help="no backward is split into I and W")
    text = "at most (default: 60; 0: heuristics alone, which need no OR-Tools)"
    option("--seconds", type=TIME, default=60.0, metavar="S", help=text)
    option("--workers", type=WORKERS, default=0, metavar="N", help="threads (default: all cores)")
    option("--csv", metavar="FILE", help="write the table")
    share(option, "json", "plot")


def search_command(o: argparse.Namespace) -> None:
    check_targets(o, "csv", "plot")
    costs = Costs(**{name: getattr(o, name) for name in COSTS})
    shown = sys.stderr.isatty()
    found = search(
        costs,
        o.devices,
        o.microbatches,
        memory=o.memory,
        placement=o.placement,
        virtual=o.virtual,
        split=not o.whole,
        seconds=o.seconds,
        workers=o.workers,
        progress=_progress if shown else None,
    )
    if shown:
        print("\r\033[K", end="", file=sys.stderr)
    timeline = simulate(found, costs)
    if o.plot:
        write_figure(o.plot, "timeline", timeline)
    if o.csv:
        write(o.csv, lambda path: path.write_text(found.to_csv()))
    if o.json:
        print(json.dumps(describe(timeline) | {"proof": found.proof.to_json()}))
    else:
        print(timeline.summary())
        print(idle_table(timeline))
        print(found.proof)


def _progress(makespan: float, bound: float) -> None:
    """One line, written over."""
    text = f"\r\033[Kbest {makespan:.6g}, none below {bound:.6g}"
    print(text, end="", file=sys.stderr, flush=True)
