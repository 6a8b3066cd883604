"""Loss curves."""

from collections.abc import Sequence
from itertools import cycle

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from pipelab.plot import style


def losses(curves: dict[str, Sequence[float]], ax: Axes | None = None) -> Axes:
    """The loss of every batch; one line per name."""
    ax = style.axes(ax, 7, 2.8)
    looks = zip(cycle(("-", "--", ":", "-.")), cycle(style.LINES), strict=False)
    for (name, values), (line, colour) in zip(curves.items(), looks, strict=False):
        ax.plot(range(len(values)), values, line, color=colour, lw=1.6, label=name)
    ax.set_xlabel("batch")
    ax.set_ylabel("loss")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    style.plain(ax.legend(fontsize=8, frameon=False))
    return ax
