"""The bubble over the number of micro-batches, devices or chunks."""

import math
from collections.abc import Iterable
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pipelab.plot import style
from pipelab.predict.costs import Costs
from pipelab.predict.simulate import simulate
from pipelab.predict.theory import THEORY, Theory
from pipelab.schedules import make_for
from pipelab.table.action import ScheduleError

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

    Dots are simulated; curves are the closed form, also between the values. `definition` is
    of_total, over_ideal or of_span; the axis names it. The model stays the same when `virtual`
    varies: its work is divided among the chunks. The closed form is omitted for a schedule that
    `theory` lacks, and where it does not hold; a dot is omitted where a schedule cannot be made for
    a size. From the eighth schedule on, colours repeat with other marks, first crosses.
    """
    names, values = list(names), list(values)
    many = len(names) > 4
    ax = style.axes(ax, 10 if many else 7, max(3.2, 0.24 * len(names)))
    sizes = {"microbatches": microbatches, "devices": devices, "virtual": virtual}
    for number, name in enumerate(names):
        again, place = divmod(number, len(style.LINES))
        colour, mark = style.LINES[place], "oxs^"[again % 4]
        theory = THEORY.get(name) if definition != "of_span" else None
        simulated, slices = [], 1
        for value in values:
            m, p, v = (sizes | {over: value}).values()
            try:
                timeline = simulate(*make_for(name, p, m, Costs(), virtual=v))
            except ScheduleError:
                simulated.append(math.nan)
                continue
            slices = timeline.schedule.per_sequence
            simulated.append(getattr(timeline.bubble, definition))
        made = [x for x, y in zip(values, simulated, strict=True) if not math.isnan(y)]
        line, words = [], ""
        if theory and made:
            between = range(min(made), max(made) + 1)
            line = _closed_form(theory, between, sizes, over, definition, slices)
        if theory and line:
            words = theory.bubble if definition == "over_ideal" else theory.share
        label = f"{name}: {words}".rstrip(": ") if many else f"{name}, simulated"
        ax.plot(values, simulated, mark, color=colour, ms=4.5, label=label, zorder=3)
        if words:
            label = "_" if many else f"closed form: {words}"
            ax.plot(*zip(*line, strict=True), color=colour, lw=1.2, alpha=0.7, label=label)
    ax.set_xlabel(LABELS[over])
    ax.set_ylabel(DEFINITIONS[definition])
    ax.yaxis.set_major_formatter(PercentFormatter(1.0))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_ylim(bottom=0)
    if many:  # beside the axes, where it hides no dot
        ax.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    else:
        ax.legend(fontsize=8, frameon=False)
    return ax


def _closed_form(
    theory: Theory, values: range, sizes: dict[str, Any], over: str, definition: str, slices: int
) -> list[tuple[float, float]]:
    """(value, bubble) where the formula holds; if it holds everywhere, also in between."""

    def at(value: float) -> tuple[Any, Any, Any]:
        m, p, v = (sizes | {over: value}).values()
        return p, m, slices if slices > 1 else v

    found: list[float] = [value for value in values if theory.holds(*at(value))]
    if over != "devices" and len(found) == len(values):  # some formulas ask if p is odd
        found = [x / 8 for x in range(8 * values[0], 8 * values[-1] + 1)]
    return [(value, getattr(theory, definition)(*at(value), 1)) for value in found]
