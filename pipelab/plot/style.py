"""Colours, axes, and the few shapes that all pictures are made of. Names may have any character:
texts are not parsed as formulas."""

from collections.abc import Sequence
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.legend import Legend
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from pipelab.show import palette
from pipelab.show.palette import (  # noqa: F401 (for the other plots)
    BLUE,
    GREEN,
    GREY,
    KINDS,
    MEMORY_CAUSES,
    NAMES,
    ORANGE,
    PINK,
    RED,
    RGB,
    SKY,
    YELLOW,
    colour_of,
)

Colour = str | RGB
LINES = (BLUE, ORANGE, GREEN, PINK, RED, SKY, GREY)
VERSIONS = (*LINES[:-1], YELLOW)  # updates are grey


def lighter(colour: Colour, share: float) -> RGB:
    """The colour mixed with `share` of white."""
    return palette.with_white(to_rgb(colour), share)


def version_colour(version: int) -> RGB:
    """A weight version's colour; colours repeat."""
    return lighter(VERSIONS[version % len(VERSIONS)], 0.25)


def ink(colour: Colour) -> str:
    """Black or white, whichever is easier to read on the colour."""
    return palette.readable_on(to_rgb(colour))


def axes(ax: Axes | None, width: float = 10.0, height: float = 3.0) -> Axes:
    """The given Axes, or new ones without a frame on top and right."""
    if ax is None:
        _, ax = plt.subplots(figsize=(width, height), layout="constrained")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def lanes(ax: Axes, at: Sequence[float], names: Sequence[str], size: float = 9.0) -> None:
    """Name the lanes on the left, without ticks or a line."""
    ax.set_yticks(at, names, fontsize=size, parse_math=False)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)


def title(ax: Axes, text: str) -> None:
    """A title above the left end, and above the legend if that is long."""
    found = ax.get_legend()
    pad = 20 if found and len(found.get_texts()) > 7 else None
    ax.set_title(text, loc="left", fontsize=10, pad=pad, parse_math=False)


def legend(
    ax: Axes, handles: Sequence[Artist] | None = None, size: float = 8.0, **look: Any
) -> None:
    """A legend in one row above the right end: of `handles`, or of all that has a label."""
    if handles is None:
        handles = ax.get_legend_handles_labels()[0]
    found = ax.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=max(len(handles), 1),
        fontsize=size,
        frameon=False,
        borderaxespad=0.1,
        **look,
    )
    plain(found)


def plain(found: Legend) -> None:
    """Do not parse a legend's names as formulas."""
    for text in found.get_texts():
        text.set_parse_math(False)


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
    """A rectangle from its corner with the smallest coordinates; text is centred.

    A box without width gets no text.
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
    """Text centred at (x, y), in black or white, to be read on the colour `on`."""
    centred: dict[str, Any] = {"ha": "center", "va": "center", "linespacing": 1, "color": ink(on)}
    return ax.text(x, y, text, fontsize=size, parse_math=False, **centred | look)
