"""What benchmarks/gpu measures, on a GPU or in its rehearsal on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from gpu.cases import SGD
from measure import in_turn, paragraph, spread, table
from pipelab import Kind, Run, Schedule, fit, make, parts, run, simulate
from pipelab.gpu.parts import part_sizes
from pipelab.models import split
from pipelab.optimize.cut import profile, uniform

KEPT = "row:"  # begins a line that is a row of a section's table


class Skip(Exception):
    """A section that this machine cannot run, or not all of it, and why."""

    def __init__(self, reason: str, parts: Sequence[str] = ()) -> None:
        super().__init__(reason)
        self.parts = parts


class Failed(Exception):
    """A section that has something to show, but not all of it as it should be."""

    def __init__(self, parts: list[str]) -> None:
        super().__init__(parts)
        self.parts = parts


YES, NO = "yes", "no"  # whether a row meets its target


def met(holds: bool | None) -> str:
    """The last cell of a row; empty without a target."""
    return "" if holds is None else YES if holds else NO


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    width    of the model's layers; what goes in and comes out of the model is narrow, so that the
             data take no room
    samples  of a micro-batch, at most
    forward  seconds that one layer's forward takes at least, if so many samples are enough: a GPU
             has to be busier than the interpreter that drives it
    """

    width: int
    samples: int
    forward: float
    layers: int = 8
    ends: int = 64
    microbatches: int = 8
    batches: int = 3
    repeats: int = 4
    pairs: int = 3  # of predictions, eight times three runs each


DEFAULTS = {"cuda": Sizes(4096, 4096, 1e-3), "cpu": Sizes(256, 256, 1e-3, repeats=3)}


@dataclass(frozen=True)
class Place:
    """Where it is measured: a device, how much, and the seconds that a section has."""

    device: torch.device
    sizes: Sizes
    seconds: float

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


class Model:
    """An MLP on the place's device, with micro-batches large enough to keep that busy."""

    def __init__(self, place: Place) -> None:
        self.place, self.sizes = place, place.sizes
        torch.manual_seed(0)
        n, width, ends = self.sizes.layers, self.sizes.width, self.sizes.ends
        widths = [ends, *[width] * (n - 1), ends]
        layers = [nn.Sequential(nn.Linear(a, b), nn.ELU()) for a, b in pairwise(widths)]
        self.layers = nn.ModuleList(layers).to(place.device)
        self.samples = self._samples()

    def _samples(self) -> int:
        """Doubled until a layer takes long enough."""
        samples, most = 32, self.sizes.samples
        if self.place.on_gpu:  # the activations of a batch shall fit
            kept = 2 * self.sizes.layers * self.sizes.microbatches * self.sizes.width * 4
            memory = torch.cuda.get_device_properties(self.place.device).total_memory
            most = min(most, int(0.3 * memory / kept))
        while samples * 2 <= most:
            x = torch.randn(samples, self.sizes.width, device=self.place.device)
            if profile([self.layers[1]], x, repeats=3).layers[0].forward >= self.sizes.forward:
                break
            samples *= 2
        return samples

    def stages(self, count: int) -> list[nn.Sequential]:
        return split(list(self.layers), uniform(self.sizes.layers, count))

    def run(self, schedule: Schedule, devices: Sequence[Any], optimizer: Callable = SGD) -> Run:
        """Not checked; the first batch of its timeline warms up."""
        shape = schedule.microbatches * self.samples, self.sizes.ends
        batches = [(torch.randn(shape), torch.randn(shape)) for _ in range(schedule.batches)]
        names = list(map(str, devices))
        stages = self.stages(schedule.stages)
        return run(schedule, stages, batches, F.mse_loss, optimizer, devices=names, check=False)

    def seconds(self, stages: int) -> float:
        """Per batch of 1F1B with so many stages on the one device."""
        schedule = self.table("pipedream_flush", stages)
        timeline = self.run(schedule, [self.place.device] * stages).timeline
        return statistics.median(timeline.batch_seconds())

    def table(self, name: str, devices: int, times: int = 1, virtual: int = 1) -> Schedule:
        """A schedule of so many times the micro-batches."""
        sizes = self.sizes
        count = times * sizes.microbatches
        return make(name, devices, count, virtual=virtual, batches=sizes.batches)

    def __str__(self) -> str:
        return (
            f"{self.sizes.layers} layers of width {self.sizes.width}, {self.sizes.microbatches} "
            f"micro-batches of {self.samples} samples, {self.sizes.batches} batches"
        )


def judged(place: Place, parts: list[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The parts of a section; Failed if a row misses its target. A rehearsal has no targets."""
    if place.on_gpu and any(row[-1] == NO for row in rows):
        raise Failed(parts)
    return parts


def row_of(*cells: Any) -> tuple[str, ...]:
    """A row of a table, printed at once: a section that is cut off has those that it had."""
    row = tuple(map(str, cells))
    print(KEPT, "|", *(f"{cell} |" for cell in row), flush=True)
    return row


def percent(errors: Sequence[float]) -> str:
    """The median and the extremes of relative errors."""
    middle, least, most = (
        f"{100 * x:+.1f}" for x in (statistics.median(errors), min(errors), max(errors))
    )
    return f"{middle} ({least} to {most}) %"


def one_and_four(
    seconds: Callable[[int], float], repeats: int, most: float
) -> tuple[list[str], list[tuple[str, ...]]]:
    """Seconds per batch with one stage and with four on one device, in words, and its rows.

    `most` is the target of their ratio.
    """
    one, four = in_turn([partial(seconds, 1), partial(seconds, 4)], repeats)
    ratios = [b / a for a, b in zip(one, four, strict=True)]
    itself = [b / a - 1 for a, b in pairwise(one)]
    rows = [
        row_of(1, spread(one, ".1f"), ""),
        row_of(4, spread(four, ".1f"), met(statistics.median(ratios) <= most)),
    ]
    parts = [
        table(("stages", "ms per batch", "within"), rows),
        paragraph(
            f"Four stages take {spread(ratios, '.3f', 1)} times as long as one; one stage differs "
            f"from its own run before by {percent(itself)}. Median (least-most) of {repeats} runs "
            "in turn, from update to update without the first batch."
        ),
    ]
    return parts, rows


def streams(place: Place) -> list[str]:
    """Four stages on one device, each on a stream of its own, beside one stage with all layers."""
    model, most = Model(place), 1.03
    parts, rows = one_and_four(model.seconds, place.sizes.repeats, most)
    words = paragraph(f"1F1B, {model}. Target: at most {most} of one stage's time.")
    return judged(place, [words, *parts], rows)


class Clocked(torch.optim.SGD):
    """Notes the time when its step is done, as the host sees it."""

    def __init__(self, parameters: Any, place: Place, marks: list[float]) -> None:
        super().__init__(parameters, lr=0.01)
        self.place, self.marks = place, marks

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        self.place.wait()
        self.marks.append(time.perf_counter())


def clocks(place: Place) -> list[str]:
    """The timeline of one stage, by events on a GPU, beside the host's clock around its batches."""
    model, sizes = Model(place), place.sizes

    def shares() -> tuple[float, float]:
        marks: list[float] = []
        noted = partial(Clocked, place=place, marks=marks)
        timeline = model.run(model.table("gpipe", 1), [place.device], noted).timeline
        wall = marks[-1] - marks[0]
        inside = float(timeline.warmed_up().busy[0])
        return sum(timeline.batch_seconds()) / wall, inside / wall

    (pairs,) = in_turn([shares], sizes.repeats)
    whole, inside = zip(*pairs, strict=True)
    parts = [
        paragraph(
            f"One stage, GPipe, {model}. The host notes its time after every update, when it has "
            "waited for the device. From the first update to the last, the timeline is "
            f"{spread(whole, '.4f', 1)} times as long as the host's clock says (target: 1 within "
            f"0.01), and its actions fill {spread(inside, '.4f', 1)} of that; the rest is between "
            f"actions. Median (least-most) of {sizes.repeats} runs."
        )
    ]
    return judged(place, parts, [(met(abs(statistics.median(whole) - 1) <= 0.01),)])


TABLES = (
    # name, stages a device, times the micro-batches
    ("inter_layer", 1, 1),
    ("gpipe", 1, 1),
    ("gpipe", 1, 2),
    ("pipedream_flush", 1, 1),
    ("interleaved", 2, 1),
    ("pipedream", 1, 1),
    ("pipedream_2bw", 1, 1),
    ("zb_h1", 1, 1),
)


def devices_of(place: Place, count: int) -> tuple[list[str], str]:
    """Devices of their own for so many rows, and what they are: GPUs, parts of one, or the CPU."""
    if not place.on_gpu:
        return ["cpu"] * count, "threads of the CPU"
    if torch.cuda.device_count() >= count:
        return [f"cuda:{i}" for i in range(count)], "GPUs"
    try:
        names = parts("cuda:0", count)
    except ValueError as reason:
        raise Skip(f"too few GPUs, and no parts of one: {reason}") from reason
    each = part_sizes(0, count)
    whole = torch.cuda.get_device_properties(0).multi_processor_count
    return names, f"parts of one GPU, of {each[0]} of its {whole} multiprocessors each"


def sharing(place: Place) -> list[str]:
    """What four devices lose to each other: a part alone beside four at once."""
    names, words = devices_of(place, 4)
    model, rows = Model(place), []

    def mean_times(name: str) -> tuple[float, float]:
        spans = model.run(model.table(name, 4), names).timeline.warmed_up().spans
        middle = [span for span in spans if span.action.stage in (1, 2)]
        forward, backward = (
            [span.end - span.start for span in middle if span.action.kind is kind]
            for kind in (Kind.F, Kind.B)
        )
        return statistics.mean(forward), statistics.mean(backward)

    alone, together = in_turn(
        [partial(mean_times, "inter_layer"), partial(mean_times, "gpipe")], place.sizes.repeats
    )
    for i, kind in enumerate(("forward", "backward")):
        one, four = ([times[i] for times in found] for found in (alone, together))
        ratios = [b / a for a, b in zip(one, four, strict=True)]
        itself = [b / a for a, b in pairwise(one)]
        cells = spread(one, ".2f"), spread(four, ".2f"), spread(ratios, ".3f", 1)
        rows.append(row_of(kind, *cells, spread(itself, ".3f", 1)))
    return [
        paragraph(
            f"Four {words}; {model}. Milliseconds of a stage's action, mean of the two middle "
            "stages, when one stage works at a time (inter-layer) and when all do (GPipe). What "
            "the ratio is above its own spread they lose to each other: memory's bandwidth, the "
            "L2 cache, power, and the host, which launches for all."
        ),
        table(("action", "alone (ms)", "four at once (ms)", "times", "A/A"), rows),
    ]


def predictions(place: Place) -> list[str]:
    """Costs fitted on one run predict other tables, beside the same run repeated."""
    model, rows = Model(place), []
    names, words = devices_of(place, 4)
    for name, virtual, times in TABLES:
        schedule = model.table(name, 4, times=times, virtual=virtual)
        (found,) = in_turn([partial(_errors, model, schedule, names)], place.sizes.pairs)
        errors, same = zip(*found, strict=True)
        middle, own = statistics.median(errors), max(map(abs, same))
        within = met(abs(middle) <= max(0.05, own))
        rows.append(row_of(name, schedule.microbatches, percent(errors), percent(same), within))
    parts = [
        paragraph(
            f"Four {words}; {model}. Right before each run, costs are fitted on GPipe, for ZB-H1 "
            f"on ZB-H2, with {place.sizes.microbatches} micro-batches; the first batch is left out "
            "of both. Errors of the predicted makespan, beside those of the same run repeated "
            "(A/A): median "
            f"(least to most) of {place.sizes.pairs} pairs. Target: within 5 %, or within the "
            "largest A/A."
        ),
        table(("schedule", "m", "predicted - measured", "A/A", "within"), rows),
    ]
    return judged(place, parts, rows)


def _errors(model: Model, schedule: Schedule, devices: Sequence[Any]) -> tuple[float, float]:
    """Of a prediction from a fit just before the run, and of the run itself as another's."""
    # Halves of a backward show in a run that has them.
    halved = any(action.kind is Kind.I for action in schedule.actions)
    other = "zb_h2" if halved else "gpipe"
    costs = fit(model.run(model.table(other, len(devices)), devices).timeline)
    costs = costs.split(schedule.stages // schedule.devices)
    runs = (model.run(schedule, devices).timeline for _ in range(2))
    predicted, measured, again = (
        timeline.warmed_up().makespan for timeline in (simulate(schedule, costs), *runs)
    )
    return predicted / measured - 1, again / measured - 1
