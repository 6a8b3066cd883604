"""Timelines: a lane per device, a box per action, idle time hatched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from pipelab.action import Kind
from pipelab.plot import style
from pipelab.timeline import Timeline

LANE = 0.86  # of the room between two lanes
FONT, SMALLEST = 8.0, 4.5  # points


def timeline(
    t: Timeline,
    ax: Axes | None = None,
    *,
    title: str | None = None,
    end: float | None = None,
    by_version: bool = False,
) -> Axes:
    """One timeline. Blue forward, green backward; a later chunk of the model in a lighter shade; numbers are micro-batches.

    `by_version` colours actions by the weight version that they read, forwards lighter than backwards. `end` extends the
    time axis, so that several pictures compare. `t.summary()` says the same in words.
    """
    ax = style.axes(ax, height=0.9 + 0.38 * t.schedule.devices)
    _frame(ax, [t], [""], end, _version_legend(t) if by_version else None)
    _lanes(ax, t, 0, _version_colours(t) if by_version else None)
    default = f"{t.schedule.name}, {t.source}" if by_version else _title(t)
    ax.set_title(default if title is None else title, loc="left", fontsize=10)
    return ax


def timelines(items: dict[str, Timeline], ax: Axes | None = None, *, title: str = "") -> Axes:
    """Several timelines on one time axis, one above the other; each starts at its own zero.

    >>> from pipelab import make, simulate
    >>> ax = timelines({"predicted": simulate(make("gpipe", 2, 2)), "again": simulate(make("gpipe", 2, 2))})
    """
    lanes = sum(t.schedule.devices + 1 for t in items.values())
    ax = style.axes(ax, height=0.7 + 0.36 * lanes)
    _frame(ax, list(items.values()), list(items), None)
    top = 0.0
    for t in items.values():
        _lanes(ax, t, top)
        top += t.schedule.devices + 1
    ax.set_title(title, loc="left", fontsize=10)
    return ax


def _title(t: Timeline) -> str:
    b = t.bubble
    return f"{t.schedule.name}, {t.source}: idle {b.of_total:.1%} of total time, {b.over_ideal:.1%} over ideal"


def _frame(
    ax: Axes,
    items: Sequence[Timeline],
    names: Sequence[str],
    end: float | None,
    legend: list[Patch] | None = None,
) -> None:
    longest = max([t.makespan for t in items] + [end or 0])
    measured = any(t.source == "measured" for t in items)
    factor, unit = style.scale_of(longest, style.SECONDS) if measured or longest < 1 else (1.0, "")
    ax.set_xlim(0, longest * 1.002 or 1)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x / factor:g}")
    ax.set_xlabel(f"time ({unit})" if unit else "time")
    ticks, labels, top = [], [], 0.0
    for t, name in zip(items, names, strict=True):
        p = t.schedule.devices
        step = max(1, p // 16)
        ticks += [top + d for d in range(0, p, step)]
        labels += [f"device {d}" for d in range(0, p, step)]
        if name:
            ax.text(0, top - 0.56, name, fontsize=9, fontweight="bold", va="bottom")
        top += p + 1
    ax.set_ylim(top - 1.45, -0.55 - bool(names[0]) * 0.55)
    ax.set_yticks(ticks, labels, fontsize=FONT)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    if legend is None:
        legend = _kind_legend(items)
    ax.legend(
        handles=legend,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=len(legend),
        fontsize=FONT,
        frameon=False,
        borderaxespad=0.1,
        handlelength=1.2,
        columnspacing=1.2,
    )


def _kind_legend(items: Sequence[Timeline]) -> list[Patch]:
    kinds = sorted(
        {int(k) for t in items for k in np.unique(t.kind)} - {Kind.RECV_F, Kind.SEND_B, Kind.RECV_B}
    )
    patches = [Patch(color=style.KINDS[Kind(k)], label=style.NAMES[Kind(k)]) for k in kinds]
    if (chunks := max(-(-t.schedule.stages // t.schedule.devices) for t in items)) > 1:
        patches.append(
            Patch(
                color=style.lighter(style.KINDS[Kind.F], 0.55),
                label=f"lighter: later chunk of {chunks}",
            )
        )
    patches.append(Patch(facecolor="white", edgecolor="#b0b0b0", hatch="////", label="idle"))
    return patches


def colour_of(kind: Kind, stage: int, devices: int, stages: int) -> tuple[float, float, float]:
    """The kind's colour, lighter for a later chunk of the model."""
    chunks = -(-stages // devices)
    return style.lighter(style.KINDS[kind], 0.55 * (stage // devices) / max(chunks - 1, 1))


def _version_colours(t: Timeline) -> list:
    shade = {Kind.F: 0.6, Kind.U: 0.0}
    colours = [
        style.lighter(style.LINES[v % len(style.LINES)], shade.get(Kind(k), 0.25))
        for v, k in zip(t.version, t.kind, strict=True)
    ]
    return [style.KINDS[Kind.U] if k == Kind.U else c for c, k in zip(colours, t.kind, strict=True)]


def _version_legend(t: Timeline) -> list[Patch]:
    versions = sorted({int(v) for v, k in zip(t.version, t.kind, strict=True) if k <= Kind.W})
    return [
        Patch(color=style.lighter(style.LINES[v % len(style.LINES)], 0.25), label=f"version {v}")
        for v in versions[:8]
    ]


def _lanes(ax: Axes, t: Timeline, top: float, colours: list | None = None) -> None:
    s, zero = t.schedule, float(t.start.min())
    for d in range(s.devices):
        ax.add_patch(
            Rectangle(
                (0, top + d - LANE / 2),
                t.makespan,
                LANE,
                facecolor="white",
                edgecolor="#c8c8c8",
                hatch="////",
                lw=0,
            )
        )
    start, end, row = t.start - zero, t.end - zero, top + t.device
    if colours is None:
        colours = [
            colour_of(Kind(k), int(stage), s.devices, s.stages)
            for k, stage in zip(t.kind, t.stage, strict=True)
        ]
    low, high = row - LANE / 2, row + LANE / 2
    boxes = np.stack(
        [np.column_stack(c) for c in ((start, low), (start, high), (end, high), (end, low))], axis=1
    )
    points = _points_per_second(ax)
    widths = {k: float(np.median((end - start)[t.kind == k])) * points for k in np.unique(t.kind)}
    edge = 0.6 if widths.get(Kind.F, 0) > 3 else 0  # white edges would wash thin boxes out
    ax.add_collection(
        PolyCollection(list(boxes), facecolors=colours, edgecolors="white", linewidths=edge)
    )
    for i in np.flatnonzero((t.kind == Kind.U) & ((end - start) * points < 1.2)):
        ax.plot(
            [end[i]] * 2,
            [low[i], high[i]],
            color=style.KINDS[Kind.U],
            lw=1.2,
            solid_capstyle="butt",
        )
    digits = len(str(s.total - 1))
    for k, width in widths.items():
        size = min(FONT, width / (0.68 * digits))  # all numbers of a kind, or none
        for i in np.flatnonzero(t.kind == k) if k <= Kind.W and size >= SMALLEST else ():
            ax.text(
                (start[i] + end[i]) / 2,
                row[i],
                str(t.microbatch[i]),
                ha="center",
                va="center_baseline",
                fontsize=size,
                color=style.ink(colours[i]),
            )


def _points_per_second(ax: Axes) -> float:
    """Points (1/72 inch) on paper for a unit of the time axis, before the layout takes room for labels."""
    a, b = ax.get_xlim()
    figure = cast(Figure, ax.get_figure(root=True))
    return float(figure.get_size_inches()[0] * 72 * ax.get_position().width / (b - a))
