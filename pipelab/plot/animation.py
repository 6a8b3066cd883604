"""A timeline that plays: a cursor sweeps over it, actions appear as they start, a line of words says what each device does."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.animation import FuncAnimation
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from pipelab.action import Kind
from pipelab.plot import style
from pipelab.plot.timeline import FONT, LANE, SMALLEST, colour_of, timeline
from pipelab.timeline import Timeline

HOLD = 1 / 8  # of the frames show the end
LEFT, RIGHT = 1.02, 1.4  # where the columns beside the lanes begin and end, in widths of the Axes


def animation(
    t: Timeline,
    ax: Axes | None = None,
    *,
    frames: int = 64,
    seconds: float = 10.0,
    title: str | None = None,
) -> FuncAnimation:
    """A timeline as it goes on: each frame shows the actions that have started, those that run with a dark outline.

    To the right of each lane stand what the device does and how many micro-batches it has in flight: forwards started
    whose backward has not ended (of a chunk each, where a device has several). A loop lasts `seconds`; the last eighth of
    its frames shows the end. With `ax` given, leave a third of the figure's width free on its right.
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
    moving = frames - int(frames * HOLD)
    moments = np.append(np.linspace(0, t.makespan, moving), np.full(frames - moving, t.makespan))
    show = film(t, ax, title)
    return FuncAnimation(
        cast(Figure, ax.get_figure(root=True)),
        show,
        moments.tolist(),
        interval=1000 * seconds / frames,
    )


def film(t: Timeline, ax: Axes, title: str | None = None) -> Callable[[float], list[Artist]]:
    """Draw what stays on the Axes; return the function that shows the moment `time` (from the timeline's own zero).

    The boxes of the actions carry the action's text as `gid`, such as 2F0; the words of device d carry `device d`.
    """
    timeline(t, ax, title=t.schedule.name if title is None else title)
    for artist in [*ax.patches, *ax.collections, *ax.lines, *ax.texts]:
        artist.remove()  # its axes, legend and labels stay; what it shows at once comes back bit by bit
    ax.set_xlim(0, t.makespan * 1.01 or 1)
    ax.xaxis.set_major_locator(MaxNLocator(7, steps=[1, 2, 5, 10]))
    zero, devices = float(t.start.min()), t.schedule.devices
    start, end = t.start - zero, t.end - zero
    lanes = [
        Rectangle(
            (0, d - LANE / 2), 0, LANE, facecolor="white", edgecolor="#c8c8c8", hatch="////", lw=0
        )
        for d in range(devices)
    ]
    for lane in lanes:
        ax.add_patch(lane)
    boxes = [_box(ax, t, i, start[i], end[i]) for i in range(len(start))]
    cursor = ax.axvline(
        0, color="black", lw=1.2, zorder=3
    )  # behind what runs, so that its label stays legible
    side = ax.get_yaxis_transform()
    for x, words in ((LEFT, "now"), (RIGHT, "in flight")):
        ax.text(
            x,
            -0.62,
            words,
            transform=side,
            fontsize=FONT,
            color=style.GREY,
            ha="left" if x == LEFT else "right",
        )
    now = [
        ax.text(LEFT, d, "", transform=side, fontsize=9, va="center", gid=f"device {d}")
        for d in range(devices)
    ]
    held = [
        ax.text(RIGHT, d, "", transform=side, fontsize=9, va="center", ha="right")
        for d in range(devices)
    ]

    def show(time: float) -> list[Artist]:
        for i, (box, *rest) in enumerate(boxes):
            runs = bool(start[i] <= time < end[i])
            box.set(
                edgecolor="black" if runs else "white",
                linewidth=1.8 if runs else 0.6,
                zorder=4 if runs else 2,
            )
            for artist in (box, *rest):
                artist.set_visible(bool(start[i] <= time))
        for d in range(devices):
            lanes[d].set_width(time)
            does, in_flight = state(t, d, time)
            now[d].set(text=does, color=style.GREY if does in ("waits", "done") else "black")
            held[d].set_text(str(in_flight))
        cursor.set_xdata([time, time])
        return [*lanes, *(artist for action in boxes for artist in action), cursor, *now, *held]

    return show


def state(t: Timeline, device: int, time: float) -> tuple[str, int]:
    """What a device does at a moment (from the timeline's own zero), in words, and how many micro-batches are in flight.

    >>> from pipelab import make, simulate
    >>> t = simulate(make("gpipe", 2, 2))
    >>> state(t, 0, 1.5), state(t, 0, 4.0), state(t, 0, 9.0)
    (('forward 1', 2), ('waits', 2), ('done', 0))
    """
    a, b = t.schedule.bounds[device : device + 2]
    start, end = t.start[a:b] - t.start.min(), t.end[a:b] - t.start.min()
    kind = t.kind[a:b]
    begun = (kind == Kind.F) & (start <= time)
    ended = np.isin(kind, (Kind.B, Kind.W)) & (end <= time)
    in_flight = int(begun.sum() - ended.sum())
    running = np.flatnonzero((start <= time) & (time < end))
    if not running.size:
        return ("done" if (end <= time).all() else "waits"), in_flight
    i = a + int(running[0])
    words = f"{style.NAMES.get(Kind(t.kind[i]), 'transfer')} {t.microbatch[i]}"
    if t.schedule.stages > t.schedule.devices:
        words += f", stage {t.stage[i]}"
    elif t.schedule.asynchronous and t.kind[i] <= Kind.W:
        words += f", version {t.version[i]}"
    return words, in_flight


def _box(
    ax: Axes, t: Timeline, i: int, start: float, end: float
) -> tuple[Rectangle, *tuple[Artist, ...]]:
    s, row, kind = t.schedule, int(t.device[i]), Kind(t.kind[i])
    colour = colour_of(kind, int(t.stage[i]), s.devices, s.stages)
    box = Rectangle(
        (start, row - LANE / 2), end - start, LANE, facecolor=colour, gid=str(s.action(i))
    )
    ax.add_patch(box)
    if end == start:
        return box, *ax.plot(
            [end, end],
            [row - LANE / 2, row + LANE / 2],
            color=colour,
            lw=1.4,
            solid_capstyle="butt",
        )
    label = kind.name if kind >= Kind.U else f"{kind.name}{t.microbatch[i]}"
    figure = cast(Figure, ax.get_figure(root=True))
    points = (
        figure.get_size_inches()[0]
        * 72
        * ax.get_position().width
        * (end - start)
        / np.ptp(ax.get_xlim())
    )
    if (size := min(FONT, points / (0.7 * len(label)))) < SMALLEST:
        return (box,)
    middle = (start + end) / 2
    text = ax.text(
        middle,
        row,
        label,
        ha="center",
        va="center_baseline",
        fontsize=size,
        color=style.ink(colour),
        zorder=5,
    )
    return box, text
