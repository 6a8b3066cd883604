"""compare: all schedules on one model, side by side: predicted, and measured if they are run."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from json import dumps
from pathlib import Path
from typing import Any, Literal

import pipelab
from pipelab import Costs, Memory, Schedule, Timeline, fit, memory, simulate
from pipelab.cli.files import check_targets, read_profile, write_figure
from pipelab.cli.models import small_model
from pipelab.cli.options import Cost, Count, Json, Model, Name, Plot, Positive, Seed, Timeout
from pipelab.cli.report import GAP, Failure
from pipelab.optimize.cut import split_layers
from pipelab.optimize.order import gap
from pipelab.schedules import make_all, make_for


@dataclass(frozen=True)
class Compared:
    """One schedule of a comparison.

    gap  how far a batch is above a lower bound, see `pipelab.optimize.order.gap`
    run  what `pipelab.run` gave back, if it was run
    """

    schedule: Schedule
    predicted: Timeline
    memory: Memory
    gap: float
    run: Any = None

    @property
    def staleness(self) -> int:
        """Updates between the version that a forward reads and the one it helps to make."""
        s = self.schedule
        return max(k // s.per_update - version for (_, k), version in s.versions.items())

    def answers(self) -> dict[str, tuple[Timeline, Memory]]:
        found = {"predicted": (self.predicted, self.memory)}
        if self.run:
            found["measured"] = self.run.timeline, self.run.memory
        return found

    def to_json(self) -> dict[str, Any]:
        """Seconds and bytes; a peak by cause for every device."""
        found: dict[str, Any] = {
            "schedule": self.schedule.name,
            "weight_versions": self.schedule.weight_versions,
            "staleness": self.staleness,
            "gap": self.gap,
        }
        for how, (timeline, kept) in self.answers().items():
            found[how] = {
                "makespan": timeline.makespan,
                "bubble": timeline.bubble._asdict(),
                "peak": kept.peak(),
                "at_peak": [kept.at_peak(d) for d in range(kept.devices)],
            }
        if self.run:
            found["check"] = self.run.check.passed
        return found

    def __str__(self) -> str:
        numbers = "".join(
            f"{timeline.makespan:>11.4g}{timeline.bubble.of_total:>8.1%}"
            f"{max(kept.peak()) / 2**20:>10.4g}"
            for timeline, kept in self.answers().values()
        )
        versions = max(self.schedule.weight_versions)
        check = "passed" if self.run and self.run.check.passed else "FAILED" if self.run else ""
        return (
            f"{self.schedule.name:<16}{numbers}{self.gap:>8.1%}{versions:>10}{self.staleness:>11}"
            f"  {check}"
        ).rstrip()


def compare(made: Mapping[str, tuple[Schedule, Costs]]) -> list[Compared]:
    """Schedules of one model, predicted; `pipelab.make_all` gives them with their costs.

    >>> made, left_out = make_all(4, 8, Costs(), virtual=2)
    >>> for entry in compare({name: made[name] for name in ["gpipe", "interleaved"]}):
    ...     print(entry.schedule.name, entry.predicted.makespan)
    gpipe 33.0
    interleaved 28.5
    """
    found = []
    for schedule, costs in made.values():
        predicted = simulate(schedule, costs)
        found.append(Compared(schedule, predicted, memory(predicted, costs), gap(schedule, costs)))
    return found


def comparison_text(entries: Sequence[Compared]) -> str:
    """The comparison as a table, and what its gap is."""
    columns = "".join(
        f"{'seconds' if how == 'predicted' else how:>11}  bubble       MiB"
        for how in entries[0].answers()
    )
    head = f"{'schedule':<16}{columns}     gap  versions  staleness"
    return "\n".join([head, *map(str, entries), GAP])


def compare_command(
    model: Model = "mlp",
    seed: Seed = 0,
    timeout: Timeout = 60.0,
    json: Json = False,
    profile: Name = None,
    transfer: Cost = 0.0,
    bandwidth: Positive = math.inf,
    devices: Count = 2,
    microbatches: Count = 4,
    batches: Count = 2,
    backend: Literal["threads", "processes"] | None = None,
    plot: Plot = None,
) -> None:
    """Run all schedules on one model, side by side.

    Args:
        profile: predict for this profile instead of running a model
        transfer: with --profile: latency, one number or one per link
        bandwidth: with --profile: bytes a second of every link
        microbatches: per batch
    """
    check_targets(plot=plot)
    costs, title = Costs(), str(model)
    if profile:
        cut = split_layers(read_profile(profile), devices)
        costs, title = cut.costs(transfer=transfer, bandwidth=bandwidth), Path(profile).stem
    sizes: dict[str, Any] = {"virtual": 2, "batches": batches}
    made, left_out = make_all(devices, microbatches, costs, **sizes)

    runs = {}
    if not profile:  # each is predicted from the costs of one GPipe run

        def run(schedule: Schedule) -> Any:
            parts = small_model(model, schedule, seed=seed, count=4 * devices, width=256)
            return pipelab.run(schedule, *parts, backend=backend, timeout=timeout)

        run(made["gpipe"][0])  # warms up
        first = run(made["gpipe"][0])
        costs = fit(first.timeline, first.memory)
        made = {name: make_for(name, devices, microbatches, costs, **sizes) for name in made}
        runs = {name: run(schedule) for name, (schedule, _) in made.items()}
    entries = [replace(entry, run=runs.get(entry.schedule.name)) for entry in compare(made)]
    title += f": {devices} devices, {batches} batches of {microbatches} micro-batches"
    shown = {e.schedule.name: [*e.answers().values()][-1][0] for e in entries}
    write_figure(plot, lambda: pipelab.plot.timelines(shown))
    if json:
        found = [entry.to_json() for entry in entries]
        print(dumps({"title": title, "schedules": found, "left_out": left_out}))
    else:
        print(
            title,
            comparison_text(entries),
            *(f"left out: {why}" for why in left_out.values()),
            sep="\n",
        )
    if failed := [e.schedule.name for e in entries if e.run and not e.run.check.passed]:
        raise Failure(f"the check failed: {', '.join(failed)}")
