"""compare: all schedules on one model, side by side: predicted, and measured if they run."""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from json import dumps
from pathlib import Path
from typing import Any, Literal

import pipelab
from pipelab import Costs, Schedule, fit, memory, simulate
from pipelab.cli.files import check_targets, read_profile, write_figure
from pipelab.cli.models import small_model
from pipelab.cli.options import Count, Json, Model, Name, Plot, Positive, Seed, Timeout
from pipelab.cli.report import GAP, FailedVerdict, gap_text
from pipelab.optimize.cut import split_layers
from pipelab.optimize.order import gap
from pipelab.predict.costs import Values
from pipelab.runtime.bar import Bar
from pipelab.schedules import make_all, make_for


def compared(schedule: Schedule, costs: Costs, runs: Sequence[Any] = ()) -> dict[str, Any]:
    """One schedule of a comparison, predicted, and measured if it was run: seconds and bytes.

    Of several runs, it holds the middle one, and the spread of all.

    staleness  updates between the version that a forward reads and the one it helps to make
    gap        how far a batch is above a lower bound, see `pipelab.optimize.order.gap`
    at_peak    of every device, by cause

    >>> from pipelab import make
    >>> found = compared(make("gpipe", 4, 8), Costs())
    >>> found["schedule"], found["predicted"]["makespan"]
    ('gpipe', 33.0)
    """
    predicted = simulate(schedule, costs)
    answers = {"predicted": (predicted, memory(predicted, costs))}
    run = _median(runs) if runs else None
    if run:
        answers["measured"] = run.timeline, run.memory
    late = (k // schedule.per_update - read for (_, k), read in schedule.versions.items())
    found: dict[str, Any] = {
        "schedule": schedule.name,
        "weight_versions": schedule.weight_versions,
        "staleness": max(late),
        "gap": gap(schedule, costs, predicted),
    }
    for how, (timeline, kept) in answers.items():
        found[how] = {
            "makespan": timeline.makespan,
            "bubble": timeline.bubble._asdict(),
            "peak": kept.peak(),
            "at_peak": [kept.at_peak(d) for d in range(kept.devices)],
        }
    if run:
        found["check"] = run.check.passed
        taken = [run.timeline.makespan for run in runs]
        found |= {"spread": [min(taken), max(taken)], "repeats": len(taken)}
    return found


def run_in_turn(
    schedules: Mapping[str, Schedule], run: Callable[[Schedule], Any], repeats: int
) -> dict[str, list[Any]]:
    """Runs of each schedule, in turn (A B A B); Ctrl-C keeps the runs so far."""
    runs: dict[str, list[Any]] = {}
    count = len(schedules) * repeats
    with suppress(KeyboardInterrupt), Bar("", count) as bar:
        for name, schedule in [*schedules.items()] * repeats:
            bar.phase(name, 0)
            found = run(schedule)  # before there is a list for it: Ctrl-C may end it
            runs.setdefault(name, []).append(found)
            bar.step()
    if not runs:  # nothing to show
        raise KeyboardInterrupt
    if (done := sum(map(len, runs.values()))) < count:
        print(f"interrupted in run {done + 1} of {count}", file=sys.stderr)
    return runs


def _median(runs: Sequence[Any]) -> Any:
    """The run whose makespan is the middle one; a failed check before any other."""
    failed = [run for run in runs if not run.check.passed]
    return (failed or sorted(runs, key=lambda run: run.timeline.makespan))[len(failed or runs) // 2]


def comparison_text(records: Sequence[dict[str, Any]]) -> str:
    """The comparison as a table, and what its gap is."""
    answers = [how for how in ("predicted", "measured") if how in records[0]]
    columns = "".join(
        f"{'seconds' if how == 'predicted' else how:>11}  bubble       MiB" for how in answers
    )
    if "spread" in records[0]:
        columns += "  least to most"
    lines = [f"{'schedule':<16}{columns}     gap  versions  staleness"]
    for found in records:
        line = f"{found['schedule']:<16}"
        for answer in (found[how] for how in answers):
            line += f"{answer['makespan']:>11.4g}{answer['bubble']['of_total']:>8.1%}"
            line += f"{max(answer['peak']) / 2**20:>10.4g}"
        if "spread" in found:
            line += " " + "-".join(f"{seconds:.3g}" for seconds in found["spread"]).rjust(14)
        versions = max(found["weight_versions"])
        line += f"{gap_text(found['gap']):>8}{versions:>10}{found['staleness']:>11}"
        if "check" in found:
            line += "  passed" if found["check"] else "  FAILED"
        lines.append(line)
    return "\n".join([*lines, GAP])


def compare_command(
    model: Model = "mlp",
    seed: Seed = 0,
    timeout: Timeout = 60.0,
    json: Json = False,
    profile: Name = None,
    transfer: Values = 0.0,
    bandwidth: Positive = math.inf,
    devices: Count = 2,
    microbatches: Count = 4,
    batches: Count = 2,
    backend: Literal["threads", "processes"] | None = None,
    repeats: Count = 3,
    plot: Plot = None,
) -> None:
    """Run all schedules on one model, side by side; Ctrl-C prints the results so far.

    Args:
        profile: predict for this profile instead of running a model
        transfer: with --profile: latency, one number or one per link
        bandwidth: with --profile: bytes per second of every link
        microbatches: per batch
        repeats: runs of each, in turn; the output shows the middle one and the spread
    """
    check_targets(plot=plot)
    costs, title = Costs(), str(model)
    if profile:
        cut = split_layers(read_profile(profile), devices)
        costs, title = cut.costs(transfer=transfer, bandwidth=bandwidth), Path(profile).stem
    sizes: dict[str, Any] = {"virtual": 2, "batches": batches}
    made, left_out = make_all(devices, microbatches, costs, **sizes)
    if model == "mlp" and not profile:
        sliced = [name for name, (table, _) in made.items() if table.slices]
        left_out |= {name: f"{name}: an mlp has no sequences" for name in sliced if made.pop(name)}
    if "gpipe" not in made:  # nor any other: it takes any sizes
        raise ValueError(left_out["gpipe"])

    several: dict[str, list[Any]] = {}
    if not profile:  # each is predicted from the costs of one GPipe run

        def run(schedule: Schedule) -> Any:
            parts = small_model(model, schedule, seed=seed, count=4 * devices, width=256)
            return pipelab.run(schedule, *parts, backend=backend, timeout=timeout)

        run(made["gpipe"][0])  # warms up
        first = run(made["gpipe"][0])
        costs = fit(first.timeline, first.memory)
        made = {name: make_for(name, devices, microbatches, costs, **sizes) for name in made}
        several = run_in_turn({name: table for name, (table, _) in made.items()}, run, repeats)
        made = {name: made[name] for name in several}
    records = [compared(*made[name], several.get(name, ())) for name in made]
    title += f": {devices} devices, {batches} batches of {microbatches} micro-batches"
    measured = {name: _median(of).timeline for name, of in several.items()}
    shown = measured or {name: simulate(*of) for name, of in made.items()}
    write_figure(plot, lambda: pipelab.plot.timelines(shown))
    lines = [title, comparison_text(records), *map("left out: {}".format, left_out.values())]
    text = "\n".join(lines)
    print(dumps({"title": title, "schedules": records, "left_out": left_out}) if json else text)
    if failed := [found["schedule"] for found in records if not found.get("check", True)]:
        raise FailedVerdict(f"the check failed: {', '.join(failed)}")
