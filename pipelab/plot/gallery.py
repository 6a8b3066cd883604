"""The pictures in images/, made again by `make images`: python -m pipelab.plot.gallery FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes

from pipelab.costs import Costs
from pipelab.plot.timeline import timelines
from pipelab.schedules import make
from pipelab.simulate import simulate


def overview() -> Axes:
    """One batch of eight micro-batches on four devices, by four schedules; the model is the same in all of them."""
    costs = Costs()
    items = {
        "inter-layer: one device at a time": simulate(make("inter_layer", 4, 8), costs),
        "GPipe": simulate(make("gpipe", 4, 8), costs),
        "1F1B with a flush": simulate(make("pipedream_flush", 4, 8), costs),
        "interleaved, two chunks a device": simulate(make("interleaved", 4, 8, virtual=2), costs.split(2)),
    }
    return timelines(items)


PICTURES = {"overview.png": overview}


def main(folder: str) -> None:
    """Draw every picture into the folder."""
    matplotlib.use("Agg")
    Path(folder).mkdir(parents=True, exist_ok=True)
    for name, draw in PICTURES.items():
        figure = draw().get_figure(root=True)
        assert figure is not None
        figure.savefig(Path(folder) / name, dpi=120, metadata={"Software": None})


if __name__ == "__main__":
    main(sys.argv[1])
