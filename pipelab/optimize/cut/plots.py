"""Plots of layers' costs and of their partition into stages."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes

from pipelab.optimize.cut import CutStage, Partition, Profile
from pipelab.plot import style
from pipelab.plot.timeline import bar, idle
from pipelab.table.action import Kind

SLOWEST, OTHERS = style.lighter(style.ORANGE, 0.2), style.lighter(style.BLUE, 0.3)
ENTRIES = "slowest stage", "other stages", "all-reduce", "idle", "pace: the slowest stage or link"
PACE: dict[str, Any] = {"color": "black", "lw": 1.4}


def partition(
    items: Partition | Mapping[str, Partition],
    ax: Axes | None = None,
    *,
    unit: str = "ms per micro-batch",
    scale: float = 1e3,
) -> Axes:
    """The time of each stage, a box per layer, for one partition or several by name.

    Boxes of the slowest stage are orange, those of others blue. A layer that r devices share takes
    an r-th of its time. Numbers count layers in the order of the stages, from 0. The dashed line is
    the pipeline's pace, set by its slowest stage or link; the hatched time before it is idle in
    every micro-batch. Times are `scale` times seconds, in `unit`.
    """
    if isinstance(items, Partition):
        items = {"": items}
    longest = scale * max(found.bottleneck for found in items.values())
    if not longest:
        raise ValueError("the profile has no times: measure them, or leave out the picture")
    lanes = sum(len(found.stages) + 1 for found in items.values())
    ax = style.axes(ax, height=1.0 + 0.38 * lanes)
    # To the right of the bars are words.
    ax.set_xlim(0, longest * 1.3)
    row, ticks, names = 0, [], []
    entries: dict[str, Artist] = {}  # by name: what there is of the legend's
    for name, found in items.items():
        pace = scale * found.bottleneck
        ax.plot([pace] * 2, [row - 0.45, row + len(found.stages) - 0.5], "--", **PACE)
        look: dict[str, Any] = {"fontsize": 9, "fontweight": "bold", "parse_math": False}
        ax.text(0, row - 0.55, name, va="bottom", **look)
        first = 0
        for s, stage in enumerate(found.stages):
            background = idle(ax, row, pace)
            entries |= _stage(ax, row, found, stage, first, scale)
            if stage.time < found.bottleneck:
                entries["idle"] = background
            last = first + len(stage.layers) - 1
            layers = f"layers {first} to {last}" if last > first else f"layer {first}"
            share = 1 - stage.time / found.bottleneck
            text = f"{layers}: {scale * stage.time:.3g}, {share:.0%} idle"
            ax.text(longest * 1.02, row, text, va="center", fontsize=9)
            ticks.append(row)
            names.append(f"stage {s}" + (f" x {stage.replicas}" if stage.replicas > 1 else ""))
            row, first = row + 1, last + 1
        row += 1
    style.lanes(ax, ticks, names)
    ax.set_ylim(row - 1.45, -1.1 if next(iter(items)) else -0.6)  # room for the first name
    ax.set_xlabel(unit)
    entries[ENTRIES[-1]] = ax.lines[0]
    for label, artist in entries.items():
        artist.set_label(label)
    style.legend(ax, [entries[name] for name in ENTRIES if name in entries], 9)
    return ax


def _stage(
    ax: Axes, row: int, found: Partition, stage: CutStage, first: int, scale: float
) -> dict[str, Artist]:
    """A box per layer of a stage, the first layer's number being `first`; then its all-reduce."""
    slowest = stage.time == max(other.time for other in found.stages)
    colour, left = SLOWEST if slowest else OTHERS, 0.0
    entries: dict[str, Artist] = {}
    for number, i in enumerate(stage.layers, first):
        width = scale * found.profile.layers[i].time / stage.replicas
        box = bar(ax, row, left, left + width, colour, lw=0.8)
        entries["slowest stage" if slowest else "other stages"] = box
        # Numbers that do not fit would cover each other.
        if width > ax.get_xlim()[1] * 0.025:
            style.label(ax, left + width / 2, row, str(number), 9, colour)
        left += width
    if stage.allreduce:
        entries["all-reduce"] = bar(ax, row, left, scale * stage.time, style.GREY, lw=0.8)
    return entries


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
    ax.set_xlabel("ms" if found.samples is None else f"ms, {found.samples} samples")
    style.legend(ax)
    return ax
