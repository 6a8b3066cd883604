"""The bubble over the number of micro-batches, devices or chunks."""

from collections.abc import Iterable
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pipelab.plot import style
from pipelab.predict.costs import Costs
from pipelab.predict.simulate import simulate
from pipelab.predict.theory import THEORY
from pipelab.schedules import make_for, takes

DEFINITIONS = {
    "of_total": "idle share of all device time",
    "over_ideal": "makespan over the ideal, minus 1",
    "of_span": "idle share of the longest device span",
}
LABELS = {"microbatches": "micro-batches m", "devices": "devices p", "virtual": "chunks a device v"}


def bubble(
    names: Iterable[str],
    values: Iterable[int],
    *,
    over: Literal["microbatches", "devices", "virtual"] = "microbatches",
    devices: int = 4,
    microbatches: int = 8,
    virtual: int = 2,
    definition: str = "of_total",
    ax: Axes | None = None,
) -> Axes:
    """The bubble of the named schedules while one size varies.

    Dots are simulated, lines are the closed form. `definition` is one of of_total, over_ideal and
    of_span; the axis names it. The model stays the same when `virtual` varies: its work is divided
    among the chunks. The closed form is left out for a schedule that `theory` does not have.
    """
    ax, values = style.axes(ax, 7, 3.2), list(values)
    sizes = {"microbatches": microbatches, "devices": devices, "virtual": virtual}
    for name, colour in zip(names, style.LINES, strict=False):
        theory = THEORY.get(name) if definition != "of_span" else None
        simulated, formula = [], {}
        for value in values:
            m, p, v = (sizes | {over: value}).values()
            if not takes(name, "virtual"):
                v = 1
            timeline = simulate(*make_for(name, p, m, Costs(), virtual=v))
            simulated.append(getattr(timeline.bubble, definition))
            if theory and (v == 1 or m % p == 0):
                formula[value] = getattr(theory, definition)(p, m, v, 1)
        ax.plot(values, simulated, "o", color=colour, ms=4.5, label=f"{name}, simulated", zorder=3)
        if theory and formula:
            words = theory.bubble if definition == "over_ideal" else theory.share
            line = list(formula), list(formula.values())
            ax.plot(*line, color=colour, lw=1.2, alpha=0.7, label=f"closed form: {words}")
    ax.set_xlabel(LABELS[over])
    ax.set_ylabel(DEFINITIONS[definition])
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylim(bottom=0)
    ax.legend(fontsize=8, frameon=False)
    return ax
