"""A partition: what every device has to do, layer by layer."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes

from pipelab.plot import style
from pipelab.plot.timeline import bar


def partition(
    times: Sequence[float],
    items: Mapping[str, Sequence[int]],
    ax: Axes | None = None,
    *,
    unit: str = "time",
) -> Axes:
    """The time of each device, a box per layer, for one or more partitions.

    `items` maps a name to layers per device; `times` has one value per layer, in `unit`. Shades
    alternate from layer to layer; numbers are layers, from 1. What the busiest devices do is
    hatched, and the dashed line at its end is the pace of the pipeline.
    Raises ValueError where the counts of a partition do not add up to the layers.
    """
    for name, counts in items.items():
        if sum(counts) != len(times):
            layers = " + ".join(map(str, counts))
            raise ValueError(f"{name}: {layers} layers, but there are {len(times)} times")
    ax = style.axes(ax, height=0.8 + 0.38 * sum(len(counts) + 1 for counts in items.values()))
    longest = max(max(sums(times, counts)) for counts in items.values())
    row, ticks, names = 0, [], []
    for name, counts in items.items():
        work = sums(times, counts)
        ends = np.cumsum([0, *counts]).tolist()
        above = row - 0.5
        for d, (a, b) in enumerate(pairwise(ends)):
            busiest = np.isclose(work[d], max(work))
            left = 0.0
            for i in range(a, b):
                shade = 0.2 if i % 2 else 0.45
                colour = style.lighter(style.ORANGE if busiest else style.BLUE, shade)
                bar(ax, row, left, left + times[i], colour, lw=0.8, hatch=".." if busiest else "")
                if times[i] > longest * 0.03:
                    around = {"facecolor": colour, "lw": 0, "pad": 1}
                    style.label(ax, left + times[i] / 2, row, str(i + 1), 9, colour, bbox=around)
                left += times[i]
            last = f"layers {a + 1} to {b}" if b - a > 1 else f"layer {b}"
            ax.text(longest * 1.02, row, f"{last}: {left:.3g}", va="center", fontsize=9)
            ticks.append(row)
            names.append(f"device {d}")
            row += 1
        ax.plot([max(work)] * 2, [above, row - 0.5], "--", color=style.GREY, lw=1)
        ax.text(0, above - 0.05, name, fontsize=9, fontweight="bold", va="bottom")
        row += 1
    style.lanes(ax, ticks, names)
    ax.set_xlim(0, longest * 1.2)
    ax.set_ylim(row - 1.45, -1.1)
    ax.set_xlabel(unit)
    return ax


def sums(times: Sequence[float], counts: Sequence[int]) -> list[float]:
    """The time of each device.

    >>> sums([1, 2, 3, 4], [3, 1])
    [6.0, 4.0]
    """
    ends = np.cumsum([0, *counts]).tolist()
    return [float(sum(times[a:b])) for a, b in pairwise(ends)]
