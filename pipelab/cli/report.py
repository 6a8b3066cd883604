"""Text that commands print."""

from itertools import pairwise
from json import dumps
from math import isfinite
from typing import Any

from pipelab.predict.timeline import Timeline

GAP = (
    "gap: how far the time of a batch is above a lower bound for any order, in the same stages and "
    "memory, with backwards that may be split; - where no bound is known"
)


def gap_text(gap: float | None) -> str:
    return "-" if gap is None else f"{gap:.1%}"


SIZES = ("devices", "stages", "microbatches", "batches")


class FailedVerdict(Exception):
    """A verdict to print: exit status 1."""


def describe(timeline: Timeline) -> dict[str, Any]:
    """A timeline as the command line's JSON object."""
    s = timeline.schedule
    rows = list(pairwise(s.bounds))
    return {
        "schedule": s.name,
        **{name: getattr(s, name) for name in SIZES},
        **{name: getattr(timeline, name) for name in ("makespan", "span", "ideal")},
        "bubble": timeline.bubble._asdict(),
        "peak_in_flight": s.peak_in_flight,
        "weight_versions": s.weight_versions,
        "rows": [[str(a) for a in row] for row in s.rows],
        "start": [[*map(float, timeline.start[a:b])] for a, b in rows],
        "end": [[*map(float, timeline.end[a:b])] for a, b in rows],
    }


def verdict_of(check: Any) -> dict[str, Any]:
    names = ("passed", "how", "rule", "ratio", "limit", "worst", "reasons", "unjudged")
    return {name: getattr(check, name) for name in names}


def as_json(value: Any) -> str:
    """As JSON, with null for infinite numbers and nan."""
    return dumps(_finite(value))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def show(json: bool, timeline: Timeline, proof: Any = None) -> None:
    """Print a timeline, with its proof if it was searched for."""
    if json:
        print(as_json(describe(timeline) | ({"proof": proof.to_json()} if proof else {})))
        return
    rows = {"device": range(timeline.schedule.devices), "busy": timeline.busy}
    if not timeline.schedule.has_transfers:  # else a device waits inside of its SEND and RECV
        rows |= {cause: idle for cause, idle in timeline.attribution().items() if any(idle)}
    print(timeline.summary())
    for name, cells in rows.items():
        print(f"{name:<22}" + "".join(f" {cell:>9.4g}" for cell in cells))
    if proof:
        print(proof)
