"""Colours and axes that all pictures share: the papers' colours from the Okabe-Ito palette, safe for the colour-blind."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb

from pipelab.action import Kind

BLUE, GREEN, ORANGE, SKY, RED, PINK, YELLOW, GREY = (
    "#0072B2",
    "#009E73",
    "#E69F00",
    "#56B4E9",
    "#D55E00",
    "#CC79A7",
    "#F0E442",
    "#4D4D4D",
)
KINDS = {
    Kind.F: BLUE,
    Kind.B: GREEN,
    Kind.I: SKY,
    Kind.W: ORANGE,
    Kind.U: GREY,
    Kind.SEND_F: PINK,
    Kind.SEND_B: PINK,
    Kind.RECV_F: PINK,
    Kind.RECV_B: PINK,
}
NAMES = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input gradient",
    Kind.W: "weight gradient",
    Kind.U: "update",
    Kind.SEND_F: "transfer",
}
CAUSES = {
    "weights": GREY,
    "versions": PINK,
    "gradients": GREEN,
    "optimizer": ORANGE,
    "activations": BLUE,
    "buffers": SKY,
}
LINES = (BLUE, ORANGE, GREEN, PINK, RED, SKY, GREY)


def lighter(colour: str, share: float) -> tuple[float, float, float]:
    """The colour mixed with `share` of white."""
    r, g, b = (c + (1 - c) * share for c in to_rgb(colour))
    return r, g, b


def ink(colour: tuple[float, float, float] | str) -> str:
    """Black or white, whichever is easier to read on the colour."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(colour)]
    return (
        "black" if 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2] > 0.22 else "white"
    )


def axes(ax: Axes | None, width: float = 10.0, height: float = 3.0) -> Axes:
    """The given Axes, or new ones without a frame on top and right."""
    if ax is None:
        _, ax = plt.subplots(figsize=(width, height), layout="constrained")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def scale_of(largest: float, units: tuple[tuple[float, str], ...]) -> tuple[float, str]:
    """The largest unit that `largest` reaches, as (factor, name)."""
    return next(((f, name) for f, name in units if largest >= f), units[-1])


SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
BYTES = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "bytes"))
