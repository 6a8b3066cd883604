"""All schedules side by side on one model: predicted, and measured if they are run."""

import base64
import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from pipelab import (
    Costs,
    Memory,
    Schedule,
    Timeline,
    memory,
    simulate,
)
from pipelab.schedules import make_all, make_for
from pipelab.search import gap

COLUMNS = (
    "seconds",
    "measured",
    "bubble",
    "measured bubble",
    "MiB",
    "measured MiB",
    "gap",
    "versions",
    "staleness",
    "check",
)


@dataclass(frozen=True)
class Entry:
    """One schedule of a comparison.

    gap  how far a batch is above a lower bound, see `pipelab.search.gap`
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
        return int((np.arange(s.total) // s.per_update - s.versions).max())

    def to_json(self) -> dict[str, Any]:
        """Seconds and bytes; a peak by cause for every device."""
        found = {
            "schedule": self.schedule.name,
            "predicted": _numbers(self.predicted, self.memory),
            "weight_versions": self.predicted.weight_versions,
            "staleness": self.staleness,
            "gap": self.gap,
        }
        if self.run:
            found["measured"] = _numbers(self.run.timeline, self.run.memory)
            found["check"] = self.run.check.passed if self.run.check else None
        return found

    def cells(self) -> list[str]:
        """As COLUMNS has them; empty where nothing was measured."""
        measured, check = ("", "", ""), ""
        if self.run:
            measured = _cells(self.run.timeline, self.run.memory)
            if self.run.check:
                check = "passed" if self.run.check.passed else "FAILED"
        pairs = zip(_cells(self.predicted, self.memory), measured, strict=True)
        versions = max(self.predicted.weight_versions)
        rest = [f"{self.gap:.1%}", str(versions), str(self.staleness), check]
        return [*chain.from_iterable(pairs), *rest]


def _cells(timeline: Timeline, found: Memory) -> tuple[str, str, str]:
    peak = max(found.peak()) / 2**20
    return f"{timeline.makespan:.4g}", f"{timeline.bubble.of_total:.1%}", f"{peak:.4g}"


def _numbers(timeline: Timeline, found: Memory) -> dict[str, Any]:
    return {
        "makespan": timeline.makespan,
        "bubble": timeline.bubble._asdict(),
        "peak": found.peak(),
        "at_peak": [found.at_peak(d) for d in range(found.devices)],
    }


def compare(
    costs: Costs,
    devices: int,
    microbatches: int,
    *,
    names: Sequence[str] | None = None,
    virtual: int = 2,
    batches: int = 2,
) -> list[Entry]:
    """Schedules of one model, predicted.

    costs    of each device's part of the model. An interleaved schedule has each divided evenly
             into `virtual` chunks, so that the model is the same
    names    of schedules; all that there are for these sizes and costs, unless given
    batches  more show what schedules without a flush gain

    >>> for entry in compare(Costs(), 4, 8, names=["gpipe", "interleaved"], batches=1):
    ...     print(entry.schedule.name, entry.predicted.makespan)
    gpipe 33.0
    interleaved 28.5
    """
    sizes = {"virtual": virtual, "batches": batches}
    if names is None:
        made = list(make_all(devices, microbatches, costs, **sizes)[0].values())
    else:
        made = [make_for(name, devices, microbatches, costs, **sizes) for name in names]
    found = []
    for schedule, own in made:
        predicted = simulate(schedule, own)
        found.append(Entry(schedule, predicted, memory(predicted, own), gap(schedule, own)))
    return found


GAP = (
    "gap: how far the time of a batch is above a lower bound for any order, in the same stages and "
    "memory, with backwards that may be split"
)


def text(entries: Sequence[Entry]) -> str:
    """The comparison as a table, and what its gap is."""
    return f"{aligned(_table(entries))}\n{GAP}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def _table(entries: Sequence[Entry]) -> list[list[str]]:
    """A heading and a row per schedule; columns where nothing was measured are left out."""
    rows = [["schedule", *COLUMNS], *([e.schedule.name, *e.cells()] for e in entries)]
    columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
    return [list(row) for row in zip(*columns, strict=True)]


def page(entries: Sequence[Entry], title: str) -> str:
    """The comparison as one HTML page that needs no other file: the table and the figures."""
    from pipelab import plot

    predicted = {e.schedule.name: e.predicted for e in entries}
    figures = [
        ("Predicted timelines, on one time axis", plot.timelines(predicted)),
        (
            "What fills every device at its peak, predicted",
            plot.peaks({e.schedule.name: e.memory for e in entries}),
        ),
    ]
    if any(entry.run for entry in entries):
        measured = {e.schedule.name: e.run.timeline for e in entries if e.run}
        memories = {e.schedule.name: e.run.memory for e in entries if e.run}
        figures[1:1] = [("Measured timelines, on one time axis", plot.timelines(measured))]
        figures += [("The same, measured", plot.peaks(memories))]
    rows = _table(entries)
    head, *body = (
        "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
        for tag, row in zip(["th", *["td"] * len(entries)], rows, strict=True)
    )
    pictures = "\n".join(
        f"<figure><figcaption>{caption}</figcaption>"
        f'<img alt="{caption}" src="{_source(ax)}"></figure>'
        for caption, ax in figures
    )
    return PAGE.format(
        title=html.escape(title),
        head=head,
        body="\n".join(body),
        pictures=pictures,
        gap=GAP.capitalize(),
    )


def _source(ax: Any) -> str:
    """The figure as the source of an image."""
    from matplotlib import pyplot as plt

    file = io.BytesIO()
    ax.figure.savefig(file, format="png", dpi=110)
    plt.close(ax.figure)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em }}
table {{ border-collapse: collapse }}
td, th {{ padding: .25em .8em; text-align: right; border-bottom: 1px solid #ccc }}
td:first-child, th:first-child {{ text-align: left }}
figure {{ margin: 2em 0 }} figcaption {{ font-weight: 600 }} img {{ max-width: 100% }}
</style></head><body>
<h1>{title}</h1>
<table>{head}
{body}</table>
<p>Seconds from the first start to the last end. Bubble: idle share of all device time. MiB: of the
fullest device at its peak. Versions: of a stage's weights, at the most. Staleness: updates between
the weights that a forward reads and those that its gradient helps to make. {gap}.</p>
{pictures}
</body></html>
"""
