"""Meshes of devices: what a plan gives to each stage, and what each device of a mesh holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes

from pipelab.plot import style

if TYPE_CHECKING:
    from pipelab.pipeshard.auto import AutoPlan

WIDTH, HEIGHT = 1.5, 0.8  # of a device


def devices(held: Mapping[str, Any], ax: Axes | None = None) -> Axes:
    """Meshes side by side: title -> what each device holds, in an array shaped as the mesh.

    Equal things have the same colour, so that one sees where they go.
    """
    things = [str(thing) for array in held.values() for thing in np.asarray(array).flat]
    order = list(dict.fromkeys(things))
    grids = []
    for title, array in held.items():
        array = np.asarray(array)
        names = [[""] * array.shape[1] for _ in array]
        looks: list[list[Any]] = [[None] * array.shape[1] for _ in array]
        for number, ((i, j), thing) in enumerate(np.ndenumerate(array)):
            names[i][j] = f"device {number}\n{thing}"
            colour = style.LINES[order.index(str(thing)) % len(style.LINES)]
            looks[i][j] = style.lighter(colour, 0.3)
        grids.append((title, names, looks))
    return _draw(grids, ax)


def stage_plan(plan: AutoPlan, ax: Axes | None = None) -> Axes:
    """The cluster, a row per host, and the mesh of each stage with its layers, in its colour.

    Rows of a stage's mesh share the samples (data), columns the weights (model).
    """
    colours: dict[int, str] = {}
    for s, mesh in enumerate(plan.meshes):
        colours.update((device.id, style.LINES[s % len(style.LINES)]) for device in mesh.flat)
    names = [[f"device {device.id}" for device in host] for host in plan.cluster]
    looks = [[colours[device.id] for device in host] for host in plan.cluster]
    grids = [("the cluster", names, looks)]
    for s, (layers, mesh) in enumerate(zip(plan.layers, plan.meshes, strict=True)):
        ends = f"layers {layers[0]} to {layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
        shape = " x ".join(map(str, mesh.shape))
        names = [[f"device {device.id}" for device in row] for row in mesh]
        looks = [[colours[device.id] for device in row] for row in mesh]
        grids.append((f"stage {s}: {ends}\n{shape} (data x model)", names, looks))
    return _draw(grids, ax)


def logical_meshes(shapes: Sequence[tuple[int, int]], ax: Axes | None = None) -> Axes:
    """What each device holds of a micro-batch and of a weight matrix, on meshes (data, model).

    A colour is a part of the weights: devices of one colour hold the same.
    """
    grids = []
    for data, model in shapes:
        names, looks = [], []
        for i in range(data):
            parts = [f"samples: {_part(i, data)}\nweights: {_part(j, model)}" for j in range(model)]
            names.append([f"device {i * model + j}\n{part}" for j, part in enumerate(parts)])
            looks.append([style.lighter(style.LINES[j % 7], 0.3) for j in range(model)])
        grids.append((f"({data}, {model})", names, looks))
    return _draw(grids, ax)


def _part(i: int, count: int) -> str:
    return f"{i + 1} of {count}" if count > 1 else "all"


def _draw(grids: Sequence[tuple[str, list[list[str]], list[list[Any]]]], ax: Axes | None) -> Axes:
    """Grids of boxes side by side: a title, and per box its words and its colour."""
    rows = max(len(names) for _, names, _ in grids)
    widths = [WIDTH * max(len(names[0]), 1.4) for _, names, _ in grids]
    total = sum(widths) + 0.5 * (len(grids) - 1)
    ax = style.axes(ax, width=min(0.8 * total + 0.4, 10), height=0.75 * HEIGHT * rows + 0.7)
    left = 0.0
    for (title, names, looks), width in zip(grids, widths, strict=True):
        ax.text(left, 0.15, title, fontsize=9, va="bottom")
        for i, (words, colours) in enumerate(zip(names, looks, strict=True)):
            for j, (text, colour) in enumerate(zip(words, colours, strict=True)):
                corner = left + WIDTH * j, -HEIGHT * (i + 1)
                style.box(ax, corner, WIDTH, HEIGHT, colour, text=text, size=8)
        left += width + 0.5
    ax.set(xlim=(-0.1, left - 0.4), ylim=(-HEIGHT * rows - 0.1, 0.9))
    ax.axis("off")
    return ax
