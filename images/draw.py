"""The pictures in this folder: python images/draw.py, or `make images`.

Each function draws one; the first paragraph of its docstring is the picture's alt text.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.animation import FuncAnimation
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from animation import animation
from diagrams import arrow, layers, microbatches, paths, pooling
from files import save
from pipelab import Costs, Kind, Timeline, make, memory, plot, simulate
from pipelab.optimize.cut import plots, split_layers
from pipelab.optimize.cut.vgg16 import vgg16
from pipelab.plot import style
from pipelab.plot.timeline import bar

Draw = Callable[[], Axes | FuncAnimation]
PICTURES: dict[str, Draw] = {}


def picture(name: str) -> Callable[[Draw], Draw]:
    """Enter a function that draws into PICTURES under its file's name."""

    def enter(draw: Draw) -> Draw:
        PICTURES[name] = draw
        return draw

    return enter


def alt(name: str) -> str:
    """The alt text of a picture.

    >>> alt("gpipe.gif")[:34]
    'Animation of GPipe on four devices'
    """
    return " ".join((PICTURES[name].__doc__ or "").split("\n\n")[0].split())


def legend(ax: Axes, last: Patch) -> Axes:
    """The legend of forward, backward and update, and one entry more."""
    kinds = (Kind.F, Kind.B, Kind.U)
    style.legend(ax, [*(Patch(color=style.KINDS[k], label=style.NAMES[k]) for k in kinds), last])
    return ax


# ---- all schedules


@picture("overview.png")
def overview() -> Axes:
    """One batch on four devices: one device at a time takes 96 units, GPipe and 1F1B 33,
    interleaved 28.5 with two chunks a device and 26.25 with four.
    """
    names = {
        "One device at a time": ("inter_layer", 1),
        "GPipe or 1F1B": ("pipedream_flush", 1),
        "Interleaved, two chunks a device": ("interleaved", 2),
        "Interleaved, four chunks a device": ("interleaved", 4),
    }
    items = {}
    for words, (name, chunks) in names.items():
        t = simulate(make(name, 4, 8, virtual=chunks), Costs().split(chunks))
        items[f"{words}: {t.makespan:g}"] = t
    return plot.timelines(items, style.axes(None, 10, 5.6))


@picture("timeline_inter_layer.png")
def timeline_inter_layer() -> Axes:
    """Inter-layer timeline of four devices and eight micro-batches: a single box at any time,
    the rest of the lanes idle.
    """
    return plot.timeline(simulate(make("inter_layer", 4, 8)))


@picture("timeline_gpipe.png")
def timeline_gpipe() -> Axes:
    """GPipe timeline of four devices: eight forwards in a staircase, then eight backwards, then
    the update; idle between.
    """
    return plot.timeline(simulate(make("gpipe", 4, 8)))


@picture("timeline_pipedream.png")
def timeline_pipedream() -> Axes:
    """PipeDream timeline over two batches: after a warm-up, forward and backward alternate on
    every device, never a flush.
    """
    return plot.timeline(simulate(make("pipedream", 4, 8, batches=2)))


@picture("timeline_pipedream_2bw.png")
def timeline_pipedream_2bw() -> Axes:
    """PipeDream-2BW timeline over two batches: as PipeDream's, but with one update after every
    eighth backward.
    """
    return plot.timeline(simulate(make("pipedream_2bw", 4, 8, batches=2)))


@picture("timeline_pipedream_flush.png")
def timeline_pipedream_flush() -> Axes:
    """PipeDream-Flush timeline: forward and backward alternate within a batch of eight; then
    all drain, update and end.
    """
    return plot.timeline(simulate(make("pipedream_flush", 4, 8)))


@picture("timeline_interleaved.png")
def timeline_interleaved() -> Axes:
    """Interleaved timeline, two chunks a device: smaller boxes in two shades take turns, and
    the idle corners are smaller.
    """
    return plot.timeline(simulate(make("interleaved", 4, 8, virtual=2), Costs().split(2)))


@picture("timeline_zb_h1.png")
def timeline_zb_h1() -> Axes:
    """ZB-H1 timeline of four devices: weight gradients wait, more of them on later devices, and
    fill the drain; all devices end together.
    """
    return plot.timeline(simulate(make("zb_h1", 4, 8)))


# ---- inter-layer


@picture("inter_layer_split.png")
def inter_layer_split() -> Axes:
    """Layers 1 to 3 on device 0, layers 4 and 5 on device 1: activations go on to the next
    layer, gradients come back.
    """
    return layers([3, 2])


@picture("inter_layer_turns.png")
def inter_layer_turns() -> Axes:
    """Two batches on four devices, one device at a time: arrows hand the activations down and
    the gradients back up.
    """
    t = simulate(make("inter_layer", 4, 1, batches=2), Costs(transfer=0.5, update=0.5))
    ax = plot.timeline(t, title="Two batches: one device works, the others wait")
    for i in t.schedule.crossing:
        made = t.schedule.inputs[i]
        assert made is not None
        span, source = t.spans[i], t.spans[made]
        assert span.arrived is not None
        here, there = (source.end, source.device), (span.arrived, span.device)
        arrow(ax, here, there, style.KINDS[Kind.SEND_F], 2)
    return legend(ax, Patch(color=style.KINDS[Kind.SEND_F], label="transfer"))


@picture("inter_layer.gif")
def inter_layer() -> FuncAnimation:
    """Animation of inter-layer parallelism: a batch goes down four devices and back up while
    three of them wait.
    """
    t = simulate(make("inter_layer", 4, 1, batches=2), Costs(update=1))
    return animation(t, title="Inter-layer: one device at a time")


# ---- GPipe


@picture("gpipe_microbatches.png")
def gpipe_microbatches() -> Axes:
    """A mini-batch of 16 samples in a row; below it the same samples as four micro-batches of
    four.
    """
    return microbatches(16, 4)


@picture("gpipe.gif")
def gpipe() -> FuncAnimation:
    """Animation of GPipe on four devices: eight micro-batches fill the pipeline, come back, and
    all devices update.
    """
    return animation(simulate(make("gpipe", 4, 8), Costs(update=1)), title="GPipe")


# ---- PipeDream


@picture("pipedream.gif")
def pipedream() -> FuncAnimation:
    """Animation of PipeDream's 1F1B: after the warm-up each device does one forward, one
    backward, and updates at once.
    """
    return animation(simulate(make("pipedream", 4, 8)), title="PipeDream: 1F1B")


@picture("pipedream_versions.png")
def pipedream_versions() -> Axes:
    """Which weight version each action of PipeDream reads: a backward reads the same version as
    its forward, which may be three updates old.
    """
    t = simulate(make("pipedream", 4, 6))
    ax = plot.timeline(
        t,
        style.axes(None, 10, 3.4),
        by_version=True,
        title="PipeDream: the weight version (v) an action reads",
    )
    for span in t.spans:
        if span.action.kind <= Kind.W:
            middle, low = (span.start + span.end) / 2, span.device + 0.36
            style.label(ax, middle, low, f"v{span.version}", 7, va="bottom")
    return ax


# ---- the flush


@picture("pipeline_flush.png")
def pipeline_flush() -> Axes:
    """Two batches of GPipe: every device waits nine units while the pipeline fills, turns round
    and drains.
    """
    t = simulate(make("gpipe", 4, 6, batches=2), Costs(update=0.5))
    gaps = flush_gaps(t)
    idle = sum(b - a for device, a, b in gaps if device == 0)
    ax = plot.timeline(t, title=f"A flush between two batches: every device waits {idle:g} units")
    around = {"facecolor": style.YELLOW, "lw": 0, "pad": 3}
    for device, a, b in gaps:
        bar(ax, device, a, b, style.YELLOW, style.GREY, hatch="..", lw=0.8)
        style.label(ax, (a + b) / 2, device, f"{b - a:g}", 8, style.YELLOW, bbox=around)
    wait = Patch(facecolor=style.YELLOW, edgecolor=style.GREY, hatch="..", label="waits (how long)")
    return legend(ax, wait)


def flush_gaps(t: Timeline) -> list[tuple[int, float, float]]:
    """Idle (device, from, to) from a device's first backward of a batch to that of the next one."""
    gaps = []
    for d in range(t.schedule.devices):
        row = [span for span in t.spans if span.device == d]
        backwards = [i for i, span in enumerate(row) if span.action.kind is Kind.B]
        firsts = backwards[:: t.schedule.microbatches]
        for one, following in pairwise(row[firsts[0] : firsts[-1] + 1]):
            if following.start > one.end:
                gaps.append((d, one.end, following.start))
    return gaps


@picture("flush_memory.png")
def flush_memory() -> Axes:
    """Activations kept over time on four devices: GPipe climbs to all eight micro-batches, 1F1B
    to 4, 3, 2, 1.
    """
    costs = Costs(activations=1)
    kept = {
        name: memory(simulate(make(name, 4, 8), costs), costs)
        for name in ("gpipe", "pipedream_flush")
    }
    figure, grid = plt.subplots(
        2, 2, figsize=(10, 4.6), sharex=True, sharey=True, layout="constrained"
    )
    looks = {
        "gpipe": ("GPipe", style.ORANGE, "--"),
        "pipedream_flush": ("1F1B with a flush", style.BLUE, "-"),
    }
    for device, ax in enumerate(grid.flat):
        style.axes(ax)
        peaks = []
        for name, m in kept.items():
            label, colour, line = looks[name]
            time, level = m.over_time(device)
            time, total = [time[0], *time], [0, *map(sum, zip(*level.values(), strict=True))]
            ax.plot(time, total, line, drawstyle="steps-post", color=colour, lw=2, label=label)
            if line == "-":
                ax.fill_between(time, total, step="post", color=style.lighter(colour, 0.8), lw=0)
            peaks.append(f"{label} {max(total):g}")
        ax.set_title(f"device {device}: peak {', '.join(peaks)}", loc="left", fontsize=10)
    figure.supxlabel("time", fontsize=10)
    figure.supylabel("micro-batches whose activations are kept", fontsize=10)
    grid[0, 1].legend(fontsize=9, frameon=False, loc="upper right")
    return grid[0, 0]


@picture("max_pooling.png")
def max_pooling() -> Axes:
    """Max-pooling of 4 x 4 to 2 x 2: the backward puts each of four gradients where the largest
    input of its block stood.
    """
    x = np.random.default_rng(4).permutation(16).reshape(4, 4)
    return pooling(x, np.array([[3, -1], [2, 5]]))


# ---- partition


@picture("partition.png")
def partition() -> Axes:
    """VGG-16's sixteen layers on four devices: four layers each leave the last device 89 % idle;
    balanced times make the longest bar shorter.
    """
    items = {}
    for words, method in (("equal counts", "uniform"), ("balanced times", "time")):
        found = split_layers(vgg16(), 4, method)
        t = simulate(make("gpipe", 4, 8), found.costs())
        words += f": the busiest device {found.bottleneck:.3g}; "
        words += f"8 images by GPipe take {t.makespan:.0f}"
        items[words] = found
    unit = "forward and backward of one image, billions of multiply-adds"
    return plots.partition(items, style.axes(None, 8, 4.8), unit=unit, scale=1)


@picture("workflow.png")
def workflow() -> Axes:
    """PipeDream's workflow: profile each layer's time, optimize the cut into stages of one device
    each, run them by a schedule.
    """
    layers = vgg16().of("time")
    found = split_layers(vgg16(), 4, "time")
    _, (profiled, cut, ran) = plt.subplots(
        1, 3, figsize=(10.4, 3.2), width_ratios=(3, 3, 5), layout="constrained"
    )
    profiled.bar(range(1, 17), layers, color=style.GREY)
    cut.bar(range(1, 17), layers, color=style.GREY)
    for s, stage in enumerate(found.stages):
        first, last = stage.layers[0] + 1, stage.layers[-1] + 1
        words = f"device {s}\n{stage.time:.1f}"
        style.label(cut, (first + last) / 2, max(layers) * 1.13, words, 7, "white")
        cut.axvline(last + 0.5, color=style.BLUE, linestyle="--", lw=1)
    for ax, text in (
        (profiled, "1 profile: times of layers"),
        (cut, "2 optimize: cut, and add up"),
    ):
        style.title(ax, text)
        ax.set_xlabel("layers of VGG-16")
        ax.set_xticks([1, 4, 8, 12, 16])
        ax.set(xlim=(0.4, 16.6), ylim=(0, max(layers) * 1.28))
    plot.timeline(simulate(make("pipedream", 4, 6), found.costs()), ran, title="3 run")
    return ran


# ---- PipeDream-2BW


@picture("pipedream_2bw_buffers.png")
def pipedream_2bw_buffers() -> Axes:
    """Stage 0 of PipeDream-2BW: two buffers take turns to hold the weight versions; gradients
    of four micro-batches add up.
    """
    return plot.versions(simulate(make("pipedream_2bw", 4, 4, batches=3), Costs(update=1)))


# ---- interleaved


@picture("interleaved_chunks.png")
def interleaved_chunks() -> Axes:
    """Eight layers on two devices: device 0 holds 1, 2, 5, 6 and device 1 holds 3, 4, 7, 8;
    below, their chunks take turns.
    """
    s = make("interleaved", 2, 4, virtual=2)
    _, (above, below) = plt.subplots(
        2, 1, figsize=(10, 4.4), height_ratios=[1.5, 1], layout="constrained"
    )
    layers([2] * s.stages, s.placement, above, title="four chunks of two layers, placed in turn")
    return plot.timeline(simulate(s, Costs().split(2)), below)


# ---- zero bubbles


@picture("placements.png")
def placements() -> Axes:
    """Stages on four devices: eight in a loop; eight in a V, device 0 with the first and the last;
    four stages twice, one copy for each direction.
    """
    down, up = [0, 1, 2, 3], [3, 2, 1, 0]
    return paths(
        {
            "loop: two chunks a device": [[*down, *down]],
            "V: first and last together": [[*down, *up]],
            "two copies": [down, up],
        }
    )


def main(folder: Path) -> None:
    """Draw every picture into the folder."""
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        save(draw(), folder / name, alt(name))
        plt.close("all")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
