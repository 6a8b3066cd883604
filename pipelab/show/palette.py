"""Colours and words of what timelines show, for plots, widgets and pages.

The colours are the papers', from the Okabe-Ito palette, which is safe for the colour-blind. The
input gradient's violet is not in it: it differs from every shade of the others.
"""

from collections.abc import Collection, Iterable

from pipelab.table.action import WORDS, Kind
from pipelab.table.schedule import Schedule

RGB = tuple[float, float, float]

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
    Kind.OFFLOAD: SKY,
    Kind.RELOAD: YELLOW,
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


def from_hex(colour: str) -> RGB:
    """The shares of red, green and blue in a colour such as "#0072B2"."""
    r, g, b = (int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5))
    return r, g, b


def to_hex(colour: RGB) -> str:
    return "#" + "".join(f"{round(255 * c):02x}" for c in colour)


def with_white(colour: RGB, share: float) -> RGB:
    """The colour with `share` of white."""
    r, g, b = (c + (1 - c) * share for c in colour)
    return r, g, b


def colour_of(kind: Kind, stage: int, devices: int, stages: int) -> RGB:
    """The kind's colour, lighter for a later chunk of the model, or its other copy."""
    chunks = -(-stages // devices)
    return with_white(from_hex(KINDS[kind]), 0.55 * (stage // devices) / max(chunks - 1, 1))


def readable_on(colour: RGB) -> str:
    """Black or white, whichever is easier to read on the colour."""
    # The relative luminance of the Web Content Accessibility Guidelines.
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "black" if luminance > 0.22 else "white"


def box_colours(kind: Kind, stage: int, devices: int, stages: int) -> list[str]:
    """A box's colour, and that of its text."""
    colour = colour_of(kind, stage, devices, stages)
    return [to_hex(colour), readable_on(colour)]


def chunks_of(schedule: Schedule) -> int:
    """The most stages on a device: chunks of the model, or its copies."""
    return -(-schedule.stages // schedule.devices)


def lighter(schedules: Collection[Schedule]) -> str:
    """What a legend says of lighter boxes; nothing where there are none."""
    chunks = max((chunks_of(s) for s in schedules if s.copies == 1), default=1)
    means = [f"later chunk of {chunks}"] if chunks > 1 else []
    if any(s.copies > 1 for s in schedules):
        means.append("the other copy")
    return f"lighter: {' or '.join(means)}" if means else ""


def kinds_of(schedules: Collection[Schedule]) -> list[Kind]:
    """The kinds of actions that a legend names; one name stands for all transfers."""
    return [kind for kind in NAMES if any(kind in s.kinds for s in schedules)]


def legend(kinds: Iterable[Kind]) -> list[list[str]]:
    """Names and colours of the kinds."""
    return [[NAMES[kind], KINDS[kind]] for kind in kinds]
