"""Loss curves."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from pipelab.plot import style


def losses(curves: dict[str, Sequence[float]], ax: Axes | None = None) -> Axes:
    """The loss of every batch; one line per name."""
    ax = style.axes(ax, 7, 2.8)
    marks = ("-", "--", ":", "-.")
    for i, (name, values) in enumerate(curves.items()):
        ax.plot(
            range(len(values)),
            values,
            marks[i % 4],
            color=style.LINES[i % len(style.LINES)],
            lw=1.6,
            label=name,
        )
    ax.set_xlabel("batch")
    ax.set_ylabel("loss")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.legend(fontsize=8, frameon=False)
    return ax
