"""Weight versions over time: which are kept in which buffer, and the gradients that gather for the next one."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from pipelab.action import Kind
from pipelab.plot import style
from pipelab.plot.timeline import LANE
from pipelab.timeline import Timeline


def buffers(t: Timeline, stage: int = 0) -> list[tuple[int, int, float, float]]:
    """Where a stage keeps its weight versions: (buffer, version, from, to), times from the timeline's own zero.

    A version takes the buffer that has been free longest when its update ends and frees it when its last reader ends.

    >>> from pipelab import Costs, make, simulate
    >>> buffers(simulate(make("pipedream_2bw", 2, 2, batches=3), Costs(update=1)))
    [(0, 0, 0.0, 16.0), (1, 1, 10.0, 23.0), (0, 2, 17.0, 24.0), (1, 3, 24.0, 24.0)]
    """
    zero, out = float(t.start.min()), []
    free: list[float] = []  # when each buffer is
    for life in (life for life in t.schedule.lives if life.stage == stage):
        born = float(t.end[life.born]) - zero if life.born >= 0 else 0.0
        dies = float(t.end[max(life.last, life.born)]) - zero
        place = free.index(min(free)) if free and min(free) <= born else len(free)
        free[place : place + 1] = [dies]
        out.append((place, life.version, born, dies))
    return out


def versions(t: Timeline, stage: int = 0, ax: Axes | None = None) -> Axes:
    """The weight versions that a stage keeps over time, below its actions; then the gradients gathered for the next one.

    An action has the colour and the number (v) of the version that it reads. A step of the gradients is one backward's; an
    update takes them all and makes a version.
    """
    kept, s = buffers(t, stage), t.schedule
    count = 1 + max(place for place, *_ in kept)
    ax = style.axes(ax, height=1.1 + 0.55 * (count + 2))
    zero = float(t.start.min())
    mine = np.flatnonzero(t.stage == stage)
    ax.set_xlim(0, t.makespan * 1.002)
    ax.add_patch(
        Rectangle(
            (0, -LANE / 2),
            t.makespan,
            LANE,
            facecolor="white",
            edgecolor="#c8c8c8",
            hatch="////",
            lw=0,
        )
    )
    for i in mine.tolist():
        kind, a, b = Kind(t.kind[i]), float(t.start[i]) - zero, float(t.end[i]) - zero
        if kind <= Kind.W:
            colour = version_colour(int(t.version[i]), 0.55 if kind == Kind.F else 0.1)
            label = f"{kind.name}{t.microbatch[i]}\nv{t.version[i]}"
        else:
            colour, label = style.lighter(style.GREY, 0), kind.name
        _box(ax, 0, a, b, colour, label, 7.5)
    for place, version, a, b in kept:
        if b > a:
            _box(ax, 1 + place, a, b, version_colour(version, 0.3), f"version {version}", 9)
    low = count + 1 + LANE / 2
    for group in range(s.updates):
        numbers = range(group * s.per_update, (group + 1) * s.per_update)
        ends = sorted(
            float(t.end[max(s.position[[Kind.B, Kind.W], stage, k])]) - zero for k in numbers
        )
        until = float(t.end[s.position[Kind.U, stage, group]]) - zero
        for n, (a, b) in enumerate(zip(ends, [*ends[1:], until], strict=True), 1):
            height = LANE * n / s.per_update
            ax.add_patch(
                Rectangle(
                    (a, low - height), b - a, height, facecolor="#d4d4d4", edgecolor="white", lw=0.8
                )
            )
            if b - a >= 1:
                ax.text((a + b) / 2, low - 0.06, str(n), ha="center", va="bottom", fontsize=8)
    ax.set_ylim(count + 1.6, -0.55)
    ax.set_yticks(
        range(count + 2),
        ["actions", *(f"buffer {i}" for i in range(count)), "gradients"],
        fontsize=9,
    )
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlabel("time")
    title = f"{s.name}, stage {stage}: {count} weight version{'s'[: count > 1]}, an update every {s.per_update} micro-batches"
    ax.set_title(title, loc="left", fontsize=10)
    return ax


def version_colour(version: int, share: float) -> tuple[float, float, float]:
    """A version's colour, mixed with `share` of white."""
    return style.lighter(style.LINES[version % len(style.LINES)], share)


def _box(
    ax: Axes,
    row: int,
    a: float,
    b: float,
    colour: tuple[float, float, float],
    label: str,
    size: float,
) -> None:
    ax.add_patch(
        Rectangle((a, row - LANE / 2), b - a, LANE, facecolor=colour, edgecolor="white", lw=0.8)
    )
    if b > a:
        ax.text(
            (a + b) / 2,
            row,
            label,
            ha="center",
            va="center",
            fontsize=size,
            color=style.ink(colour),
            linespacing=1,
        )
