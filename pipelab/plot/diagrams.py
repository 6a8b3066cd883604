"""Pictures of ideas: layers on devices, a batch in micro-batches, max-pooling and what its backward needs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch, Rectangle

from pipelab.plot import style


def layers(
    counts: Sequence[int],
    placement: Sequence[int] | None = None,
    ax: Axes | None = None,
    *,
    title: str = "",
) -> Axes:
    """Which device holds which layers: a lane per device, `counts[s]` layers on stage s, stage s on `placement[s]`.

    Activations go right along the blue arrows, gradients come back along the green ones. Layers count from 1. A later
    chunk of a device is lighter. Without a placement, stage s is on device s. Raises ValueError if the lengths differ.
    """
    placement = list(range(len(counts))) if placement is None else list(placement)
    if len(placement) != len(counts):
        raise ValueError(
            f"{len(counts)} stages, but {len(placement)} have a device: give each stage one"
        )
    devices, total = max(placement) + 1, sum(counts)
    ax = style.axes(ax, height=0.8 + 0.75 * devices)
    stage_of = np.repeat(np.arange(len(counts)), counts)
    row = [placement[s] for s in stage_of]
    chunks = [placement[:s].count(d) for s, d in enumerate(placement)]
    for d in range(devices):
        ax.add_patch(Rectangle((0.5, d - 0.42), total, 0.84, facecolor="#f0f0f0", lw=0))
    for i, s in enumerate(stage_of):
        colour = style.lighter(style.BLUE, 0.55 * chunks[s] / max(*chunks, 1))
        ax.add_patch(
            Rectangle((i + 0.66, row[i] - 0.3), 0.68, 0.6, facecolor=colour, edgecolor="white")
        )
        ax.text(
            i + 1,
            row[i],
            f"layer {i + 1}",
            ha="center",
            va="center",
            fontsize=10,
            color=style.ink(colour),
        )
    for i in range(total - 1):
        for line, up, a, b in ((style.BLUE, -0.12, i, i + 1), (style.GREEN, 0.12, i + 1, i)):
            side = 0.35 if b > a else -0.35
            arrow = {
                "arrowstyle": "-|>",
                "color": line,
                "lw": 1.8 if row[a] != row[b] else 1.2,
                "shrinkA": 0,
                "shrinkB": 0,
            }
            ax.annotate(
                "", (b + 1 - side, row[b] + up), (a + 1 + side, row[a] + up), arrowprops=arrow
            )
    ax.set_xlim(0.5, total + 0.5)
    ax.set_ylim(devices - 0.5, -0.5)
    ax.set_yticks(range(devices), [f"device {d}" for d in range(devices)], fontsize=10)
    ax.set_xticks([])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    handles = [
        Patch(color=style.BLUE, label="→ activations"),
        Patch(color=style.GREEN, label="← gradients"),
    ]
    ax.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=2,
        fontsize=9,
        frameon=False,
        borderaxespad=0.1,
    )
    ax.set_title(title, loc="left", fontsize=10)
    return ax


def microbatches(samples: int, count: int, ax: Axes | None = None) -> Axes:
    """A mini-batch of `samples` samples above the `count` micro-batches that it is cut into, sizes as equal as can be."""
    if not 1 <= count <= samples:
        raise ValueError(
            f"{count} micro-batches of {samples} samples: a micro-batch needs at least one sample"
        )
    ax = style.axes(ax, height=2.4)
    gap = 0.8
    ax.text(-0.4, 0.5, "mini-batch", ha="right", va="center", fontsize=10)
    ax.text(-0.4, 2.7, "micro-batches", ha="right", va="center", fontsize=10)
    middle = gap * (count - 1) / 2
    for k, part in enumerate(np.array_split(np.arange(samples), count)):
        colour = style.lighter(style.LINES[k % len(style.LINES)], 0.35)
        for i in part.tolist():
            for x, y in ((i + middle, 0), (i + k * gap, 2.2)):
                ax.add_patch(Rectangle((x, y), 1, 1, facecolor=colour, edgecolor="white", lw=1.5))
                ax.text(
                    x + 0.5,
                    y + 0.5,
                    str(i),
                    ha="center",
                    va="center",
                    fontsize=9,
                    color=style.ink(colour),
                )
        centre = part.mean() + 0.5
        arrow = {"arrowstyle": "-|>", "color": style.GREY, "lw": 1.2, "shrinkA": 0, "shrinkB": 0}
        ax.annotate("", (centre + k * gap, 2.12), (centre + middle, 1.1), arrowprops=arrow)
        ax.text(centre + k * gap, 3.65, f"micro-batch {k}", ha="center", va="center", fontsize=10)
    ax.set_xlim(-3.6, samples + gap * (count - 1) + 0.1)
    ax.set_ylim(4, -0.1)
    ax.axis("off")
    return ax


def max_pool(x: np.ndarray, window: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """The largest value of each `window` x `window` block of x, and where it stood: shapes (h, w) and that of x, boolean.

    >>> max_pool(np.array([[1, 5], [3, 2]]))
    (array([[5]]), array([[False,  True],
           [False, False]]))
    """
    rows, columns = x.shape[0] // window, x.shape[1] // window
    blocks = (
        x.reshape(rows, window, columns, window)
        .swapaxes(1, 2)
        .reshape(rows, columns, window * window)
    )
    won = (
        np.arange(window * window) == blocks.argmax(axis=2)[..., None]
    )  # the first of equal values
    return blocks.max(axis=2), won.reshape(rows, columns, window, window).swapaxes(1, 2).reshape(
        x.shape
    )


def max_pool_backward(gradient: np.ndarray, won: np.ndarray) -> np.ndarray:
    """The gradient of max-pooling's input: each value of the output's goes to the cell that won, the others get 0."""
    window = won.shape[0] // gradient.shape[0]
    return np.where(won, np.kron(gradient, np.ones((window, window), gradient.dtype)), 0)


def pooling(x: np.ndarray, gradient: np.ndarray, ax: Axes | None = None) -> Axes:
    """Max-pooling of x, forward above and backward below; a thick frame marks the cells that won.

    `x` has shape (n, n), `gradient`, that of the output, (n / 2, n / 2). The backward cannot tell where its values go
    without the input (or the places of the largest values): this is what a stage keeps from forward to backward.
    """
    ax = style.axes(ax, width=8, height=5.6)
    out, won = max_pool(x)
    n, right = len(x), len(x) + 3.2
    down = n + 1.9
    _cells(ax, x, won, 0, 0, style.BLUE, f"input, {n} x {n}: kept for the backward")
    _cells(ax, out, None, right, n / 4, style.BLUE, f"output, {n // 2} x {n // 2}")
    _cells(ax, max_pool_backward(gradient, won), won, 0, down, style.GREEN, "gradient of the input")
    _cells(ax, gradient, None, right, down + n / 4, style.GREEN, "gradient of the output")
    for words, colour, a, b, y in (
        ("forward", style.BLUE, n + 0.3, right - 0.3, n / 2),
        ("backward", style.GREEN, right - 0.3, n + 0.3, down + n / 2),
    ):
        arrow = {
            "arrowstyle": "-|>",
            "color": colour,
            "lw": 2.5,
            "mutation_scale": 18,
            "shrinkA": 0,
            "shrinkB": 0,
        }
        ax.annotate("", (b, y), (a, y), arrowprops=arrow)
        ax.text((a + b) / 2, y - 0.35, words, ha="center", va="bottom", fontsize=11)
    arrow = {
        "arrowstyle": "-|>",
        "color": style.GREY,
        "lw": 1.5,
        "ls": "--",
        "shrinkA": 0,
        "shrinkB": 0,
    }
    ax.annotate("", (n / 2, down - 0.75), (n / 2, n + 0.15), arrowprops=arrow)
    ax.text(n / 2 + 0.2, n + 0.55, "where each largest value stood", va="center", fontsize=10)
    ax.set_xlim(-0.2, right + n / 2 + 1.2)
    ax.set_ylim(down + n + 0.2, -0.8)
    ax.set_aspect("equal")
    ax.axis("off")
    return ax


def _cells(
    ax: Axes,
    values: np.ndarray,
    won: np.ndarray | None,
    x: float,
    y: float,
    colour: str,
    title: str,
) -> None:
    for (i, j), value in np.ndenumerate(values):
        marked = won is None or bool(won[i, j])
        fill = style.lighter(colour, 0.2 if marked else 0.85)
        ax.add_patch(Rectangle((x + j, y + i), 1, 1, facecolor=fill, edgecolor="white", lw=1.5))
        if won is not None and marked:
            frame = Rectangle(
                (x + j + 0.05, y + i + 0.05),
                0.9,
                0.9,
                facecolor="none",
                edgecolor="black",
                lw=2.2,
                zorder=3,
            )
            ax.add_patch(frame)
        if won is not None and i % 2 == j % 2 == 0:
            ax.add_patch(
                Rectangle(
                    (x + j, y + i), 2, 2, facecolor="none", edgecolor=style.GREY, lw=1.2, zorder=2
                )
            )
        ax.text(
            x + j + 0.5,
            y + i + 0.5,
            f"{value:g}",
            ha="center",
            va="center",
            fontsize=12,
            color=style.ink(fill),
        )
    ax.text(x, y - 0.2, title, fontsize=10, va="bottom")
