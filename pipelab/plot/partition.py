"""What layers cost, and a partition of them: what every stage has to do."""

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes

from pipelab.action import Kind
from pipelab.partition import Partition, Profile
from pipelab.plot import style
from pipelab.plot.timeline import bar, idle


def partition(
    items: Partition | Mapping[str, Partition],
    ax: Axes | None = None,
    *,
    unit: str = "ms per micro-batch",
    scale: float = 1e3,
) -> Axes:
    """The time of each stage, a box per layer, for one partition or several by name.

    A layer that r devices share takes an r-th of its time. Shades alternate from layer to layer;
    numbers count layers in the order of the stages, from 0. The all-reduce of replicas is grey. The
    dashed line is the pace of the pipeline, the slowest stage or link; what is hatched in front of
    it is idle in every micro-batch. Times are `scale` times seconds, in `unit`.
    """
    if isinstance(items, Partition):
        items = {"": items}
    if any(not found.bottleneck for found in items.values()):
        raise ValueError("the profile has no times: measure them, or leave out the picture")
    lanes = sum(len(found.stages) + 1 for found in items.values())
    ax = style.axes(ax, height=0.8 + 0.38 * lanes)
    longest = scale * max(found.bottleneck for found in items.values())
    row, ticks, names = 0, [], []
    for name, found in items.items():
        above, number, pace = row - 0.5, 0, scale * found.bottleneck
        slowest = max(stage.time for stage in found.stages)
        for s, stage in enumerate(found.stages):
            colour = style.ORANGE if stage.time == slowest else style.BLUE
            idle(ax, row, pace)
            left = 0.0
            for i in stage.layers:
                width = scale * found.profile.layers[i].time / stage.replicas
                shade = style.lighter(colour, 0.2 if number % 2 else 0.45)
                bar(ax, row, left, left + width, shade, lw=0.8)
                if width > longest * 0.03:
                    style.label(ax, left + width / 2, row, str(number), 9, shade)
                left, number = left + width, number + 1
            if stage.allreduce:
                bar(ax, row, left, scale * stage.time, style.GREY, lw=0.8)
            count = len(stage.layers)
            layers = (
                f"layers {number - count} to {number - 1}" if count > 1 else f"layer {number - 1}"
            )
            share = 1 - stage.time / found.bottleneck
            text = f"{layers}: {scale * stage.time:.3g}, {share:.0%} idle"
            ax.text(longest * 1.02, row, text, va="center", fontsize=9)
            ticks.append(row)
            names.append(f"stage {s}" + (f" x {stage.replicas}" if stage.replicas > 1 else ""))
            row += 1
        ax.plot([pace] * 2, [above, row - 0.5], "--", color=style.GREY, lw=1)
        ax.text(0, above - 0.05, name, fontsize=9, fontweight="bold", va="bottom")
        row += 1
    style.lanes(ax, ticks, names)
    ax.set_xlim(0, longest * 1.3)
    ax.set_ylim(row - 1.45, -1.1)
    ax.set_xlabel(unit)
    return ax


def profile(found: Profile, ax: Axes | None = None) -> Axes:
    """Milliseconds of every layer, by forward, input gradient and weight gradient."""
    ax = style.axes(ax, height=0.8 + 0.26 * len(found.layers))
    left, places = np.zeros(len(found.layers)), range(len(found.layers))
    parts = {"forward": Kind.F, "input_grad": Kind.I, "weight_grad": Kind.W}
    for name, kind in parts.items():
        width = 1e3 * found.of(name)
        ax.barh(places, width, 0.8, left, color=style.KINDS[kind], label=style.NAMES[kind])
        left = left + width
    style.lanes(ax, list(places), [layer.name for layer in found.layers])
    ax.invert_yaxis()
    ax.set_xlabel(f"ms, {found.samples} samples")
    style.legend(ax)
    return ax
