"""compare: all schedules on one model, side by side: run, or predicted and beside their bounds."""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pipelab
from pipelab import Costs, Schedule, fit, simulate
from pipelab.cli.bounds import MEMORY, ONE, beside, bounds_of, bounds_report, bounds_text
from pipelab.cli.files import check_targets, read_profile, write_figure
from pipelab.cli.models import small_model
from pipelab.cli.options import Backend, Count, Finite, OfCosts, Positive, Seed
from pipelab.cli.parser import command
from pipelab.cli.report import GAP, FailedVerdict, as_json, gap_text
from pipelab.optimize.cut import split_layers
from pipelab.optimize.order import gap
from pipelab.predict.timeline import Timeline
from pipelab.schedules import make_all, make_for
from pipelab.show.bar import Bar


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
    answers = {"predicted": (predicted, pipelab.memory(predicted, costs))}
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
    columns += "  least to most" if "spread" in records[0] else ""
    columns += "   memory  fits" if "fits" in records[0] else ""
    lines = [f"{'schedule':<16}{columns}     gap  versions  staleness"]
    for found in records:
        line = f"{found['schedule']:<16}"
        for answer in (found[how] for how in answers):
            line += f"{answer['makespan']:>11.4g}{answer['bubble']['of_total']:>8.1%}"
            line += f"{max(answer['peak']) / 2**20:>10.4g}"
        notes = found.get("not_bounded", [])
        if "check" in found:
            line += " " + "-".join(f"{seconds:.3g}" for seconds in found["spread"]).rjust(14)
            notes = ["passed" if found["check"] else "FAILED"]
        if "fits" in found:
            line += f"{found['memory']:>9.4g}{'yes' if found['fits'] else 'no':>6}"
            notes = [found["stages"], *notes] if found["stages"] != ONE else notes
        line += f"{gap_text(found['gap']):>8}{max(found['weight_versions']):>10}"
        lines.append(f"{line}{found['staleness']:>11}   {', '.join(notes)}".rstrip())
    return "\n".join([*lines, GAP, *([MEMORY] if "fits" in records[0] else [])])


class Comparison(NamedTuple):
    """What was found: a record and a timeline for each schedule; more of it as text and as JSON."""

    records: list[dict[str, Any]]
    timelines: dict[str, Timeline]
    text: Sequence[str] = ()
    more: Mapping[str, Any] = {}


def predict(
    made: Mapping[str, tuple[Schedule, Costs]], costs: Costs, memory: float | None, whole: bool
) -> Comparison:
    """Every schedule as simulated, the fastest first, and the bounds of its stages."""
    bounds = bounds_of(made, costs, memory, split=not whole)
    records = [compared(*each) | beside(*each, memory, whole) for each in made.values()]
    records.sort(key=lambda record: record["makespan"])
    timelines = {name: simulate(*each) for name, each in made.items()}
    more = {"memory": memory, "split": not whole, **bounds_report(bounds)}
    return Comparison(records, timelines, bounds_text(bounds, whole), more)


def measure(
    made: Mapping[str, Schedule],
    again: Callable[[str, Costs], tuple[Schedule, Costs]],
    run: Callable[[Schedule], Any],
    repeats: int,
) -> Comparison:
    """Every schedule as run, in turn, beside its prediction from the costs of one GPipe run.

    again  makes a schedule anew for other costs
    """
    run(made["gpipe"])  # warms up
    first = run(made["gpipe"])
    costs = fit(first.timeline, first.memory)
    anew = {name: again(name, costs) for name in made}
    several = run_in_turn({name: table for name, (table, _) in anew.items()}, run, repeats)
    records = [compared(*anew[name], runs) for name, runs in several.items()]
    return Comparison(records, {name: _median(runs).timeline for name, runs in several.items()})


@dataclass(frozen=True)
class Prediction:
    """What a comparison predicts from, in place of runs.

    costs NAME=X,...  predict for these costs, as simulate takes them; with --profile: its transfer
        and bandwidth
    profile FILE  predict for this profile (see partition)
    memory X  predicted: micro-batches whose activations fit on a device (default: no limit)
    whole  predicted: bounds of schedules that do not split backwards
    """

    costs: OfCosts = None
    profile: str | None = None
    memory: Positive = None
    whole: bool = False

    def of(self, devices: int) -> tuple[str, Costs] | None:
        """The title and the costs; None if nothing is to be predicted."""
        if self.profile:
            cut, links = split_layers(read_profile(self.profile), devices), self.costs or Costs()
            costs = cut.costs(transfer=links.transfer, bandwidth=links.bandwidth)
            return Path(self.profile).stem, costs
        if not self.costs and (self.memory or self.whole):
            raise ValueError("--memory and --whole are for predictions: add --costs or --profile")
        return ("costs", self.costs) if self.costs else None


@command(
    "--devices 2 --plot schedules.png",
    "--devices 4 --microbatches 8 --costs forward=1,2,1,1 --memory 3",
)
def compare(
    prediction: Prediction,
    *,
    devices: Count = 2,
    microbatches: Count = 4,
    batches: Count = None,
    virtual: Count = 2,
    model: str = "mlp",
    backend: Backend = None,
    repeats: Count = 3,
    seed: Seed = 0,
    timeout: Finite = 60.0,
    json: bool = False,
    plot: str | None = None,
) -> None:
    """All schedules on one model, side by side: run, and checked; Ctrl-C prints those so far.

    With --costs or --profile they are not run but predicted, beside the seconds that no schedule in
    the same stages can beat.

    batches N  one after another (default: 2; predicted: 1)
    repeats N  runs of each, in turn; the output shows the middle one and the spread
    """
    check_targets(plot=plot)
    predicted = prediction.of(devices)
    title, costs = predicted or (model, Costs())
    batches = batches or (1 if predicted else 2)
    sizes: dict[str, Any] = {"virtual": virtual, "batches": batches}
    made, left_out = make_all(devices, microbatches, costs, memory=prediction.memory, **sizes)
    if "gpipe" not in made:  # nor any other: it takes any sizes
        raise ValueError(left_out["gpipe"])
    if predicted:
        found = predict(made, costs, prediction.memory, prediction.whole)
    else:
        tables = {name: table for name, (table, _) in made.items()}
        if model == "mlp":
            sliced = [name for name, table in tables.items() if table.slices]
            left_out |= {name: f"{name}: an mlp has no sequences" for name in sliced}
            tables = {name: table for name, table in tables.items() if name not in sliced}

        def run(table: Schedule) -> Any:
            parts = small_model(model, table, seed=seed, count=4 * devices, width=256)
            return pipelab.run(table, *parts, backend=backend, timeout=timeout)

        def again(name: str, costs: Costs) -> tuple[Schedule, Costs]:
            return make_for(name, devices, microbatches, costs, **sizes)

        found = measure(tables, again, run, repeats)
    write_figure(plot, lambda: pipelab.plot.timelines(found.timelines))
    title += f": {devices} devices, {batches} batches of {microbatches} micro-batches"
    told = {"title": title, "schedules": found.records, "left_out": left_out, **found.more}
    lines = [*found.text, title, comparison_text(found.records)]
    lines += map("left out: {}".format, left_out.values())
    told |= {"devices": devices, "microbatches": microbatches}
    print(as_json(told) if json else "\n".join(lines))
    if failed := [each["schedule"] for each in found.records if not each.get("check", True)]:
        raise FailedVerdict(f"the check failed: {', '.join(failed)}")
