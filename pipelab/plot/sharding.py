"""Shardings of a program: what each computes and sends; and what several ways took, measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes

from pipelab.plot import style

if TYPE_CHECKING:
    from pipelab.pipeshard.auto.sharding import Search


def shardings(search: Search, ax: Axes | None = None) -> Axes:
    """What a device computes over what it sends, a dot for every candidate.

    All points of a grey line take the machine the same time, collectives' latency left out: further
    down and left is faster. A darker dot is several candidates. What does not fit is a cross.
    """
    ax = style.axes(ax, 7, 3.4)
    machine = search.machine
    costs = [each.cost for each in search.table]
    sent = np.array([cost.ring_bytes / 2**20 for cost in costs])
    computed = np.array([cost.flops / 1e9 for cost in costs])
    fits = np.array([cost.fits(machine) for cost in costs])
    # [1] lines of equal time, up to the slowest candidate
    per_gflop = 1e9 / (machine.flops * machine.share)
    per_mib = 2**20 / machine.link(costs[0].devices)
    slowest = max(computed) * per_gflop + max(sent) * per_mib
    for seconds in np.linspace(0, slowest, 9)[1:]:
        ends = [0, seconds / per_mib], [seconds / per_gflop, 0]
        (line,) = ax.plot(*ends, color=style.lighter(style.GREY, 0.7), lw=0.8, zorder=1)
    line.set_label("equal time")
    # [2] the candidates
    look: dict[str, Any] = {"color": style.BLUE, "alpha": 0.45, "zorder": 2}
    ax.plot(sent[fits], computed[fits], "o", ms=6, mew=0, label="a candidate", **look)
    if not fits.all():
        ax.plot(sent[~fits], computed[~fits], "x", ms=6, label="needs too much memory", **look)
    # [3] the best, and the one without any split
    best = search.best.cost
    where = best.ring_bytes / 2**20, best.flops / 1e9
    ax.plot(*where, "*", color=style.RED, ms=14, label="best", zorder=4)
    for i, each in enumerate(search.table):
        if not any(spec for spec in each.specs):
            name = "all arrays whole"
            ax.plot(sent[i], computed[i], "s", color=style.ORANGE, ms=8, label=name, zorder=3)
    ax.set_xlim(-0.03 * max(sent), 1.05 * max(sent))
    ax.set_ylim(0, 1.1 * max(computed))
    ax.set_xlabel("MiB that a device sends")
    ax.set_ylabel("GFLOP of a device")
    style.legend(ax)
    return ax


def seconds(measured: Mapping[str, Mapping[str, Sequence[float]]], ax: Axes | None = None) -> Axes:
    """Times of several ways to do a job, for one job or more: job -> way -> seconds of each run.

    A bar is the median, its whisker goes from the shortest to the longest.
    """
    ways = list(dict.fromkeys(way for job in measured.values() for way in job))
    ax = style.axes(ax, 9, 0.9 + 0.42 * len(ways))
    height = 0.8 / len(measured)
    for i, (name, job) in enumerate(measured.items()):
        colour = style.LINES[i]
        rows = [ways.index(way) + (i + 0.5) * height - 0.4 for way in job]
        times = [1e3 * np.array(runs) for runs in job.values()]
        medians = [np.median(runs) for runs in times]
        ax.barh(rows, medians, 0.9 * height, color=style.lighter(colour, 0.3), label=name)
        ranges = [(min(runs), max(runs)) for runs in times]
        ax.hlines(rows, *np.transpose(ranges), color=style.GREY, lw=1.2)
        for row, median, (_, longest) in zip(rows, medians, ranges, strict=True):
            place = (longest, row), (4, 0)
            ax.annotate(f"{median:.3g}", *place, textcoords="offset points", va="center", size=8)
    style.lanes(ax, range(len(ways)), ways)
    ax.invert_yaxis()
    ax.set_xlim(0, None)
    ax.set_xlabel("ms (median, shortest to longest)")
    style.legend(ax)
    return ax
