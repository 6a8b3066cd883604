"""A derivation to step through: each term of a formula lights up its boxes on a timeline."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import anywidget
import traitlets
from matplotlib.figure import Figure

from pipelab.plot import style
from pipelab.plot.timeline import bar
from pipelab.predict.timeline import Timeline
from pipelab.show import palette
from pipelab.table.timing import Span
from pipelab.widgets.assets import read_assets
from pipelab.widgets.drawing import boxes

HERE = Path(__file__).parent


class Gap(NamedTuple):
    """Idle time of a device between two of its boxes, or before the first or behind the last."""

    device: int
    start: float
    end: float


class Step(NamedTuple):
    """A sentence, and what lights up while it is read.

    terms   names of terms of the formula
    lit     actions whose boxes are lit, such as 2F0
    idle    whether a gap is lit
    on      the timeline that is shown; "": the same as before
    """

    says: str
    terms: str = ""
    lit: Collection[str] = ()
    idle: Callable[[Gap], bool] = lambda gap: False
    on: str = ""


def cells(stages: Collection[int], kinds: str, microbatches: Collection[int]) -> set[str]:
    """Names of actions.

    >>> sorted(cells([0, 2], "FB", [7]))
    ['0B7', '0F7', '2B7', '2F7']
    """
    return {f"{s}{kind}{k}" for s, kind, k in product(stages, kinds, microbatches)}


def gaps(t: Timeline) -> Iterator[Gap]:
    """All idle time from 0 to the makespan."""
    for device, (first, last) in enumerate(pairwise(t.schedule.bounds)):
        ends = [0.0, *t.end[first:last]]
        for gap in map(Gap, [device] * len(ends), ends, [*t.start[first:last], t.makespan]):
            if gap.end - gap.start > 1e-6 * t.makespan:
                yield gap


class Derivation(anywidget.AnyWidget):
    """A formula, a sentence and a timeline, in steps.

    title      the question
    formula    its terms are `{name: term}`, a fraction is `[above | below]`; a letter that stands
               alone is a variable
    timelines  name -> timeline, on one time axis
    """

    _esm = read_assets("tools.js", "picture.js", HERE / "derivation.js")
    _css = read_assets("explorer.css", HERE / "derivation.css")
    shown = traitlets.Dict().tag(sync=True)

    def __init__(
        self, title: str, formula: str, timelines: Mapping[str, Timeline], steps: Sequence[Step]
    ) -> None:
        self.title, self.formula, self.steps = title, formula, steps
        names, on = [*timelines], next(iter(timelines))
        drawing, told = boxes([*timelines.values()]), []
        for (name, t), drawn in zip(timelines.items(), drawing["timelines"], strict=True):
            drawn |= {"name": name, "lighter": palette.lighter([t.schedule])}
        self.on: list[Timeline] = []  # of each step
        self.boxes: list[list[int]] = []  # the numbers of those lit
        self.gaps: list[list[Gap]] = []
        for step in steps:
            on = step.on or on
            t = timelines[on]
            self.on.append(t)
            self.boxes.append([i for i, span in enumerate(t.spans) if str(span.action) in step.lit])
            self.gaps.append([*filter(step.idle, gaps(t))])
            lit = {"boxes": self.boxes[-1], "gaps": self.gaps[-1], "timeline": names.index(on)}
            told.append({"says": typeset(step.says), "terms": step.terms.split(), **lit})
        words = {"title": typeset(title), "formula": typeset(formula), "spoken": spoken(formula)}
        super().__init__(shown=words | {"drawing": drawing, "steps": told})

    def lit(self, k: int) -> list[Span]:
        """The boxes that step k lights up."""
        return [self.on[k].spans[i] for i in self.boxes[k]]

    def __repr__(self) -> str:
        lines = [f"{k}. {step.says}" for k, step in enumerate(self.steps, 1)]
        return "\n".join([f"Derivation: {self.title} {spoken(self.formula)}", *lines])

    def _repr_mimebundle_(self, **how: Any) -> Any:
        """The widget, and where it cannot live, every step in one picture."""
        made = super()._repr_mimebundle_(**how)
        assert made is not None
        data, metadata = made
        return {**data, "text/plain": repr(self), "image/png": self.still()}, metadata

    def still(self) -> bytes:
        """A PNG of all steps, one below the other."""
        count, devices = len(self.steps), self.on[0].schedule.devices
        end = max(t.makespan for t in self.on)
        figure = Figure(figsize=(8, count * (0.45 + 0.17 * devices) + 0.8), layout="constrained")
        figure.suptitle(f"{self.title}\n{spoken(self.formula)}", fontsize=9, parse_math=False)
        grid = figure.subplots(count, 1, sharex=True, squeeze=False)[:, 0]
        for k, (ax, step, t) in enumerate(zip(grid, self.steps, self.on, strict=True)):
            style.title(ax, fill(f"{k + 1}. {step.says}", 105))
            plain, s = not self.boxes[k] + self.gaps[k], t.schedule
            for i, span in enumerate(t.spans):
                action, lit = span.action, i in self.boxes[k]
                colour = palette.colour_of(action.kind, action.stage, s.devices, s.stages)
                faint = colour if plain or lit else style.lighter(colour, 0.8)
                number = str(action.microbatch) if lit and span.end - span.start > end / 80 else ""
                edge = "black" if lit else "white"
                look = {"lw": 0.5, "text": number, "size": 5, "zorder": 1 + lit}
                bar(ax, span.device, span.start, span.end, faint, edge, **look)
            for gap in self.gaps[k]:
                bar(ax, *gap, style.YELLOW, lw=0)
            style.lanes(ax, range(devices), [f"device {d}" for d in range(devices)], 7)
            ax.set(xlim=(0, end), ylim=(devices - 0.4, -0.6))
            ax.tick_params(labelsize=7)
        file = io.BytesIO()
        figure.savefig(file, dpi=100, metadata={"Software": None})
        return file.getvalue()


# ---- formulas


def typeset(text: str) -> str:
    """A formula or a sentence as HTML.

    >>> typeset("{work: m (F + B)} < [p | 2]")[:50]
    '<span data-term="work"><i>m</i> (<i>F</i> + <i>B</'
    """
    text = html.escape(text, quote=False).replace(" - ", " − ")
    text = re.sub(r"(?<!')\b([B-Zb-z])(?:_(\w))?\b", _variable, text)
    text = re.sub(r"\{(\w+): ", r'<span data-term="\1">', text).replace("}", "</span>")
    fraction = r'<span class="over"><span>\1</span><span>\2</span></span>'
    return re.sub(r"\[(.*?) \| (.*?)\]", fraction, text)


def _variable(found: re.Match[str]) -> str:
    letter, index = found.groups()
    return f"<i>{letter}</i>{f'<sub>{index}</sub>' if index else ''}"


def spoken(formula: str) -> str:
    """A formula in one line, for a screen reader."""
    return re.sub(r"\[(.*?) \| (.*?)\]", r"(\1) / (\2)", re.sub(r"\{\w+: |\}", "", formula))
