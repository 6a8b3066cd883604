"""Memory: bytes over time on one device, and the peaks of all devices, stacked by cause."""

from operator import add

from matplotlib.axes import Axes

from pipelab.plot import style
from pipelab.predict.memory import MEMORY_CAUSES, Memory
from pipelab.predict.timeline import scale_of


def memory(m: Memory, device: int = 0, ax: Axes | None = None) -> Axes:
    """Bytes over time on one device, stacked by cause; the dashed line is the peak."""
    ax = style.axes(ax, height=2.6)
    times, levels = m.over_time(device)
    factor, unit = scale_of(m.peak()[device], style.BYTES)
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


def peaks(items: dict[str, Memory], ax: Axes | None = None) -> Axes:
    """Bars of what fills every device at its peak, by cause; several memories side by side."""
    devices = range(max(m.devices for m in items.values()))
    crowded = len(devices) * len(items) > 24
    ax = style.axes(ax, width=max(7, 0.12 * len(devices) * len(items)), height=2.8)
    largest = max(max(m.peak()) for m in items.values())
    factor, unit = scale_of(largest, style.BYTES)
    upright = len(items) > 2  # names of many bars have no room side by side
    width = 0.8 / len(items)
    labelled = set()
    for j, (name, m) in enumerate(items.items()):
        x = [d + (j - (len(items) - 1) / 2) * width for d in range(m.devices)]
        held = [m.at_peak(d) for d in range(m.devices)]
        bottom = [0.0] * m.devices
        for cause in MEMORY_CAUSES:
            height = [of_device[cause] / factor for of_device in held]
            bars = ax.bar(x, height, width * 0.9, bottom, color=style.MEMORY_CAUSES[cause])
            if any(height) and cause not in labelled:
                bars.set_label(cause)
                labelled.add(cause)
            bottom = [*map(add, bottom, height)]
        if len(items) > 1:
            turn = 90 if upright else 0
            # Of many bars the first on device 0, the second on device 1, ...: there is room.
            names = [name if not crowded or d == j % m.devices else "" for d in range(m.devices)]
            ax.bar_label(bars, names, padding=2, fontsize=7, rotation=turn)
    if crowded or len(devices) > 12:  # numbers alone; bars stand in the order of the first names
        ax.set_xticks(devices, [str(d) for d in devices], fontsize=7)
        ax.set_xlabel("device")
    else:
        ax.set_xticks(devices, [f"device {d}" for d in devices])
    ax.set_ylabel(f"{unit} at the peak")
    ax.set_ylim(0, largest / factor * (1.4 if upright else 1.15) or 1)
    style.legend(ax)
    return ax
