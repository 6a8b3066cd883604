"""A partition: what every device has to do, layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes

from pipelab.plot import style


def partition(
    times: Sequence[float],
    items: Mapping[str, Sequence[int]],
    ax: Axes | None = None,
    *,
    unit: str = "time",
) -> Axes:
    """The time of each device, a box per layer, for one or more partitions: `items` maps a name to layers per device.

    `times` has one value per layer, in `unit`. Shades alternate from layer to layer; numbers are layers, from 1. What
    the busiest devices do is hatched, and the dashed line at its end is the pace of the pipeline.
    Raises ValueError where the counts of a partition do not add up to the layers.
    """
    for name, counts in items.items():
        if sum(counts) != len(times):
            raise ValueError(
                f"{name}: {' + '.join(map(str, counts))} layers, but there are {len(times)} times"
            )
    ax = style.axes(ax, height=0.8 + 0.38 * sum(len(counts) + 1 for counts in items.values()))
    top, ticks, labels = 0, [], []
    longest = max(max(sums(times, counts)) for counts in items.values())
    for name, counts in items.items():
        work = sums(times, counts)
        ends, slowest = np.cumsum([0, *counts]).tolist(), np.isclose(work, max(work))
        for d, (a, b) in enumerate(pairwise(ends)):
            left = 0.0
            for i in range(a, b):
                colour = style.lighter(
                    style.ORANGE if slowest[d] else style.BLUE, 0.2 if i % 2 else 0.45
                )
                hatch = ".." if slowest[d] else ""
                ax.barh(
                    top + d,
                    times[i],
                    0.86,
                    left,
                    color=colour,
                    edgecolor="white",
                    linewidth=0.8,
                    hatch=hatch,
                )
                if times[i] > longest * 0.03:
                    label = ax.text(
                        left + times[i] / 2,
                        top + d,
                        str(i + 1),
                        ha="center",
                        va="center",
                        fontsize=9,
                    )
                    label.set(
                        color=style.ink(colour), bbox={"facecolor": colour, "lw": 0, "pad": 1}
                    )
                left += times[i]
            last = f"layers {a + 1} to {b}" if b - a > 1 else f"layer {b}"
            ax.text(longest * 1.02, top + d, f"{last}: {left:.3g}", va="center", fontsize=9)
        ax.plot([max(work)] * 2, [top - 0.5, top + len(counts) - 0.5], "--", color=style.GREY, lw=1)
        ax.text(0, top - 0.55, name, fontsize=9, fontweight="bold", va="bottom")
        ticks += [top + d for d in range(len(counts))]
        labels += [f"device {d}" for d in range(len(counts))]
        top += len(counts) + 1
    ax.set_yticks(ticks, labels, fontsize=9)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.set_xlim(0, longest * 1.2)
    ax.set_ylim(top - 1.45, -1.1)
    ax.set_xlabel(unit)
    return ax


def sums(times: Sequence[float], counts: Sequence[int]) -> list[float]:
    """The time of each device.

    >>> sums([1, 2, 3, 4], [3, 1])
    [6.0, 4.0]
    """
    ends = np.cumsum([0, *counts]).tolist()
    return [float(sum(times[a:b])) for a, b in pairwise(ends)]
