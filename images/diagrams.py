"""Pictures of ideas: layers on devices, a batch in micro-batches, max-pooling and its backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from pipelab.plot import style


def layers(
    counts: Sequence[int],
    placement: Sequence[int] | None = None,
    ax: Axes | None = None,
    *,
    title: str = "",
) -> Axes:
    """Which device holds which layers: `counts[s]` layers on stage s, stage s on `placement[s]`.

    Activations go right along the blue arrows, gradients come back along the green ones. Layers
    count from 1. A later chunk of a device is lighter. Without a placement, stage s is on device s.
    Raises ValueError if the lengths differ.
    """
    placement = list(range(len(counts))) if placement is None else list(placement)
    if len(placement) != len(counts):
        raise ValueError(
            f"{len(counts)} stages, but {len(placement)} have a device: give each stage one"
        )
    devices, total = max(placement) + 1, sum(counts)
    ax = style.axes(ax, 6, 0.8 + 0.75 * devices)
    stage_of = np.repeat(np.arange(len(counts)), counts)
    row = [placement[s] for s in stage_of]
    chunk = [placement[:s].count(d) for s, d in enumerate(placement)]
    for d in range(devices):
        style.box(ax, (0.5, d - 0.42), total, 0.84, "#f0f0f0", "none", lw=0)
    for i, s in enumerate(stage_of):
        colour = style.lighter(style.GREY, 0.2 + 0.5 * chunk[s] / max(*chunk, 1))
        corner = i + 0.66, row[i] - 0.3
        style.box(ax, corner, 0.68, 0.6, colour, text=f"layer {i + 1}", size=10)
    for i in range(total - 1):
        right, left = i + 1.35, i + 1.65  # the facing sides of two layers
        above, below = row[i], row[i + 1]
        width = 1.8 if above != below else 1.2
        arrow(ax, (right, above - 0.12), (left, below - 0.12), style.BLUE, width)
        arrow(ax, (left, below + 0.12), (right, above + 0.12), style.GREEN, width)
    ax.set_xlim(0.5, total + 0.5)
    ax.set_ylim(devices - 0.5, -0.5)
    style.lanes(ax, range(devices), [f"device {d}" for d in range(devices)], 10)
    ax.set_xticks([])
    ax.spines["bottom"].set_visible(False)
    activations = Line2D([], [], color=style.BLUE, lw=2, label="activations, to the next layer")
    gradients = Line2D([], [], color=style.GREEN, lw=2, label="gradients, back")
    style.legend(ax, [activations, gradients], 9)
    style.title(ax, title)
    return ax


def paths(items: dict[str, list[list[int]]]) -> Axes:
    """Ways of micro-batches through devices, a picture each: `items[title]` has a list of devices,
    stage by stage, for every way. Where there are two, the stages are the same, each there twice.
    """
    devices = 1 + max(d for ways in items.values() for way in ways for d in way)
    widths = [len(ways[0]) for ways in items.values()]
    _, row = plt.subplots(
        1,
        len(items),
        figsize=(6, 0.7 + 0.4 * devices),
        width_ratios=widths,
        sharey=True,
        layout="constrained",
    )
    for ax, (title, ways) in zip(row, items.items(), strict=True):
        for d in range(devices):
            style.box(ax, (-0.5, d - 0.42), len(ways[0]), 0.84, "#f0f0f0", "none", lw=0)
        for way, colour in zip(ways, (style.BLUE, style.ORANGE), strict=False):
            ax.plot(range(len(way)), way, color=colour, lw=2, zorder=1)
            for s, d in enumerate(way):
                style.box(ax, (s - 0.3, d - 0.28), 0.6, 0.56, colour, text=str(s), size=10)
        ax.set_xlim(-0.5, len(ways[0]) - 0.5)
        ax.set_ylim(devices - 0.5, -0.5)
        style.axes(ax)
        style.lanes(ax, range(devices), [f"device {d}" for d in range(devices)])
        ax.spines["bottom"].set_visible(False)
        ax.set_xticks([])
        style.title(ax, title)
    return row[0]


def microbatches(samples: int, count: int, ax: Axes | None = None) -> Axes:
    """A mini-batch of `samples` samples, and below it its `count` micro-batches.

    Their sizes are as equal as can be.
    """
    if not 1 <= count <= samples:
        raise ValueError(
            f"{count} micro-batches of {samples} samples: a micro-batch needs at least one sample"
        )
    ax = style.axes(ax, 6, 2)
    gap = 0.8
    ax.text(-0.4, 0.5, "mini-batch", ha="right", va="center", fontsize=10)
    ax.text(-0.4, 2.7, "micro-batches", ha="right", va="center", fontsize=10)
    above = gap * (count - 1) / 2  # the mini-batch stands over the middle of its micro-batches
    for k, part in enumerate(np.array_split(np.arange(samples), count)):
        colour = style.lighter(style.LINES[k % len(style.LINES)], 0.35)
        below = k * gap
        for i in part.tolist():
            for x, y in ((i + above, 0), (i + below, 2.2)):
                style.box(ax, (x, y), 1, 1, colour, text=str(i), lw=1.5)
        centre = part.mean() + 0.5
        arrow(ax, (centre + above, 1.1), (centre + below, 2.12), style.GREY, 1.2)
        style.label(ax, centre + below, 3.65, f"micro-batch {k}", 10)
    ax.set_xlim(-3.6, samples + gap * (count - 1) + 0.1)
    ax.set_ylim(4, -0.1)
    ax.axis("off")
    return ax


def max_pool(x: np.ndarray, window: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """The largest value of each `window` x `window` block of x, and where it stood.

    Of shapes (h, w) and, boolean, that of x; of equal values the first one wins.

    >>> max_pool(np.array([[1, 5], [3, 2]]))
    (array([[5]]), array([[False,  True],
           [False, False]]))
    """
    h, w = x.shape[0] // window, x.shape[1] // window
    blocks = x.reshape(h, window, w, window).swapaxes(1, 2).reshape(h, w, -1)
    won = np.zeros(blocks.shape, bool)
    np.put_along_axis(won, blocks.argmax(axis=2)[..., None], True, axis=2)
    return blocks.max(axis=2), won.reshape(h, w, window, window).swapaxes(1, 2).reshape(x.shape)


def max_pool_backward(gradient: np.ndarray, won: np.ndarray) -> np.ndarray:
    """The gradient of max-pooling's input.

    Each value of the output's gradient goes to the cell that won, the others get 0.
    """
    window = won.shape[0] // gradient.shape[0]
    return np.where(won, np.kron(gradient, np.ones((window, window), gradient.dtype)), 0)


def pooling(x: np.ndarray, gradient: np.ndarray, ax: Axes | None = None) -> Axes:
    """Max-pooling of x, forward above and backward below; a thick frame marks the cells that won.

    `x` has shape (n, n), `gradient`, that of the output, (n / 2, n / 2). All that the backward
    needs are the places of the largest values; torch keeps them, and the input as well.
    """
    ax = style.axes(ax, width=8, height=5.6)
    out, won = max_pool(x)
    n = len(x)
    left, right = n + 0.3, n + 2.9  # where the arrows between input and output end
    far, down = n + 3.2, n + 1.9  # where the output stands, and the backward
    back = max_pool_backward(gradient, won)
    _cells(ax, 0, 0, x, style.BLUE, f"input, {n} x {n}", won)
    _cells(ax, far, n / 4, out, style.BLUE, f"output, {n // 2} x {n // 2}")
    _cells(ax, 0, down, back, style.GREEN, "gradient of the input", won)
    _cells(ax, far, down + n / 4, gradient, style.GREEN, "gradient of the output")
    for words, colour, start, end, y in (
        ("forward", style.BLUE, left, right, n / 2),
        ("backward", style.GREEN, right, left, down + n / 2),
    ):
        arrow(ax, (start, y), (end, y), colour, 2.5, mutation_scale=18)
        style.label(ax, (left + right) / 2, y - 0.35, words, 11, va="bottom")
    arrow(ax, (n / 2, n + 0.15), (n / 2, down - 0.75), style.GREY, 1.5, ls="--")
    words = "kept: the places of the largest values (torch keeps the input, too)"
    ax.text(n / 2 + 0.2, n + 0.55, words, va="center", fontsize=10)
    ax.set_xlim(-0.2, far + n / 2 + 1.2)
    ax.set_ylim(down + n + 0.2, -0.8)
    ax.set_aspect("equal")
    ax.axis("off")
    return ax


def _cells(
    ax: Axes,
    left: float,
    top: float,
    values: np.ndarray,
    colour: str,
    title: str,
    won: np.ndarray | None = None,
) -> None:
    """A table of values; with `won`, frames around the blocks and the cells that won."""
    for (i, j), value in np.ndenumerate(values):
        x, y = left + j, top + i
        fill = style.lighter(colour, 0.2 if won is None or won[i, j] else 0.85)
        style.box(ax, (x, y), 1, 1, fill, text=f"{value:g}", size=12, lw=1.5)
        if won is None:
            continue
        if won[i, j]:
            style.box(ax, (x + 0.05, y + 0.05), 0.9, 0.9, "none", "black", lw=2.2, zorder=3)
        if i % 2 == j % 2 == 0:
            style.box(ax, (x, y), 2, 2, "none", style.GREY, lw=1.2, zorder=2)
    ax.text(left, top - 0.2, title, fontsize=10, va="bottom")


def arrow(
    ax: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    colour: style.Colour,
    width: float,
    **look: Any,
) -> None:
    """An arrow that touches both points."""
    look |= {"arrowstyle": "-|>", "color": colour, "lw": width, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", end, start, arrowprops=look)
