"""Timelines: a lane per device, a box per action, idle time hatched."""

from collections.abc import Collection, Mapping
from statistics import median
from typing import Any, cast

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle

from pipelab.plot import style
from pipelab.plot.style import RGB, Colour
from pipelab.predict.timeline import Timeline
from pipelab.show.palette import kinds_of, lighter
from pipelab.show.units import SECONDS, scale_of
from pipelab.table.action import Kind
from pipelab.table.timing import Span

LANE = 0.86  # of the room between two lanes
FONT, SMALLEST = 8.0, 5.25  # points
UNLIT = "#d4d4d4"
MOST_NAMES = 16  # of devices; of more, only every second, third, ... is named


def timeline(
    t: Timeline,
    ax: Axes | None = None,
    *,
    title: str | None = None,
    by_version: bool = False,
) -> Axes:
    """One timeline: blue forwards, green backwards; the numbers are micro-batches.

    A later chunk of the model, or its other copy, has a lighter shade; an update too short to be
    seen is a line under a triangle. `by_version` colours actions by the weight version that they
    read and names them, such as F3. `t.summary()` says the same in words.
    """
    ax = style.axes(ax, height=0.9 + 0.38 * t.schedule.devices)
    _draw(ax, {"": t}, by_version)
    if title is None:
        title = f"{t.schedule.name}, {t.source}"
        if not by_version:
            title += f": idle {t.bubble.of_total:.1%} of total time"
    style.title(ax, title)
    return ax


def timelines(
    items: dict[str, Timeline],
    ax: Axes | None = None,
    *,
    title: str = "",
    lit: int | None = None,
) -> Axes:
    """Several timelines on one time axis, one above the other; each starts at its own zero.

    With `lit` only this micro-batch has its colours; the others are grey.

    >>> from pipelab import make, simulate
    >>> t = simulate(make("gpipe", 2, 2))
    >>> ax = timelines({"predicted": t, "again": t})
    """
    lanes = sum(t.schedule.devices + 1 for t in items.values())
    ax = style.axes(ax, height=0.7 + 0.36 * lanes)
    _draw(ax, items, lit=lit)
    style.title(ax, title)
    return ax


# ---- what other pictures use


def spans(t: Timeline) -> list[Span]:
    """The spans, from the timeline's own zero."""
    zero = min(t.start)
    return [span._replace(start=span.start - zero, end=span.end - zero) for span in t.spans]


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
    """The hatched background of a lane: what stays visible is idle time."""
    return bar(ax, row, 0, end, "white", "#c8c8c8", hatch="////", lw=0)


def instant(ax: Axes, row: float, time: float, colour: Colour) -> Line2D:
    """A line across a lane under a triangle: an action that takes no time."""
    y = row - LANE / 2, row + LANE / 2
    look: dict[str, Any] = {"lw": 2, "solid_capstyle": "butt", "clip_on": False, "zorder": 3}
    (line,) = ax.plot([time, time], y, color=colour, marker="v", ms=5, markevery=[0], **look)
    return line


def points_per_unit(ax: Axes) -> float:
    """Points (1/72 inch) per unit of the time axis."""
    figure = cast(Figure, ax.get_figure(root=True))
    if layout := figure.get_layout_engine():
        layout.execute(figure)  # makes room for the names of the lanes
    a, b = ax.get_xlim()
    return float(figure.get_size_inches()[0] * 72 * ax.get_position().width / (b - a))


# ---- the parts of a timeline


def _draw(
    ax: Axes, items: Mapping[str, Timeline], by_version: bool = False, lit: int | None = None
) -> None:
    """All of the picture but its title."""
    longest = max(t.makespan for t in items.values())
    factor, unit = 1.0, ""
    if 0 < longest < 1 or any(t.source == "measured" for t in items.values()):
        factor, unit = scale_of(longest, SECONDS)
    ax.set_xlim(0, longest * 1.004 or factor)  # one unit where nothing takes time
    ax.xaxis.set_major_formatter(lambda x, _: f"{x / factor:g}")
    ax.set_xlabel(f"time ({unit})" if unit else "time")
    tops, ticks, names, top = [], [], [], 0
    for name, t in items.items():
        tops.append(top)
        shown = range(0, t.schedule.devices, max(1, t.schedule.devices // MOST_NAMES))
        ticks += [top + d for d in shown]
        names += [f"device {d}" for d in shown]
        if name:
            look: dict[str, Any] = {"fontsize": 9, "fontweight": "bold", "parse_math": False}
            ax.text(0, top - 0.56, name, va="bottom", **look)
        top += t.schedule.devices + 1
    ax.set_ylim(top - 1.45, -1.1 if next(iter(items)) else -0.55)  # room for the first name
    style.lanes(ax, ticks, names, FONT)
    legend = _version_legend if by_version else _kind_legend
    handles = legend(items.values())
    if lit is not None:
        handles.append(Patch(color=UNLIT, label="other micro-batches"))
    style.legend(ax, handles, FONT, handlelength=1.2, columnspacing=1.2)
    scale = points_per_unit(ax)
    for top, t in zip(tops, items.values(), strict=True):
        colours, names = _by_version(t) if by_version else _by_kind(t, lit)
        _lanes(ax, t, top, colours, names, scale)


def _kind_legend(items: Collection[Timeline]) -> list[Artist]:
    schedules = [t.schedule for t in items]
    handles = [_handle(kind, items) for kind in kinds_of(schedules)]
    if words := lighter(schedules):
        handles.append(Patch(color=style.lighter(style.KINDS[Kind.F], 0.55), label=words))
    handles.append(Patch(facecolor="white", edgecolor="#b0b0b0", hatch="////", label="idle"))
    return handles


def _handle(kind: Kind, items: Collection[Timeline]) -> Artist:
    """The legend's entry of a kind: a box, or a triangle for updates that take no time."""
    look: dict[str, Any] = {"color": style.KINDS[kind], "label": style.NAMES[kind]}
    mine = [span for t in items for span in t.spans if span.action.kind is kind]
    if all(span.start == span.end for span in mine):
        return Line2D([], [], ls="", marker="v", ms=6, **look)
    return Patch(**look)


def _by_kind(t: Timeline, lit: int | None) -> tuple[list[Colour], list[str]]:
    """Colours and names of all actions."""
    sizes = t.schedule.devices, t.schedule.stages
    colours: list[Colour] = []
    names = []
    for stage, kind, k in t.schedule.actions:
        shown = lit in (None, k) or kind is Kind.U
        colours.append(style.colour_of(kind, stage, *sizes) if shown else UNLIT)
        names.append(str(k) if shown else "")
    return colours, names


def _by_version(t: Timeline) -> tuple[list[Colour], list[str]]:
    colours = [
        style.KINDS[Kind.U] if span.action.kind is Kind.U else style.version_colour(span.version)
        for span in t.spans
    ]
    return colours, [f"{kind.name}{number}" for _, kind, number in t.schedule.actions]


def _version_legend(items: Collection[Timeline]) -> list[Artist]:
    read = {span.version for t in items for span in t.spans if span.action.kind <= Kind.W}
    names: dict[RGB, list[str]] = {}  # colours repeat
    for version in sorted(read):
        names.setdefault(style.version_colour(version), []).append(str(version))
    handles: list[Artist] = [
        Patch(color=colour, label=f"version {', '.join(versions)}")
        for colour, versions in names.items()
    ]
    return [*handles, _handle(Kind.U, items)]


def _lanes(
    ax: Axes, t: Timeline, top: int, colours: list[Colour], names: list[str], scale: float
) -> None:
    """The lanes of a timeline, the first one at `top`, with a box per action.

    scale  points per unit of time
    """
    for d in range(t.schedule.devices):
        idle(ax, top + d, t.makespan)
    boxes, widths = [], []
    longest, joined = 0.64 * max(map(len, names)), t.schedule.joined
    gap = 1 if names[0][:1].isalpha() else 3  # digits alone run into each other
    for i, (span, name, colour) in enumerate(zip(spans(t), names, colours, strict=True)):
        row, kind, points = top + span.device, span.action.kind, (span.end - span.start) * scale
        low, high = row - LANE / 2, row + LANE / 2
        if i + 1 in joined:  # two that overlap have half the lane each
            high = row
        elif i in joined:
            low = row
        a, b = span.start, span.end
        boxes.append([(a, low), (a, high), (b, high), (b, low)])
        if kind <= Kind.W:
            widths.append(points)
            # Names wherever there is room for the longest one.
            if name and (size := min(FONT, (points - gap) / longest)) >= SMALLEST:
                middle = (low + high) / 2
                style.label(ax, (a + b) / 2, middle, name, size, colour, va="center_baseline")
        elif kind is Kind.U and points < 2:
            instant(ax, row, b, style.KINDS[kind])
    edge = min(0.6, median(widths) / 5)  # broad edges wash thin boxes out
    look: dict[str, Any] = {"facecolors": colours, "edgecolors": "white", "linewidths": edge}
    ax.add_collection(PolyCollection(boxes, **look))
