"""Sliders over a timeline."""

from __future__ import annotations

import io

import ipywidgets
from matplotlib.figure import Figure

from pipelab import plot
from pipelab.costs import Costs
from pipelab.schedule import Schedule
from pipelab.schedules import make
from pipelab.simulate import simulate
from pipelab.timeline import Timeline


class Explorer(ipywidgets.VBox):
    """A schedule's simulated timeline under sliders: devices, micro-batches, and the ratio of backward to forward.

    A line of text above the picture says what it shows. `explorer.timeline` is the simulation on display.
    """

    def __init__(self, name: str = "gpipe", devices: int = 4, microbatches: int = 8, ratio: float = 2.0) -> None:
        self.name = name
        wide = {"style": {"description_width": "9em"}, "layout": {"width": "28em"}, "continuous_update": False}
        self.devices = ipywidgets.IntSlider(devices, 1, 16, description="devices p", **wide)
        self.microbatches = ipywidgets.IntSlider(microbatches, 1, 64, description="micro-batches m", **wide)
        self.ratio = ipywidgets.FloatSlider(ratio, min=0.5, max=4, step=0.25, description="backward / forward", **wide)
        self.words, self.image = ipywidgets.HTML(), ipywidgets.Image(format="png", layout={"max_width": "100%"})
        for slider in (self.devices, self.microbatches, self.ratio):
            slider.observe(lambda change: self.draw(), names="value")
        super().__init__([self.devices, self.microbatches, self.ratio, self.words, self.image])
        self.draw()

    @property
    def timeline(self) -> Timeline:
        schedule: Schedule = make(self.name, self.devices.value, self.microbatches.value)
        half = self.ratio.value / 2
        return simulate(schedule, Costs(forward=1, input_grad=half, weight_grad=half))

    def draw(self) -> None:
        """Simulate and draw again with the sliders' values."""
        t = self.timeline
        self.words.value = t.summary()
        self.image.value = png(t)

    def __repr__(self, *_: object) -> str:
        return f"Explorer of {self.name}: three sliders over its timeline; run this notebook to move them"


def png(timeline: Timeline, dpi: int = 100) -> bytes:
    """A timeline's picture as PNG bytes."""
    figure = Figure(figsize=(10, 0.9 + 0.38 * timeline.schedule.devices), layout="constrained")
    plot.timeline(timeline, figure.subplots())
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    return buffer.getvalue()
