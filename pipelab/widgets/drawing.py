"""What the explorer's picture is drawn from: numbers in columns and text, all that the browser is told."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.colors import to_hex

from pipelab.action import Kind
from pipelab.explain import parts
from pipelab.memory import CAUSES, Memory
from pipelab.plot import style
from pipelab.plot.timeline import colour_of
from pipelab.timeline import Timeline

COLUMNS = (
    "start",
    "end",
    "there",
    "stage",
    "kind",
    "microbatch",
    "version",
    "colour",
    "source",
    "taker",
    "cause",
)
BOTH = -2
HINTS = {
    "makespan": "from the first start to the last end",
    "ideal": "compute of the busiest device: no order is faster",
    "bubble of total": "idle time / (devices x makespan)",
    "bubble over ideal": "(makespan - ideal) / ideal",
    "bubble of span": "(span - ideal) / span, of the device with the longest span",
    "peak in flight": "the most micro-batches held for a backward, by device",
    "weight versions": "the most versions of a stage's weights kept at one time, by device",
    "peak memory": "the most bytes held at one time, on the fullest device",
}
KINDS = (Kind.F, Kind.B, Kind.I, Kind.W, Kind.U)


def drawing(items: Sequence[tuple[Timeline, Memory]]) -> dict[str, Any]:
    """The whole picture: timelines on one axis that ends at `end`, their memory up to `memory`, a table of numbers."""
    levels = [[m.over_time(d) for d in range(m.devices)] for _, m in items]
    held = [np.array([_peak(level) for _, level in devices]) for devices in levels]  # device, cause
    shown = np.flatnonzero(
        [
            any(level[c].any() for devices in levels for _, level in devices)
            for c in range(len(CAUSES))
        ]
    )
    largest = max(float(h.sum(axis=1).max()) for h in held)
    numbers = [_numbers(t, h, shown) for (t, _), h in zip(items, held, strict=True)]
    chunks = max(_chunks(t) for t, _ in items)
    kinds = [k for k in KINDS if any((t.kind == k).any() for t, _ in items)]
    return {
        "end": max(t.makespan for t, _ in items),
        "memory": largest,
        "timelines": [
            _timeline(t) | _memory(m, h, shown) for (t, m), h in zip(items, held, strict=True)
        ],
        "letters": [k.name for k in Kind],
        "names": [style.NAMES.get(k, "") for k in Kind],
        "legend": [[style.NAMES[k], style.KINDS[k]] for k in kinds],
        "lighter": f"lighter: later of {chunks} chunks" if chunks > 1 else "",
        "causes": [[CAUSES[c], style.CAUSES[CAUSES[c]]] for c in shown],
        "numbers": [
            [label, HINTS.get(label, ""), *(n[label] for n in numbers)] for label in numbers[0]
        ],
    }


def _timeline(t: Timeline) -> dict[str, Any]:
    """The columns of a timeline's actions, rows one after another from bounds[d] to bounds[d + 1].

    there   when the action's input was on its device (-1: it takes none)
    colour  an index into `colours`, pairs of a box's colour and its number's
    source, taker, cause  indices of actions, or -1: whose output it takes, which one takes its, and for which of its
                          input and the action before it in the row it waited, the one that came last (BOTH at a time: -2)
    """
    s = t.schedule
    chunks = _chunks(t)
    before = np.arange(len(t.start)) - 1
    before[[a for a, b in pairwise(s.bounds) if b > a]] = -1
    part = parts(t)
    there = np.where(s.inputs >= 0, t.end[s.inputs] + part.delay, -1)
    done = np.where(before >= 0, t.end[before], 0)
    tie = (s.inputs >= 0) & (before >= 0) & (abs(there - done) <= 1e-9 * t.makespan)
    cause = np.where(tie, BOTH, np.where(part.fed, s.inputs, before))
    colours = [
        to_hex(colour_of(k, c * s.devices, s.devices, s.stages))
        for k in KINDS
        for c in range(chunks)
    ]
    columns = (
        t.start,
        t.end,
        there,
        t.stage,
        t.kind,
        t.microbatch,
        t.version,
        t.kind * chunks + t.stage // s.devices,
        s.inputs,
        s.takers,
        cause,
    )
    return {
        "name": s.name,
        "summary": t.summary(),
        "makespan": t.makespan,
        "bounds": s.bounds,
        "digits": len(str(s.total - 1)),
        "colours": [[colour, style.ink(colour)] for colour in colours],
        "columns": COLUMNS,
        "data": _packed(columns),
    }


def _memory(m: Memory, held: np.ndarray, shown: np.ndarray) -> dict[str, Any]:
    """Memory over time: a row of times, then for each shown cause a row of bytes up to and with it, device after device."""
    bounds, blocks = [0], []
    for time, level in map(m.settled, range(m.devices)):
        blocks.append(np.vstack([time, np.cumsum(level[shown], axis=0)]))
        bounds.append(bounds[-1] + len(time))
    return {
        "steps": _packed(np.hstack(blocks)),
        "step_bounds": bounds,
        "peaks": [_bytes(x) for x in held.sum(axis=1)],
    }


def _peak(level: np.ndarray) -> np.ndarray:
    """What fills a device at the moment of its peak, per cause."""
    return level[:, np.argmax(level.sum(axis=0))] if level.size else np.zeros(len(CAUSES))


def _chunks(t: Timeline) -> int:
    return -(-t.schedule.stages // t.schedule.devices)


def _packed(columns: Iterable[np.ndarray]) -> str:
    """Rows of single-precision numbers in base64: text, so that a saved notebook restores it like any other value."""
    return base64.b64encode(np.stack(list(columns)).astype("<f4").tobytes()).decode()


def _numbers(t: Timeline, held: np.ndarray, shown: np.ndarray) -> dict[str, str]:
    """The table beside the picture: label -> text; what the fullest device's memory is made of has no hint."""
    b, fullest = t.bubble, int(np.argmax(held.sum(axis=1)))
    total = held.sum(axis=1)
    of_device = f" on device {fullest}" if (total < total[fullest]).any() else ""
    memory = {
        "peak memory": _bytes(held[fullest].sum()) + of_device,
        **{CAUSES[c]: _bytes(held[fullest, c]) for c in shown},
    }
    return {
        "makespan": f"{t.makespan:.5g}",
        "ideal": f"{t.ideal:.5g}",
        "bubble of total": f"{b.of_total:.1%}",
        "bubble over ideal": f"{b.over_ideal:.1%}",
        "bubble of span": f"{b.of_span:.1%}",
        "peak in flight": _per_device(t.peak_in_flight),
        "weight versions": _per_device(t.weight_versions),
        **memory,
    }


def _per_device(values: Sequence[int]) -> str:
    if len(set(values)) == 1:
        return f"{values[0]} everywhere" if len(values) > 1 else str(values[0])
    return " ".join(map(str, values)) if len(values) <= 8 else f"{min(values)} to {max(values)}"


def _bytes(value: float) -> str:
    factor, unit = style.scale_of(value, style.BYTES)
    return f"{value / factor:.4g} {unit}" if factor > 1 else f"{value:.4g}"
