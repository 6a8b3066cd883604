"""A timeline that plays: a cursor sweeps, actions appear, words say what each device does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.animation import FuncAnimation
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from pipelab.plot import style
from pipelab.plot.timeline import (
    FONT,
    SMALLEST,
    bar,
    idle,
    instant,
    points_per_unit,
    spans,
    timeline,
)
from pipelab.predict.timeline import Timeline
from pipelab.table.action import Kind
from pipelab.table.timing import Span

HOLD = 1 / 4  # of the frames show the end
LEFT, RIGHT = 1.02, 1.4  # where the columns beside the lanes begin and end, in widths of the Axes


def animation(
    t: Timeline,
    ax: Axes | None = None,
    *,
    frames: int = 64,
    seconds: float = 10.0,
    title: str | None = None,
) -> FuncAnimation:
    """A timeline as it goes on: each frame shows the actions that have started.

    Those that run have a dark outline. To the right of each lane stand what the device does and how
    many micro-batches it has in flight: forwards started whose backward has not ended (of a chunk
    each, where a device has several). A loop lasts `seconds`; the last quarter of its frames shows
    the end. With `ax` given, leave a third of the figure's width free on its right.
    Raises ValueError for fewer than 2 frames, or seconds that are not positive.

    >>> from pipelab import make, simulate
    >>> movie = animation(simulate(make("gpipe", 2, 2)), frames=8)
    >>> moments = list(movie.new_frame_seq())
    >>> moments[0], moments[-1], len(moments)
    (0.0, 9.0, 8)
    >>> words = movie.to_jshtml()  # or movie.save("gpipe.gif")
    """
    if frames < 2:
        raise ValueError(f"frames={frames!r}: give at least 2")
    if not seconds > 0:
        raise ValueError(f"seconds={seconds!r}: give a positive number")
    if ax is None:
        height = 1.1 + 0.42 * t.schedule.devices
        figure, ax = plt.subplots(figsize=(9, height), dpi=100)
        # Fixed margins: a layout that follows the words would shake.
        figure.subplots_adjust(left=0.075, right=0.72, bottom=0.5 / height, top=1 - 0.5 / height)
    held = int(frames * HOLD)
    moments = np.linspace(0, t.makespan, frames - held).tolist() + [t.makespan] * held
    return FuncAnimation(
        cast(Figure, ax.get_figure(root=True)),
        film(t, ax, title),
        moments,
        interval=1000 * seconds / frames,
    )


def film(t: Timeline, ax: Axes, title: str | None = None) -> Callable[[float], list[Artist]]:
    """Draw what stays; return the function that shows a moment, from the timeline's own zero.

    The boxes of the actions carry the action's text as `gid`, such as 2F0; the words of device d
    carry `device d`.
    """
    # [1] The axes, legend and labels of a timeline stay; its boxes appear one after another.
    timeline(t, ax, title=t.schedule.name if title is None else title)
    for artist in [*ax.patches, *ax.collections, *ax.lines, *ax.texts]:
        artist.remove()
    ax.set_xlim(0, t.makespan * 1.01 or 1)
    ax.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))

    # [2] What moves: lanes that grow, actions, a cursor behind those that run, words on the right.
    played = spans(t)
    devices = range(t.schedule.devices)
    lanes = [idle(ax, d, 0) for d in devices]
    actions = [_action(ax, t, span) for span in played]
    cursor = ax.axvline(0, color="black", lw=1.2, zorder=3)
    side = ax.get_yaxis_transform()
    for x, align, heading in ((LEFT, "left", "now"), (RIGHT, "right", "in flight")):
        ax.text(x, -0.62, heading, transform=side, fontsize=FONT, color=style.GREY, ha=align)
    words = partial(ax.text, s="", transform=side, fontsize=9, va="center")
    now = [words(LEFT, d, gid=f"device {d}") for d in devices]
    in_flight = [words(RIGHT, d, ha="right") for d in devices]

    def show(time: float) -> list[Artist]:
        for span, (box, *rest) in zip(played, actions, strict=True):
            if span.start <= time < span.end:
                box.set(edgecolor="black", linewidth=1.8, zorder=4)
            else:
                box.set(edgecolor="white", linewidth=0.6, zorder=2)
            for artist in (box, *rest):
                artist.set_visible(span.start <= time)
        for d in devices:
            lanes[d].set_width(time)
            does, count = state(t, d, time)
            now[d].set(text=does, color=style.GREY if does in ("waits", "done") else "black")
            in_flight[d].set_text(str(count))
        cursor.set_xdata([time, time])
        return []  # what to draw again, where that is not the whole figure

    return show


def state(t: Timeline, device: int, time: float) -> tuple[str, int]:
    """What a device does at a moment, in words, and how many micro-batches it has in flight.

    The moment counts from the timeline's own zero.

    >>> from pipelab import make, simulate
    >>> t = simulate(make("gpipe", 2, 2))
    >>> state(t, 0, 1.5), state(t, 0, 4.0), state(t, 0, 9.0)
    (('forward 1', 2), ('waits', 2), ('done', 0))
    """
    row = [span for span in spans(t) if span.device == device]
    begun = sum(span.action.kind is Kind.F and span.start <= time for span in row)
    ended = sum(span.action.kind in (Kind.B, Kind.W) and span.end <= time for span in row)
    running = [span for span in row if span.start <= time < span.end]
    if not running:
        return ("done" if row[-1].end <= time else "waits"), begun - ended
    stage, kind, microbatch = running[0].action
    words = f"{style.NAMES.get(kind, 'transfer')} {microbatch}"
    if t.schedule.stages > t.schedule.devices:
        words += f", stage {stage}"
    elif t.schedule.asynchronous and kind <= Kind.W:
        words += f", version {running[0].version}"
    return words, begun - ended


def _action(ax: Axes, t: Timeline, span: Span) -> tuple[Rectangle, *tuple[Artist, ...]]:
    """The box of an action, with a line where it takes no time, or its name where there is room."""
    (stage, kind, microbatch), row = span.action, span.device
    colour = style.colour_of(kind, stage, t.schedule.devices, t.schedule.stages)
    box = bar(ax, row, span.start, span.end, colour, gid=str(span.action))
    if span.end == span.start:
        return box, instant(ax, row, span.end, colour)
    name = kind.name if kind >= Kind.U else f"{kind.name}{microbatch}"
    size = min(FONT, (span.end - span.start) * points_per_unit(ax) / (0.7 * len(name)))
    if size < SMALLEST:
        return (box,)
    middle = (span.start + span.end) / 2
    return box, style.label(ax, middle, row, name, size, colour, va="center_baseline", zorder=5)
