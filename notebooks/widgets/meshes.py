"""Meshes of devices and what each holds; the shardings that were weighed, and what they took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes

from pipelab.plot import style

if TYPE_CHECKING:
    from pipelab.pipeshard.auto.auto_plan import AutoPlan
    from pipelab.pipeshard.auto.sharding import Candidate, Search

WIDTH, HEIGHT = 1.5, 0.8  # of a device
Cell = tuple[str, style.Colour]  # a device: its words and its colour
Grid = tuple[str, list[Cell], int]  # a mesh: its title, its devices row by row, devices of a row


def devices(held: Mapping[str, Any], ax: Axes | None = None) -> Axes:
    """Meshes side by side: title -> what each device holds, in an array shaped as the mesh.

    Equal things have the same colour, so that one sees where they go.
    """
    arrays = {title: np.asarray(array) for title, array in held.items()}
    order = list(dict.fromkeys(str(thing) for array in arrays.values() for thing in array.flat))
    grids = []
    for title, array in arrays.items():
        things = enumerate(map(str, array.flat))
        cells = [(f"device {i}\n{thing}", _pale(order.index(thing))) for i, thing in things]
        grids.append((title, cells, array.shape[1]))
    return _draw(grids, ax)


def stage_plan(plan: AutoPlan, ax: Axes | None = None) -> Axes:
    """The cluster, a row per host, and the mesh of each stage with its layers, in its colour.

    Rows of a stage's mesh share the samples (data), columns the weights (model).
    """
    colours = {}
    for s, mesh in enumerate(plan.meshes):
        colours.update(dict.fromkeys(mesh.flat, style.LINES[s % len(style.LINES)]))

    def grid(title: str, mesh: np.ndarray) -> Grid:
        return title, [(f"device {each.id}", colours[each]) for each in mesh.flat], mesh.shape[1]

    grids = [grid("the cluster", plan.cluster)]
    for s, (layers, mesh) in enumerate(zip(plan.layers, plan.meshes, strict=True)):
        ends = f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
        shape = " x ".join(map(str, mesh.shape))
        grids.append(grid(f"stage {s}: {ends}\n{shape} (data x model)", mesh))
    return _draw(grids, ax)


def logical_meshes(shapes: Sequence[tuple[int, int]], ax: Axes | None = None) -> Axes:
    """The part of a micro-batch and of a weight matrix on each device, on meshes (data, model).

    A colour is a part of the weights: devices of one colour hold the same.
    """
    grids = []
    for data, model in shapes:
        cells = []
        for i, j in product(range(data), range(model)):
            words = f"samples: {_part(i, data)}\nweights: {_part(j, model)}"
            cells.append((f"device {i * model + j}\n{words}", _pale(j)))
        grids.append((f"({data}, {model})", cells, model))
    return _draw(grids, ax)


def _part(i: int, count: int) -> str:
    return f"{i + 1} of {count}" if count > 1 else "all"


def _pale(i: int) -> style.Colour:
    return style.lighter(style.LINES[i % len(style.LINES)], 0.3)


def _draw(grids: Sequence[Grid], ax: Axes | None) -> Axes:
    """Grids of boxes side by side."""
    rows = max(len(cells) // columns for _, cells, columns in grids)
    widths = [WIDTH * max(columns, 1.4) + 0.5 for _, _, columns in grids]
    width = min(0.8 * sum(widths), 10)
    ax = style.axes(ax, width=width, height=0.75 * HEIGHT * rows + 0.7)
    left = 0.0
    for (title, cells, columns), width in zip(grids, widths, strict=True):
        ax.text(left, 0.15, title, fontsize=9, va="bottom", parse_math=False)
        for number, (text, colour) in enumerate(cells):
            i, j = divmod(number, columns)
            corner = left + WIDTH * j, -HEIGHT * (i + 1)
            style.box(ax, corner, WIDTH, HEIGHT, colour, text=text, size=8)
        left += width
    ax.set(xlim=(-0.1, left - 0.4), ylim=(-HEIGHT * rows - 0.1, 0.9))
    ax.axis("off")
    return ax


def shardings(search: Search, ax: Axes | None = None) -> Axes:
    """A device's computing over what it sends, a dot for every candidate.

    All points of a grey line take the machine the same time, collectives' latency left out: further
    down and left is faster. A darker dot is several candidates. What does not fit is a cross.
    """
    ax = style.axes(ax, 7, 3.4)
    machine, table = search.machine, search.table

    def point(each: Candidate) -> tuple[float, float]:
        return each.cost.ring_bytes / 2**20, each.cost.flops / 1e9

    # [1] lines of equal time, up to the slowest candidate
    per_gflop = 1e9 / (machine.flops * machine.share)
    per_mib = 2**20 / machine.link(table[0].cost.devices)
    most_sent, most_computed = np.max(list(map(point, table)), axis=0)
    slowest = most_computed * per_gflop + most_sent * per_mib
    for seconds in np.linspace(0, slowest, 9)[1:]:
        # All of it sent, or all of it computed.
        ends = [0, seconds / per_mib], [seconds / per_gflop, 0]
        (line,) = ax.plot(*ends, color=style.lighter(style.GREY, 0.7), lw=0.8, zorder=1)
    line.set_label("equal time")
    # [2] the candidates, and over these the one without any split and the best
    fits = [each for each in table if each.cost.fits(machine)]
    whole = [each for each in table if not any(each.specs)]
    for name, found, marker, size, colour, alpha in (
        ("a candidate", fits, "o", 6, style.BLUE, 0.45),
        ("needs too much memory", [x for x in table if x not in fits], "x", 6, style.BLUE, 0.45),
        ("all arrays whole", whole, "s", 8, style.ORANGE, 1),
        ("best", [search.best], "*", 14, style.RED, 1),
    ):
        if found:
            points = zip(*map(point, found), strict=True)
            ax.plot(*points, marker, ms=size, color=colour, alpha=alpha, label=name)
    ax.set_xlim(-0.03 * most_sent, 1.05 * most_sent)
    ax.set_ylim(0, 1.1 * most_computed)
    ax.set_xlabel("MiB that a device sends")
    ax.set_ylabel("GFLOP of a device")
    style.legend(ax)
    return ax


def seconds(measured: Mapping[str, Mapping[str, Sequence[float]]], ax: Axes | None = None) -> Axes:
    """Times of several ways to do a job, for one job or more: job -> way -> seconds of each run.

    A bar is the median, its whisker goes from the shortest to the longest.
    """
    ways = list(dict.fromkeys(way for job in measured.values() for way in job))
    ax = style.axes(ax, 9, 0.9 + 0.42 * len(ways))
    height = 0.8 / len(measured)
    for i, (name, job) in enumerate(measured.items()):
        # Bars of one way stand together, one for each job.
        rows = [ways.index(way) + (i + 0.5) * height - 0.4 for way in job]
        quantiles = [1e3 * np.quantile(runs, (0, 0.5, 1)) for runs in job.values()]
        shortest, medians, longest = np.transpose(quantiles)
        whiskers = [medians - shortest, longest - medians]
        look: dict[str, Any] = {"color": _pale(i), "ecolor": style.GREY, "label": name}
        bars = ax.barh(rows, medians, 0.9 * height, xerr=whiskers, **look)
        ax.bar_label(bars, fmt="%.3g", padding=4, size=8)
    style.lanes(ax, range(len(ways)), ways)
    ax.invert_yaxis()
    ax.set_xlim(0, None)
    ax.set_xlabel("ms (median, shortest to longest)")
    style.legend(ax)
    return ax
