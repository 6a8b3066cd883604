"""Colours, axes, and the few shapes that all pictures are made of.

The colours are the papers', from the Okabe-Ito palette, which is safe for the colour-blind. The
input gradient's violet is none of it: it differs from every shade of the others.
"""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from pipelab.table.action import WORDS, Kind

RGB = tuple[float, float, float]
Colour = str | RGB

BLUE = "#0072B2"
GREEN = "#009E73"
ORANGE = "#E69F00"
SKY = "#56B4E9"
RED = "#D55E00"
PINK = "#CC79A7"
YELLOW = "#F0E442"
GREY = "#4D4D4D"
VIOLET = "#8000E5"
KINDS = dict.fromkeys(Kind, PINK) | {  # the others are transfers
    Kind.F: BLUE,
    Kind.B: GREEN,
    Kind.I: VIOLET,
    Kind.W: ORANGE,
    Kind.U: GREY,
}
NAMES = WORDS | {Kind.SEND_F: "transfer"}
MEMORY_CAUSES = {
    "weights": GREY,
    "versions": PINK,
    "gradients": GREEN,
    "optimizer": ORANGE,
    "activations": BLUE,
    "buffers": SKY,
}
LINES = (BLUE, ORANGE, GREEN, PINK, RED, SKY, GREY)
VERSIONS = (*LINES[:-1], YELLOW)  # grey are updates

BYTES = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes"))


def lighter(colour: Colour, share: float) -> RGB:
    """The colour mixed with `share` of white."""
    r, g, b = (c + (1 - c) * share for c in to_rgb(colour))
    return r, g, b


def colour_of(kind: Kind, stage: int, devices: int, stages: int) -> RGB:
    """The kind's colour, lighter for a later chunk of the model."""
    chunks = -(-stages // devices)
    return lighter(KINDS[kind], 0.55 * (stage // devices) / max(chunks - 1, 1))


def version_colour(version: int) -> RGB:
    """A weight version's colour; the colours come round again."""
    return lighter(VERSIONS[version % len(VERSIONS)], 0.25)


def ink(colour: Colour) -> str:
    """Black or white, whichever is easier to read on the colour."""
    # The relative luminance of the Web Content Accessibility Guidelines.
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if luminance > 0.22 else "white"


def axes(ax: Axes | None, width: float = 10.0, height: float = 3.0) -> Axes:
    """The given Axes, or new ones without a frame on top and right."""
    if ax is None:
        _, ax = plt.subplots(figsize=(width, height), layout="constrained")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def lanes(ax: Axes, at: Sequence[float], names: Sequence[str], size: float = 9.0) -> None:
    """Name the lanes on the left, without ticks or a line."""
    ax.set_yticks(at, names, fontsize=size)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def title(ax: Axes, text: str) -> None:
    """A title above the left end."""
    ax.set_title(text, loc="left", fontsize=10)


def legend(
    ax: Axes, handles: Sequence[Artist] | None = None, size: float = 8.0, **look: Any
) -> None:
    """A legend in one row above the right end: of the handles, or of all that has a label."""
    if handles is None:
        handles = ax.get_legend_handles_labels()[0]
    ax.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=max(len(handles), 1),
        fontsize=size,
        frameon=False,
        borderaxespad=0.1,
        **look,
    )


def box(
    ax: Axes,
    corner: tuple[float, float],
    width: float,
    height: float,
    colour: Colour,
    edge: Colour = "white",
    text: str = "",
    size: float = 9.0,
    **look: Any,
) -> Rectangle:
    """A rectangle from its corner with the smallest coordinates; text stands in its middle.

    One without width has no room for text.
    """
    patch = Rectangle(corner, width, height, facecolor=colour, edgecolor=edge, **look)
    ax.add_patch(patch)
    if text and width:
        x, y = patch.get_center()
        label(ax, x, y, text, size, colour)
    return patch


def label(
    ax: Axes, x: float, y: float, text: str, size: float, on: Colour = "white", **look: Any
) -> Text:
    """Text in the middle of something that has the colour `on`."""
    centred: dict[str, Any] = {"ha": "center", "va": "center", "linespacing": 1, "color": ink(on)}
    return ax.text(x, y, text, fontsize=size, **centred | look)
