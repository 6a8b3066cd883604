"""What commands print."""

from itertools import pairwise
from typing import Any

from pipelab.timeline import Timeline


class Failure(Exception):
    """A verdict to print: exit status 1."""


def describe(timeline: Timeline) -> dict[str, Any]:
    """A timeline as the command line's JSON object."""
    s = timeline.schedule
    rows = list(pairwise(s.bounds))
    return {
        "schedule": s.name,
        "devices": s.devices,
        "stages": s.stages,
        "microbatches": s.microbatches,
        "batches": s.batches,
        "makespan": timeline.makespan,
        "span": timeline.span,
        "ideal": timeline.ideal,
        "bubble": timeline.bubble._asdict(),
        "peak_in_flight": s.peak_in_flight,
        "weight_versions": s.weight_versions,
        "rows": [[str(a) for a in row] for row in s.rows],
        "start": [timeline.start[a:b].tolist() for a, b in rows],
        "end": [timeline.end[a:b].tolist() for a, b in rows],
    }


def verdict_of(check: Any) -> dict[str, Any]:
    names = ("passed", "max_abs", "max_rel", "tolerance", "rule", "ratio", "unjudged")
    return {name: getattr(check, name) for name in names}


def idle_table(timeline: Timeline) -> str:
    idle = {name: seconds for name, seconds in timeline.attribution().items() if seconds.any()}
    rows = {"busy": timeline.busy} | idle
    width = max(map(len, rows))
    lines = [f"{'device':<{width}}", *(f"{name:<{width}}" for name in rows)]
    cells = [map(str, range(timeline.schedule.devices))]
    cells += [map("{:.4g}".format, seconds) for seconds in rows.values()]
    lines = [
        line + "".join(map(" {:>9}".format, row)) for line, row in zip(lines, cells, strict=True)
    ]
    return "\n".join(lines)
