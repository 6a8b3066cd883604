"""simulate, schedule, validate, export: commands on tables."""

from json import dumps
from typing import Annotated, Literal

from tyro.conf import Positional, arg

import pipelab
from pipelab import Costs, ScheduleError, simulate, validate
from pipelab.cli.files import check_targets, read_csv, write_figure, write_text
from pipelab.cli.options import Count, Json, Layers, Name, Plot, TableOptions
from pipelab.cli.report import FailedVerdict, show
from pipelab.measure.trace import to_trace

Form = Annotated[tuple[Literal["pipelab", "torch"], ...], arg(metavar="[torch]")]


def simulate_command(
    table: TableOptions,
    costs: Costs,
    csv: Name = None,
    json: Json = False,
    plot: Plot = None,
    trace: Name = None,
) -> None:
    """Predict a schedule's timeline.

    Args:
        csv: write the table; replaces that file
        trace: write a Chrome trace; replaces that file
    """
    check_targets(csv=csv, trace=trace, plot=plot)
    timeline = simulate(table.make(costs), costs)
    write_figure(plot, lambda: pipelab.plot.timeline(timeline))
    write_text(csv, timeline.schedule.to_csv)
    write_text(trace, lambda: dumps(to_trace(timeline)))
    show(json, timeline)


def schedule_command(table: TableOptions, csv: Form | None = None, transfers: bool = False) -> None:
    """Print a schedule's table.

    Args:
        csv: as CSV: ours, or what torch loads
        transfers: with every SEND and RECV written out
    """
    schedule = validate(table.make())
    if transfers and csv == ("torch",):
        raise ValueError("--csv torch holds only compute: leave out --transfers")
    if transfers:
        schedule = schedule.with_transfers()
    if csv == ("torch",):
        text = schedule.to_torch_csv()
    else:
        text = str(schedule) if csv is None else schedule.to_csv()
    print(text.rstrip("\n"))


def export_command(
    table: TableOptions,
    costs: Costs,
    out: Annotated[str, arg(metavar="FOLDER")],
    engine: Annotated[Literal["torch", "torchtitan"], arg(name="for")] = "torch",
    layers: Layers = None,
    samples: Count = 1,
) -> None:
    """Write a folder from which torch's own runtime, or torchtitan, trains by a schedule.

    Args:
        out: a new folder
        engine: what trains from the folder
        layers: of each stage, or one number to divide evenly
        samples: of a micro-batch
    """
    from pipelab.peers.export import export

    check_targets(out=out)
    sizes = {"layers": layers or (), "samples": samples}
    schedule = table.make(costs).without_transfers()  # torch derives its own
    plan = export(schedule, engine, out, costs=costs, **sizes)
    given, exported = plan["makespan"].values()
    print(f"{out}: {plan['schedule']} for {engine}, layers a stage {plan['layers']}")
    print(f"simulated: {given:.6g}")
    if exported != given:
        print(f"with the last stage's I and W as B, for torchtitan's chunked loss: {exported:.6g}")
    start = f"torchrun --nproc-per-node {plan['devices']}"
    train = f"{out}/train.py"
    if engine == "torchtitan":
        train = f"-m torchtitan.train --module llama3 --config llama3_8b $(cat {out}/options.txt)"
    print(f"check: {start} {out}/check.py\ntrain: {start} {train}")


def validate_command(file: Positional[Annotated[str, arg(metavar="FILE")]]) -> None:
    """Check a table: complete, in order, no deadlock."""
    schedule = read_csv(file, as_written=True)
    try:
        validate(schedule)
    except ScheduleError as error:
        raise FailedVerdict(f"not valid: {error}") from None
    transfers = ", its transfers safe for rendezvous" if schedule.has_transfers else ""
    print(
        f"valid: {schedule.devices} devices, {schedule.stages} stages, {schedule.batches} x "
        f"{schedule.microbatches} micro-batches, complete, in order, no deadlock{transfers}"
    )
