"""The data of the explorer's picture: numbers in columns, and text."""

import base64
from array import array
from collections.abc import Iterable, Sequence
from operator import add
from typing import Any

from pipelab.predict.memory import MEMORY_CAUSES, Memory
from pipelab.predict.timeline import Timeline
from pipelab.show import palette
from pipelab.show.units import BYTES, scale_of
from pipelab.table.action import COMPUTE, HOST, Kind
from pipelab.widgets import SHARES

Shown = tuple[Timeline, Memory, dict[str, float | None]]  # with the shares that rooms above add
BOTH = -2  # as a cause: the input and the end of the action before came at the same time
HINTS = {
    "makespan": "from the first start to the last end",
    "ideal": "compute of the busiest device: no order is faster",
    "bubble (over ideal)": (
        "idle time / (devices x makespan); over ideal: (makespan - ideal) / ideal"
    ),
    "peak in flight": "the most micro-batches held for a backward, by device",
    "weight versions": "the most versions of a stage's weights kept at one time, by device",
    "peak memory": "the most bytes held at one time, on the fullest device",
}
KINDS = sorted(COMPUTE | HOST)
COLUMNS = [
    *("start", "end", "there", "stage", "kind", "microbatch", "version", "colour"),
    *("source", "taker", "cause"),
]


def drawing(items: Sequence[Shown]) -> dict[str, Any]:
    """The whole picture: timelines on one axis, their memory, a table of numbers."""
    hints = HINTS | {label: hint for label, (hint, _) in SHARES.items()}
    filled = {step.cause for _, m, _ in items for step in m.steps}
    shown = [cause for cause in MEMORY_CAUSES if cause in filled]
    peaks = [m.peak() for _, m, _ in items]
    numbers = [_numbers(*item, peak, shown) for item, peak in zip(items, peaks, strict=True)]
    picture = boxes([t for t, *_ in items])
    for timeline, (_, m, _) in zip(picture["timelines"], items, strict=True):
        timeline.update(_memory(m, shown))
    return picture | {
        "memory": max(map(max, peaks)),
        "causes": [[cause, palette.MEMORY_CAUSES[cause]] for cause in shown],
        "numbers": [
            [label, hints.get(label, ""), *(n[label] for n in numbers)] for label in numbers[0]
        ],
    }


def boxes(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Timelines on one axis, and their legend."""
    schedules = [t.schedule for t in timelines]
    return {
        "end": max(t.makespan for t in timelines),
        "timelines": [*map(_timeline, timelines)],
        "letters": [kind.name for kind in Kind],
        "names": [palette.NAMES.get(kind, "") for kind in Kind],
        "legend": palette.legend(palette.kinds_of(schedules)),
        "lighter": palette.lighter(schedules),
    }


def _timeline(t: Timeline) -> dict[str, Any]:
    """The columns of a timeline's actions, rows one after another from bounds[d] to bounds[d + 1].

    there   when the action's input was on its device (-1: it takes none)
    colour  an index into `colours`, pairs of a box's colour and its number's
    joined  indices of actions that overlap with the one before
    source, taker  indices of actions, or -1: whose output it takes, and which takes its output
    cause   what it waited for last, its input's source or the action before it in the row: the
            index of that action, BOTH, or -1
    """
    s, chunks = t.schedule, palette.chunks_of(t.schedule)
    rounding = 1e-9 * t.makespan
    source, taker, before = (
        [-1 if i is None else i for i in around] for around in (s.inputs, s.takers, t.before)
    )
    there, cause, devices = t.input_arrival(), [], s.devices
    for made, last, arrived in zip(source, before, there, strict=True):
        done = t.end[last] if last >= 0 else 0.0
        alike = last >= 0 and abs(arrived - done) <= rounding
        cause.append(BOTH if alike else made if arrived > done else last)
    colour = [kind * chunks + stage // devices for stage, kind, _ in s.actions]
    cells = zip(*s.actions, strict=True)
    version = [span.version for span in t.spans]
    rows = (
        t.start,
        t.end,
        [max(x, -1) for x in there],
        *cells,
        version,
        colour,
        source,
        taker,
        cause,
    )
    colours = [
        palette.box_colours(kind, chunk * s.devices, s.devices, s.stages)
        for kind in KINDS
        for chunk in range(chunks)
    ]
    return {
        "name": s.name,
        "summary": t.summary(),
        "makespan": t.makespan,
        "bounds": s.bounds,
        "joined": sorted(s.joined),
        "digits": len(str(s.total - 1)),
        "colours": colours,
        "columns": COLUMNS,
        "data": _packed(rows),
    }


def _memory(m: Memory, shown: list[str]) -> dict[str, Any]:
    """Memory over time, device after device: times, then bytes added up to each shown cause."""
    bounds: list[int] = [0]
    rows: list[list[float]] = [[] for _ in range(len(shown) + 1)]
    for times, levels in map(m.over_time, range(m.devices)):
        tops = [0.0] * len(times)
        rows[0] += times
        for row, cause in zip(rows[1:], shown, strict=True):
            tops = [*map(add, tops, levels[cause])]
            row += tops
        bounds.append(len(rows[0]))
    return {
        "steps": _packed(rows),
        "step_bounds": bounds,
        "peaks": [_bytes(peak) for peak in m.peak()],
    }


def _packed(rows: Iterable[Iterable[float]]) -> str:
    """Single-precision numbers as text, which a saved notebook restores like any other value."""
    return base64.b64encode(b"".join(array("f", row).tobytes() for row in rows)).decode()


def _numbers(
    t: Timeline, m: Memory, shares: dict[str, float | None], peak: list[float], shown: list[str]
) -> dict[str, str]:
    """The table beside the picture: label -> text; last, what fills the fullest device."""
    texts = [*map(_bytes, peak)]  # peaks that differ by rounding only are equal
    fullest = texts.index(most := _bytes(max(peak)))
    of_device = f" on device {fullest}" if len({*texts}) > 1 else ""
    held = m.at_peak(fullest)
    return {
        "makespan": f"{t.makespan:.5g}",
        "ideal": f"{t.ideal:.5g}",
        "bubble (over ideal)": f"{t.bubble.of_total:.1%} ({t.bubble.over_ideal:.1%})",
        **{label: "-" if share is None else f"{share:.1%}" for label, share in shares.items()},
        "peak in flight": per_device(t.peak_in_flight),
        "weight versions": per_device(t.weight_versions),
        "peak memory": most + of_device,
        **{cause: _bytes(held[cause]) for cause in shown},
    }


def per_device(values: Sequence[int]) -> str:
    """A number for every device, or one if all have the same."""
    if len(set(values)) == 1:
        return f"{values[0]} everywhere" if len(values) > 1 else str(values[0])
    return " ".join(map(str, values)) if len(values) <= 8 else f"{min(values)} to {max(values)}"


def _bytes(value: float) -> str:
    factor, unit = scale_of(value, BYTES)
    return f"{value / factor:.4g} {unit}" if factor > 1 else f"{value:.4g}"
