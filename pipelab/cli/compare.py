"""compare: all schedules on one model, side by side."""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelab import Costs, fit
from pipelab.cli.files import check_targets, read_profile, use_agg, write
from pipelab.cli.models import small_model
from pipelab.cli.options import COST, COUNT, POSITIVE, Commands, share
from pipelab.cli.report import Failure
from pipelab.compare import compare, page, text
from pipelab.partition import split_layers
from pipelab.schedules import make_all, make_for


def add_to(commands: Commands) -> None:
    """The command."""
    option = commands.add(
        "compare", compare_command, "run all schedules on one model, side by side"
    )
    share(option, "model", "seed", "timeout", "json")
    option("--profile", metavar="FILE", help="predict for this profile instead of running a model")
    option("--transfer", type=COST, default=0.0, metavar="S", help="with --profile: latency")
    option(
        "--bandwidth",
        type=POSITIVE,
        default=math.inf,
        metavar="B",
        help="with --profile: bytes a second of every link",
    )
    option("--devices", type=COUNT, default=2, metavar="P")
    option("--microbatches", type=COUNT, default=4, metavar="M")
    option("--batches", type=COUNT, default=2, metavar="K")
    option("--backend", choices=["threads", "processes"])
    option("--html", metavar="FILE", help="write a page with the figures, in one file")


def compare_command(o: argparse.Namespace) -> None:
    check_targets(o, "html")
    o.virtual, o.dropout, o.replicas = 2, 0.0, 1
    costs = Costs()
    if o.profile:
        found = split_layers(read_profile(o.profile), o.devices)
        costs, title = found.costs(transfer=o.transfer, bandwidth=o.bandwidth), Path(o.profile).stem
    sizes = {"virtual": o.virtual, "batches": o.batches}
    made, left_out = make_all(o.devices, o.microbatches, costs, **sizes)
    o.names = list(made)
    if o.profile:
        entries = compare(costs, o.devices, o.microbatches, names=o.names, batches=o.batches)
    else:
        entries, title = _compare_live(o), o.model
    title += f": {o.devices} devices, {o.batches} batches of {o.microbatches} micro-batches"
    if o.html:
        use_agg()
        write(o.html, lambda path: path.write_text(page(entries, title)))
    if o.json:
        shown = [entry.to_json() for entry in entries]
        print(json.dumps({"title": title, "schedules": shown, "left_out": left_out}))
    else:
        print(title, text(entries), *(f"left out: {why}" for why in left_out.values()), sep="\n")
    if failed := [e.schedule.name for e in entries if e.run and not e.run.check.passed]:
        raise Failure(f"the check failed: {', '.join(failed)}")


def _compare_live(o: argparse.Namespace) -> list:
    """A small model run by every schedule, each predicted from the costs of one GPipe run."""
    from pipelab.executors import run

    def measure(name: str, costs: Costs) -> Any:
        sizes = {"virtual": o.virtual, "batches": o.batches}
        schedule, _ = make_for(name, o.devices, o.microbatches, costs, **sizes)
        stages, batches, loss, optimizer = small_model(o, schedule, 4 * o.devices, width=256)
        return run(schedule, stages, batches, loss, optimizer, backend=o.backend, timeout=o.timeout)

    measure("gpipe", Costs())  # warms up
    first = measure("gpipe", Costs())
    costs = fit(first.timeline, first.memory)
    runs = {name: first if name == "gpipe" else measure(name, costs) for name in o.names}
    sizes = (o.devices, o.microbatches)
    entries = compare(costs, *sizes, names=o.names, batches=o.batches, virtual=o.virtual)
    return [replace(entry, run=runs[entry.schedule.name]) for entry in entries]
