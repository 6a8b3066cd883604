"""The schedule explorer: change a schedule, its sizes and its costs, and see its timeline."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import Any

import anywidget
import traitlets

from pipelab.predict.costs import PASSES, CostError, Costs, Recompute
from pipelab.predict.memory import memory
from pipelab.predict.simulate import simulate
from pipelab.predict.timeline import Timeline
from pipelab.schedules import SCHEDULES, make_for, takes
from pipelab.table.action import ScheduleError, check_counts
from pipelab.widgets import SHARES
from pipelab.widgets.assets import read_assets
from pipelab.widgets.drawing import Shown, drawing

SIZES = ("devices", "microbatches", "virtual", "batches")
SECONDS = (*PASSES, "update", "transfer")
BYTES = ("weights", "optimizer", "activations", "boundary", "host")
# Sizes at which every cause of memory is visible.
COSTS = Costs(weights=2, optimizer=4, activations=1, boundary=0.25, host=1)
LARGEST = 100_000  # actions; what a browser still draws in about a second
MOST = 1e15  # seconds or bytes; beyond, sums come near what single precision holds
made = lru_cache(maxsize=8)(make_for)  # keeps the compared table, and what was searched for


class Explorer(anywidget.AnyWidget):
    """A schedule's simulated timeline, with a form for everything it depends on.

    name, devices, microbatches, virtual, batches, memory
             what `pipelab.make` takes; `virtual` counts for schedules with chunks, `memory` for
             those made for a limit
    costs    of one device's whole share of the model: with v chunks, each has 1/v of it
             (`Costs.split`), so that the model stays the same (default: unit times, and small sizes
             in bytes)
    compare  another schedule of the same model, drawn below on the same time axis

    `timeline` is the simulation on display and `compared` the other schedule's; `set` changes what
    the form shows. If that cannot be simulated, the form says why, and the last picture stays.

    >>> explorer = Explorer("gpipe", devices=4, microbatches=8)
    >>> explorer.set(microbatches=16, compare="pipedream_flush")
    >>> explorer.timeline.makespan, explorer.compared.peak_in_flight
    (57.0, [4, 3, 2, 1])
    """

    _esm = read_assets("tools.js", "picture.js", "explorer.js")
    _css = read_assets("explorer.css")
    choices = traitlets.Dict().tag(sync=True)  # what the form's lists offer
    settings = traitlets.Dict().tag(sync=True)  # what the form says; the browser or `set` writes
    drawing = traitlets.Dict().tag(sync=True)  # what the picture shows
    error = traitlets.Unicode().tag(sync=True)  # why the picture is not that of the form
    timeline: Timeline
    compared: Timeline | None

    def __init__(
        self,
        name: str = "gpipe",
        devices: int = 4,
        microbatches: int = 8,
        virtual: int = 1,
        batches: int = 1,
        costs: Costs | None = None,
        compare: str | None = None,
        memory: float | None = None,
    ) -> None:
        self._costs = costs or COSTS
        settings = _as_text(
            {
                "schedule": name,
                "compare": compare,
                "devices": devices,
                "microbatches": microbatches,
                "virtual": virtual,
                "batches": batches,
                "memory": memory,
                **{key: getattr(self._costs, key) for key in (*SECONDS, *BYTES, "recompute")},
            }
        )
        picture = self._picture(settings)
        names = sorted(SCHEDULES)
        choices = {
            "schedules": names,
            "chunks": [n for n in names if takes(n, "virtual")],
            "limited": [n for n in names if takes(n, "memory")],
            "recompute": [mode.value for mode in Recompute],
        }
        super().__init__(choices=choices, settings=settings, drawing=picture)
        self.observe(self._answer, "settings")

    def set(self, **changes: Any) -> None:
        """Change settings: `schedule`, `compare`, the sizes, `memory`, the costs by name,
        `recompute`.

        Raises what the simulation raises (ScheduleError, CostError), and then changes nothing.
        """
        if unknown := sorted(set(changes) - set(self.settings)):
            raise TypeError(f"{unknown[0]} is not a setting: there are {', '.join(self.settings)}")
        settings = {**self.settings, **_as_text(changes)}
        picture = self._picture(settings)
        with self.hold_sync():
            self.unobserve(self._answer, "settings")
            try:
                self.settings, self.drawing, self.error = settings, picture, ""
            finally:
                self.observe(self._answer, "settings")

    def _answer(self, change: Any) -> None:
        """The browser changed the settings."""
        with self.hold_sync():
            try:
                self.drawing = self._picture(self.settings)
                self.error = ""
            except ValueError as error:
                self.error = str(error).partition("\n")[0]

    def _picture(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Simulate what the settings say, and keep that; returns its picture."""
        numbers = {key: _numbers(key, settings[key]) for key in SECONDS + BYTES}
        costs = replace(self._costs, **numbers, recompute=settings["recompute"])
        sizes = {key: settings[key] for key in SIZES}
        check_counts(**sizes)
        limit = _limit(settings["memory"])
        shown = [_simulated(settings["schedule"], costs, limit, **sizes)]
        if settings["compare"]:
            shown.append(_simulated(settings["compare"], costs, limit, **sizes))
        picture = drawing(shown)
        self.timeline = shown[0][0]
        self.compared = shown[1][0] if len(shown) > 1 else None
        return picture

    def __repr__(self) -> str:
        s = self.timeline.schedule
        beside = f" and {self.compared.schedule.name}" if self.compared else ""
        return (
            f"Explorer of {s.name}{beside}, p={s.devices}, m={s.microbatches}: "
            f"makespan {self.timeline.makespan:.5g}; run this cell to change it"
        )


def _simulated(name: str, costs: Costs, limit: float | None, virtual: int, **sizes: int) -> Shown:
    """What is drawn of a schedule, with the shares that rooms above add."""
    count = 2 * prod(sizes.values()) * (virtual if takes(name, "virtual") else 1)
    if count > LARGEST:
        raise ScheduleError(
            f"{name} would have {count:,} actions: the explorer draws at most {LARGEST:,}, "
            "so make a size smaller"
        )
    options = {"memory": limit} if takes(name, "memory") else {}
    # Most tables do not depend on costs: they stay cached while costs change.
    own = costs if takes(name, "costs") else COSTS
    table, _ = made(name, costs=own, virtual=virtual, **sizes, **options)
    own = costs.over(table.placement)
    timeline = simulate(table, own)
    shares = {label: share(table, own, timeline) for label, (_, share) in SHARES.items()}
    return timeline, memory(timeline, own), shares


def _as_text(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as the form holds them: costs and the memory are text, with commas between."""
    text = dict(settings)
    for key, value in settings.items():
        if key in ("compare", "memory") and value is None:
            text[key] = ""
        elif key in (*SECONDS, *BYTES, "memory") and not isinstance(value, str):
            values = value if hasattr(value, "__iter__") else [value]
            text[key] = ", ".join(str(float(x)).removesuffix(".0") for x in values)
        elif isinstance(value, Recompute):
            text[key] = value.value
    return text


def _limit(text: str) -> float | None:
    """How many micro-batches' activations fit on a device; None where the field is empty."""
    try:
        return float(text) if text.strip() else None
    except ValueError:
        raise ScheduleError(
            f"memory={text!r}: give one number, or leave it empty for as many as there are devices"
        ) from None


def _numbers(name: str, text: str) -> Any:
    """One number, or a list; text that is neither goes on to Costs, whose error shows it."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        return text
    if MOST < max(values) < math.inf:
        raise CostError(f"{name}={max(values):g}: the explorer draws numbers up to {MOST:g}")
    return values if len(values) > 1 else values[0]
