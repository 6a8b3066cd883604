"""Memory: bytes over time on one device, and the peaks of all devices, stacked by cause."""

from operator import add
from typing import Any

from matplotlib.axes import Axes

from pipelab.plot import style
from pipelab.plot.timeline import LANE
from pipelab.predict.memory import MEMORY_CAUSES, Memory
from pipelab.show.units import BYTES, scale_of


def memory(m: Memory, device: int = 0, ax: Axes | None = None) -> Axes:
    """Bytes over time on one device, stacked by cause; the dashed line is the peak."""
    ax = style.axes(ax, height=2.6)
    times, levels = m.over_time(device)
    factor, unit = scale_of(m.peak()[device], BYTES)
    top = m.peak()[device] / factor
    shown = [cause for cause, level in levels.items() if any(level)]
    if shown:
        ax.stackplot(
            [time - m.steps[0].time for time in times],
            [[held / factor for held in levels[cause]] for cause in shown],
            step="post",
            labels=shown,
            colors=[style.MEMORY_CAUSES[cause] for cause in shown],
            lw=0,
        )
        ax.axhline(top, color=style.GREY, ls="--", lw=0.8)
        style.legend(ax)
    ax.set_ylim(0, top * 1.08 or 1)
    ax.set_xlabel("time (s)" if m.source == "measured" else "time")
    ax.set_ylabel(unit)
    style.title(ax, f"device {device}, {m.source}: peak {top:.4g} {unit}")
    return ax


def peaks(items: dict[str, Memory], ax: Axes | None = None, rows: str = "device") -> Axes:
    """Bars of what fills every device at its peak, by cause: a row per memory, device 0 on top.

    `rows`: what a memory has one of for each, such as "stage"
    """
    devices = max(m.devices for m in items.values())
    every = 1 + devices // 12  # of many bars, only every second, third, ... is named
    ax = style.axes(ax, 7, 0.8 + 0.15 * len(items) * (devices // every + 2))
    largest = max(max(m.peak()) for m in items.values())
    factor, unit = scale_of(largest, BYTES)
    thick = LANE / devices
    named: dict[str, Any] = {}
    for row, m in enumerate(items.values()):
        y = [row + (d + 0.5) * thick - LANE / 2 for d in range(m.devices)]
        held = [m.at_peak(d) for d in range(m.devices)]
        left = [0.0] * m.devices
        for cause in MEMORY_CAUSES:
            width = [of_device[cause] / factor for of_device in held]
            bars = ax.barh(y, width, thick * 0.9, left, color=style.MEMORY_CAUSES[cause])
            if any(width):
                bars.set_label(cause)
                named[cause] = bars
            left = [*map(add, left, width)]
        names = ["" if d % every else f"{rows} {d}" for d in range(m.devices)]
        ax.bar_label(bars, names, padding=3, fontsize=7, color=style.GREY)
    style.lanes(ax, range(len(items)), [*items])
    ax.set_ylim(len(items) - 0.5, -0.5)
    ax.set_xlim(0, largest / factor * 1.12 or 1)
    ax.set_xlabel(f"{unit} at the peak")
    style.legend(ax, [named[cause] for cause in MEMORY_CAUSES if cause in named])
    return ax
