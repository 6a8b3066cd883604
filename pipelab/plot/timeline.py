"""Timelines: a lane per device, a box per action, idle time hatched."""

from collections.abc import Collection, Mapping
from typing import Any, cast

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from pipelab.action import Kind
from pipelab.plot import style
from pipelab.plot.style import RGB, Colour
from pipelab.timeline import SECONDS, Timeline, scale_of

LANE = 0.86  # of the room between two lanes
FONT, SMALLEST = 8.0, 4.5  # points
MOST_NAMES = 16  # of devices, beside a timeline; of more every second, third, ... is named


def timeline(
    t: Timeline,
    ax: Axes | None = None,
    *,
    title: str | None = None,
    by_version: bool = False,
) -> Axes:
    """One timeline: blue forwards, green backwards; the numbers are micro-batches.

    A later chunk of the model has a lighter shade; an update too short to be seen is a line under
    a triangle. `by_version` colours actions by the weight version that they read and names them,
    such as F3. `t.summary()` says the same in words.
    """
    ax = style.axes(ax, height=0.9 + 0.38 * t.schedule.devices)
    _draw(ax, {"": t}, by_version)
    if title is None:
        title = f"{t.schedule.name}, {t.source}"
        if not by_version:
            title += f": idle {t.bubble.of_total:.1%} of total time"
    style.title(ax, title)
    return ax


def timelines(items: dict[str, Timeline], ax: Axes | None = None, *, title: str = "") -> Axes:
    """Several timelines on one time axis, one above the other; each starts at its own zero.

    >>> from pipelab import make, simulate
    >>> t = simulate(make("gpipe", 2, 2))
    >>> ax = timelines({"predicted": t, "again": t})
    """
    lanes = sum(t.schedule.devices + 1 for t in items.values())
    ax = style.axes(ax, height=0.7 + 0.36 * lanes)
    _draw(ax, items)
    style.title(ax, title)
    return ax


# ---- what other pictures use


def colour_of(kind: Kind, stage: int, devices: int, stages: int) -> RGB:
    """The kind's colour, lighter for a later chunk of the model."""
    chunks = -(-stages // devices)
    return style.lighter(style.KINDS[kind], 0.55 * (stage // devices) / max(chunks - 1, 1))


def chunks_of(items: Collection[Timeline]) -> int:
    """The most chunks of the model on a device."""
    return max(-(-t.schedule.stages // t.schedule.devices) for t in items)


def kinds_of(items: Collection[Timeline]) -> list[Kind]:
    """The kinds of actions that a legend names; one name stands for all transfers."""
    return [kind for kind in style.NAMES if any((t.kind == kind).any() for t in items)]


def spans(t: Timeline) -> tuple[np.ndarray, np.ndarray]:
    """When each action starts and ends, from the timeline's own zero."""
    zero = t.start.min()
    return t.start - zero, t.end - zero


def bar(
    ax: Axes,
    row: float,
    start: float,
    end: float,
    colour: Colour,
    edge: Colour = "white",
    **look: Any,
) -> Rectangle:
    """A box in a lane."""
    return style.box(ax, (start, row - LANE / 2), end - start, LANE, colour, edge, **look)


def idle(ax: Axes, row: float, end: float) -> Rectangle:
    """The hatched background of a lane: what stays of it is idle time."""
    return bar(ax, row, 0, end, "white", "#c8c8c8", hatch="////", lw=0)


def instant(ax: Axes, row: float, time: float, colour: Colour) -> Line2D:
    """A line across a lane under a triangle: an action that takes no time."""
    y = row - LANE / 2, row + LANE / 2
    look: dict[str, Any] = {"lw": 2, "solid_capstyle": "butt", "clip_on": False, "zorder": 3}
    (line,) = ax.plot([time, time], y, color=colour, marker="v", ms=5, markevery=[0], **look)
    return line


def points_per_unit(ax: Axes) -> float:
    """Points (1/72 inch) of paper for a unit of the time axis."""
    figure = cast(Figure, ax.get_figure(root=True))
    if layout := figure.get_layout_engine():
        layout.execute(figure)  # the names of the lanes take their room
    a, b = ax.get_xlim()
    return float(figure.get_size_inches()[0] * 72 * ax.get_position().width / (b - a))


# ---- the parts of a timeline


def _draw(ax: Axes, items: Mapping[str, Timeline], by_version: bool = False) -> None:
    """All of the picture but its title."""
    longest = max(t.makespan for t in items.values())
    factor, unit = 1.0, ""
    if longest < 1 or any(t.source == "measured" for t in items.values()):
        factor, unit = scale_of(longest, SECONDS)
    ax.set_xlim(0, longest * 1.004 or 1)
    ax.xaxis.set_major_formatter(lambda x, _: f"{x / factor:g}")
    ax.set_xlabel(f"time ({unit})" if unit else "time")
    tops, ticks, names, top = [], [], [], 0
    for name, t in items.items():
        tops.append(top)
        shown = range(0, t.schedule.devices, max(1, t.schedule.devices // MOST_NAMES))
        ticks += [top + d for d in shown]
        names += [f"device {d}" for d in shown]
        if name:
            ax.text(0, top - 0.56, name, fontsize=9, fontweight="bold", va="bottom")
        top += t.schedule.devices + 1
    ax.set_ylim(top - 1.45, -1.1 if next(iter(items)) else -0.55)  # room for the first name
    style.lanes(ax, ticks, names, FONT)
    handles = _version_legend(items.values()) if by_version else _kind_legend(items.values())
    style.legend(ax, handles, FONT, handlelength=1.2, columnspacing=1.2)
    for top, t in zip(tops, items.values(), strict=True):
        names = [str(microbatch) for microbatch in t.microbatch]
        if by_version:
            names = [f"{Kind(kind).name}{name}" for kind, name in zip(t.kind, names, strict=True)]
        _lanes(ax, t, top, _version_colours(t) if by_version else _kind_colours(t), names)


def _kind_legend(items: Collection[Timeline]) -> list[Artist]:
    handles = [_handle(kind, items) for kind in kinds_of(items)]
    if (chunks := chunks_of(items)) > 1:
        shade = style.lighter(style.KINDS[Kind.F], 0.55)
        handles.append(Patch(color=shade, label=f"lighter: later chunk of {chunks}"))
    handles.append(Patch(facecolor="white", edgecolor="#b0b0b0", hatch="////", label="idle"))
    return handles


def _handle(kind: Kind, items: Collection[Timeline]) -> Artist:
    """The legend's entry of a kind: a box, or a triangle for updates that take no time."""
    look: dict[str, Any] = {"color": style.KINDS[kind], "label": style.NAMES[kind]}
    if all((t.start == t.end)[t.kind == kind].all() for t in items):
        return Line2D([], [], ls="", marker="v", ms=6, **look)
    return Patch(**look)


def _kind_colours(t: Timeline) -> list[Colour]:
    s = t.schedule
    return [
        colour_of(Kind(kind), int(stage), s.devices, s.stages)
        for kind, stage in zip(t.kind, t.stage, strict=True)
    ]


def _version_legend(items: Collection[Timeline]) -> list[Artist]:
    names: dict[RGB, list[str]] = {}  # the colours come round again
    for version in np.unique(np.concatenate([t.version[t.kind <= Kind.W] for t in items])):
        names.setdefault(style.version_colour(version), []).append(str(version))
    handles: list[Artist] = [
        Patch(color=colour, label=f"version {', '.join(versions)}")
        for colour, versions in names.items()
    ]
    return [*handles, _handle(Kind.U, items)]


def _version_colours(t: Timeline) -> list[Colour]:
    return [
        style.KINDS[Kind.U] if kind == Kind.U else style.version_colour(version)
        for kind, version in zip(t.kind, t.version, strict=True)
    ]


def _lanes(ax: Axes, t: Timeline, top: int, colours: list[Colour], names: list[str]) -> None:
    """The lanes of a timeline, the first one at `top`, with a box per action."""
    for d in range(t.schedule.devices):
        idle(ax, top + d, t.makespan)
    (start, end), row = spans(t), top + t.device
    low, high = row - LANE / 2, row + LANE / 2
    corners = np.array([(start, low), (start, high), (end, high), (end, low)])
    points = (end - start) * points_per_unit(ax)
    edge = min(0.6, np.median(points[t.kind <= Kind.W]) / 5)  # broad edges wash thin boxes out
    boxes = corners.transpose(2, 0, 1)  # corner, x and y, action -> action, corner, x and y
    ax.add_collection(
        PolyCollection(list(boxes), facecolors=colours, edgecolors="white", linewidths=edge)
    )
    for i in np.flatnonzero((t.kind == Kind.U) & (points < 2)):
        instant(ax, row[i], end[i], style.KINDS[Kind.U])
    # Names wherever there is room for the longest one.
    sizes = np.minimum(FONT, points / (0.68 * max(map(len, names))))
    for i in np.flatnonzero((t.kind <= Kind.W) & (sizes >= SMALLEST)):
        middle = (start[i] + end[i]) / 2
        style.label(ax, middle, row[i], names[i], sizes[i], colours[i], va="center_baseline")
