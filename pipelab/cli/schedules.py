"""simulate, validate, export: commands on tables."""

import sys
from json import dumps
from typing import Annotated, Any

import pipelab
from pipelab import ScheduleError
from pipelab.cli.files import check_targets, write_figure, write_text
from pipelab.cli.options import UNIT, Count, OfCosts, Table, layers, one_of
from pipelab.cli.parser import command
from pipelab.cli.report import SIZES, FailedVerdict, show
from pipelab.measure.trace import to_trace


@command(
    "gpipe --devices 4 --microbatches 8 --plot gpipe.png",
    "interleaved --devices 4 --microbatches 8 --virtual 2 --costs forward=1,transfer=0.25",
)
def simulate(
    table: Table,
    *,
    costs: OfCosts = UNIT,
    csv: str | None = None,
    json: bool = False,
    plot: str | None = None,
    trace: str | None = None,
) -> None:
    """Predict a schedule's timeline."""
    check_targets(csv=csv, trace=trace, plot=plot)
    timeline = pipelab.simulate(table.make(costs), costs)
    write_figure(plot, lambda: pipelab.plot.timeline(timeline))
    write_text(csv, timeline.schedule.to_csv)
    write_text(trace, lambda: dumps(to_trace(timeline)))
    show(json, timeline)


@command(
    "gpipe --devices 4 --microbatches 8",
    "mine.csv",
)
def validate(
    table: Table,
    *,
    csv: str | None = None,
    torch: bool = False,
    transfers: bool = False,
    json: bool = False,
) -> None:
    """Print a table and check it: complete, in order, no deadlock. Status 1 if it is not.

    csv FILE  write the table (/dev/stdout: print it); replaces that file
    torch  --csv in torch's form, which its runtime loads
    transfers  with every SEND and RECV written out
    """
    check_targets(csv=csv)
    if transfers and torch:
        raise ValueError("--torch holds only compute: leave out --transfers")
    schedule = table.make(as_written=True)
    try:
        pipelab.validate(schedule)
    except ScheduleError as error:
        if json:
            print(dumps({"valid": False, "reason": str(error)}))
        raise FailedVerdict(f"not valid: {error}") from None
    if transfers:
        schedule = schedule.with_transfers()
    write_text(csv, schedule.to_torch_csv if torch else schedule.to_csv)
    if json:
        sizes = {name: getattr(schedule, name) for name in ("name", *SIZES)}
        rows = [[str(action) for action in row] for row in schedule.rows]
        print(dumps({"valid": True, "schedule": sizes.pop("name"), **sizes, "rows": rows}))
        return
    safe = ", its transfers safe for rendezvous" if schedule.has_transfers else ""
    if not csv:
        print(str(schedule).rstrip("\n"))
    print(
        f"valid: {schedule.devices} devices, {schedule.stages} stages, {schedule.batches} x "
        f"{schedule.microbatches} micro-batches, complete, in order, no deadlock{safe}",
        file=sys.stderr if csv == "/dev/stdout" else None,
    )


@command(
    "zb_v --devices 4 --microbatches 8 --for torchtitan --layers 32 --out FOLDER",
    "searched.csv --out FOLDER",
)
def export(
    table: Table,
    *,
    out: str,
    for_: Annotated[Any, one_of("torch", "torchtitan")] = "torch",
    layers: Annotated[Any, layers] = (),
    samples: Count = 1,
    json: bool = False,
) -> None:
    """Write a folder from which torch's own runtime, or torchtitan, trains by a schedule.

    For a table that was made for other costs, give the CSV file that simulate or search wrote.

    out FOLDER  a new folder
    for_ WORD  what trains: torch or torchtitan
    layers N,...  of each stage, or one number to divide evenly
    samples N  of a micro-batch
    """
    from pipelab.peers import export as peers

    check_targets(out=out)
    schedule = table.make().without_transfers()  # torch derives its own
    plan = peers.export(schedule, for_, out, layers=layers, samples=samples)
    start = f"torchrun --nproc-per-node {plan['devices']}"
    check, train = f"{start} {out}/check.py", f"{start} {out}/train.py"
    if for_ == "torchtitan":
        train = f"{start} -m torchtitan.train --module llama3 --config llama3_8b "
        train += f"$(cat {out}/options.txt)"
    if json:
        print(dumps(plan | {"out": out, "check": check, "train": train}))
        return
    given, exported = plan["makespan"].values()
    print(f"{out}: {plan['schedule']} for {for_}, layers a stage {plan['layers']}")
    print(f"simulated: {given:.6g}")
    if exported != given:
        print(f"with the last stage's I and W as B, for torchtitan's chunked loss: {exported:.6g}")
    print(f"check: {check}\ntrain: {train}")
