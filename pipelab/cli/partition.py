"""partition: a model's layers cut into stages."""

import argparse
import json
import math

from pipelab.cli.files import check_targets, read_profile, write_figure
from pipelab.cli.options import COUNT, POSITIVE, Commands, share
from pipelab.partition import METHODS, pipedream, split_layers


def add_to(commands: Commands) -> None:
    """The command."""
    option = commands.add("partition", partition_command, "cut a model's layers into stages")
    option(
        "--profile", metavar="FILE", required=True, help="a profile: JSON, or PipeDream's graph.txt"
    )
    option("--devices", type=COUNT, metavar="N", required=True)
    option("--method", default="time", metavar="NAME", help=f"{', '.join(METHODS)} (default: time)")
    option("--memory", type=POSITIVE, default=math.inf, metavar="BYTES", help="bytes of a device")
    option(
        "--bandwidth",
        type=POSITIVE,
        default=1e9,
        metavar="B",
        help="pipedream: bytes a second of every link",
    )
    option("--straight", action="store_true", help="pipedream: one device a stage")
    option(
        "--model",
        choices=["sum", "max"],
        default="sum",
        help="pipedream: compute and all-reduce one after the other, or side by side",
    )
    share(option, "json", "plot")


def partition_command(o: argparse.Namespace) -> None:
    check_targets(o, "plot")
    profile = read_profile(o.profile)
    if o.method == "pipedream":
        found = pipedream(
            profile,
            o.devices,
            bandwidth=o.bandwidth,
            memory=o.memory,
            straight=o.straight,
            model=o.model,
        )
    else:
        found = split_layers(profile, o.devices, o.method, memory=o.memory)
    if o.plot:
        write_figure(o.plot, "partition", found)
    print(json.dumps(found.to_json()) if o.json else found)
