"""Memory: bytes over time on one device, and the peaks of all devices, stacked by cause."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes

from pipelab.memory import CAUSES, Memory
from pipelab.plot import style


def memory(m: Memory, device: int = 0, ax: Axes | None = None) -> Axes:
    """Bytes over time on one device, stacked by cause; the dashed line is the peak."""
    ax = style.axes(ax, height=2.6)
    time, level = m.over_time(device)
    top = float(level.sum(axis=0).max(initial=0))
    factor, unit = style.scale_of(top, style.BYTES)
    shown = [i for i in range(len(CAUSES)) if level[i].any()]
    if shown:
        ax.stackplot(
            time - m.time.min(),
            level[shown] / factor,
            step="post",
            labels=[CAUSES[i] for i in shown],
            colors=[style.CAUSES[CAUSES[i]] for i in shown],
            lw=0,
        )
        ax.axhline(top / factor, color=style.GREY, ls="--", lw=0.8)
        ax.legend(
            loc="lower right",
            bbox_to_anchor=(1, 1),
            ncols=len(shown),
            fontsize=8,
            frameon=False,
            borderaxespad=0.1,
        )
    ax.set_ylim(0, top / factor * 1.08 or 1)
    ax.set_xlabel("time (s)" if m.source == "measured" else "time")
    ax.set_ylabel(unit)
    ax.set_title(
        f"device {device}, {m.source}: peak {top / factor:.4g} {unit}", loc="left", fontsize=10
    )
    return ax


def peaks(items: dict[str, Memory], ax: Axes | None = None) -> Axes:
    """What fills every device at its peak, by cause; several memories side by side."""
    ax = style.axes(ax, width=7, height=2.8)
    count = max(m.devices for m in items.values())
    factor, unit = style.scale_of(max(max(m.peak()) for m in items.values()), style.BYTES)
    width, used = 0.8 / len(items), set()
    for j, (name, m) in enumerate(items.items()):
        x = np.arange(m.devices) + (j - (len(items) - 1) / 2) * width
        bottom = np.zeros(m.devices)
        for cause in CAUSES:
            height = np.array([m.at_peak(d)[cause] for d in range(m.devices)]) / factor
            if height.any():
                label = cause if cause not in used else None
                ax.bar(
                    x,
                    height,
                    width * 0.92,
                    bottom,
                    color=style.lighter(style.CAUSES[cause], 0.3 * (j % 2)),
                    label=label,
                )
                used.add(cause)
                bottom += height
        if len(items) > 1:
            for xi, h in zip(x, bottom, strict=True):
                turn = 90 if len(items) > 2 else 0
                ax.annotate(
                    name,
                    (xi, h),
                    (0, 2),
                    textcoords="offset points",
                    ha="center",
                    va="bottom",
                    fontsize=7,
                    rotation=turn,
                )
    ax.set_xticks(range(count), [f"device {d}" for d in range(count)])
    ax.set_ylabel(f"{unit} at the peak")
    ax.set_ylim(
        0,
        max(max(m.peak()) for m in items.values()) / factor * (1.4 if len(items) > 2 else 1.15)
        or 1,
    )
    ax.legend(
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=max(len(used), 1),
        fontsize=8,
        frameon=False,
        borderaxespad=0.1,
    )
    return ax
