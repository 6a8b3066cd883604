"""What the explorer's picture is drawn from: numbers in columns, and text, for the browser."""

import base64
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from matplotlib.colors import to_hex

from pipelab.action import COMPUTE, Kind
from pipelab.memory import CAUSES, Memory
from pipelab.plot import style
from pipelab.plot.timeline import chunks_of, colour_of, kinds_of
from pipelab.timeline import Timeline, scale_of

BOTH = -2  # as a cause: the input and the action before came at the same time
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
KINDS = sorted(COMPUTE)


def drawing(items: Sequence[tuple[Timeline, Memory]]) -> dict[str, Any]:
    """The whole picture: timelines on one axis, their memory, a table of numbers."""
    timelines = [t for t, _ in items]
    held = [np.array([list(m.at_peak(d).values()) for d in range(m.devices)]) for _, m in items]
    shown = [c for c in range(len(CAUSES)) if any(m.change[m.cause == c].any() for _, m in items)]
    numbers = [_numbers(t, h, shown) for t, h in zip(timelines, held, strict=True)]
    chunks = chunks_of(timelines)
    return {
        "end": max(t.makespan for t in timelines),
        "memory": max(float(h.sum(axis=1).max()) for h in held),
        "timelines": [
            _timeline(t) | _memory(m, h, shown) for (t, m), h in zip(items, held, strict=True)
        ],
        "letters": [kind.name for kind in Kind],
        "names": [style.NAMES.get(kind, "") for kind in Kind],
        "legend": [[style.NAMES[kind], style.KINDS[kind]] for kind in kinds_of(timelines)],
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
    source, taker  indices of actions, or -1: whose output it takes, and which one takes its own
    cause   for which of its input and the action before it in the row it waited: the index of the
            one that came last, BOTH, or -1
    """
    s = t.schedule
    chunks = chunks_of([t])
    before, part = s.before, t.parts()
    there = np.where(s.inputs >= 0, t.end[s.inputs] + part.delay, -1)
    done = np.where(before >= 0, t.end[before], 0)
    tie = (s.inputs >= 0) & (before >= 0) & (abs(there - done) <= 1e-9 * t.makespan)
    columns = {
        "start": t.start,
        "end": t.end,
        "there": there,
        "stage": t.stage,
        "kind": t.kind,
        "microbatch": t.microbatch,
        "version": t.version,
        "colour": t.kind * chunks + t.stage // s.devices,
        "source": s.inputs,
        "taker": s.takers,
        "cause": np.where(tie, BOTH, np.where(part.fed, s.inputs, before)),
    }
    colours = [
        to_hex(colour_of(kind, chunk * s.devices, s.devices, s.stages))
        for kind in KINDS
        for chunk in range(chunks)
    ]
    return {
        "name": s.name,
        "summary": t.summary(),
        "makespan": t.makespan,
        "bounds": s.bounds,
        "digits": len(str(s.total - 1)),
        "colours": [[colour, style.ink(colour)] for colour in colours],
        "columns": list(columns),
        "data": _packed(columns.values()),
    }


def _memory(m: Memory, held: np.ndarray, shown: list[int]) -> dict[str, Any]:
    """Memory over time, device after device: times, then bytes up to and with each shown cause."""
    bounds, blocks = [0], []
    for time, level in map(m.settled, range(m.devices)):
        blocks.append(np.vstack([time, np.cumsum(level[shown], axis=0)]))
        bounds.append(bounds[-1] + len(time))
    return {
        "steps": _packed(np.hstack(blocks)),
        "step_bounds": bounds,
        "peaks": [_bytes(total) for total in held.sum(axis=1)],
    }


def _packed(rows: Iterable[np.ndarray]) -> str:
    """Single-precision numbers as text, which a saved notebook restores like any other value."""
    return base64.b64encode(np.stack(list(rows)).astype("<f4").tobytes()).decode()


def _numbers(t: Timeline, held: np.ndarray, shown: list[int]) -> dict[str, str]:
    """The table beside the picture: label -> text, last what the fullest device's memory holds."""
    total = held.sum(axis=1)
    fullest = int(np.argmax(total))
    of_device = f" on device {fullest}" if (total < total[fullest]).any() else ""
    return {
        "makespan": f"{t.makespan:.5g}",
        "ideal": f"{t.ideal:.5g}",
        "bubble of total": f"{t.bubble.of_total:.1%}",
        "bubble over ideal": f"{t.bubble.over_ideal:.1%}",
        "bubble of span": f"{t.bubble.of_span:.1%}",
        "peak in flight": per_device(t.peak_in_flight),
        "weight versions": per_device(t.weight_versions),
        "peak memory": _bytes(total[fullest]) + of_device,
        **{CAUSES[c]: _bytes(held[fullest, c]) for c in shown},
    }


def per_device(values: Sequence[int]) -> str:
    """A number for every device, or one if all have the same."""
    if len(set(values)) == 1:
        return f"{values[0]} everywhere" if len(values) > 1 else str(values[0])
    return " ".join(map(str, values)) if len(values) <= 8 else f"{min(values)} to {max(values)}"


def _bytes(value: float) -> str:
    factor, unit = scale_of(value, style.BYTES)
    return f"{value / factor:.4g} {unit}" if factor > 1 else f"{value:.4g}"
