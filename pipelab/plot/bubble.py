"""The bubble over the number of micro-batches, devices or chunks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pipelab.costs import Costs
from pipelab.plot import style
from pipelab.schedules import make
from pipelab.simulate import simulate
from pipelab.theory import THEORY

DEFINITIONS = {
    "of_total": "idle share of all device time",
    "over_ideal": "makespan over the ideal, minus 1",
    "of_span": "idle share of the longest device span",
}
LABELS = {"microbatches": "micro-batches m", "devices": "devices p", "virtual": "chunks a device v"}


def bubble(
    names: Iterable[str], values: Iterable[int], *, over: Literal["microbatches", "devices", "virtual"] = "microbatches",
    devices: int = 4, microbatches: int = 8, virtual: int = 2, definition: str = "of_total", costs: Costs | None = None,
    ax: Axes | None = None,
) -> Axes:  # fmt: skip
    """The bubble of the named schedules while one size varies: dots are simulated, lines are the closed form.

    `definition` is one of of_total, over_ideal and of_span; the axis names it. The model stays the same when `virtual`
    varies: its work is divided among the chunks. With `costs`, the closed form (equal stages, no transfer) is left out.
    """
    if definition not in DEFINITIONS:
        raise ValueError(f"definition={definition!r}: use one of {', '.join(DEFINITIONS)}")
    if over not in LABELS:
        raise ValueError(f"over={over!r}: use one of {', '.join(LABELS)}")
    ax, values = style.axes(ax, 7, 3.2), list(values)
    for name, colour in zip(names, style.LINES, strict=False):
        dots, line = [], []
        for value in values:
            size = {"devices": devices, "microbatches": microbatches, "virtual": virtual, over: value}
            v = size["virtual"] if name == "interleaved" else 1
            schedule = make(name, size["devices"], size["microbatches"], virtual=v)
            dots.append(getattr(simulate(schedule, (costs or Costs()).split(v)).bubble, definition))
            theory = THEORY[name]
            x = theory.over_ideal(size["devices"], size["microbatches"], v, 1)
            exact = name != "interleaved" or size["microbatches"] % size["devices"] == 0
            if exact:
                line.append((value, x if definition == "over_ideal" else x / (1 + x)))
        ax.plot(values, dots, "o", color=colour, ms=4.5, label=f"{name}, simulated", zorder=3)
        if costs is None and definition != "of_span":
            formula = THEORY[name].bubble.formula.split(",")[0]
            ax.plot(*zip(*line, strict=True), color=colour, lw=1.2, alpha=0.7, label=f"closed form: {formula}")
    ax.set_xlabel(LABELS[over])
    ax.set_ylabel(DEFINITIONS[definition])
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylim(bottom=0)
    ax.legend(fontsize=8, frameon=False)
    return ax
