"""Weight versions over time: the buffer that holds each, and the gradients for the next one."""

from itertools import pairwise

from matplotlib.axes import Axes

from pipelab.plot import style
from pipelab.plot.style import Colour
from pipelab.plot.timeline import LANE, bar, idle, points_per_unit, spans
from pipelab.predict.timeline import Timeline
from pipelab.show.units import plural
from pipelab.table.action import Kind

LEGIBLE = 4.0  # points


def versions_in_buffers(t: Timeline, stage: int = 0) -> list[tuple[int, int, float, float]]:
    """Where a stage keeps its weight versions: (buffer, version, from, to).

    Times count from the timeline's own zero. A version takes the buffer that has been free longest
    when its update ends, and frees it when its last reader ends.

    >>> from pipelab import Costs, make, simulate
    >>> versions_in_buffers(simulate(make("pipedream_2bw", 2, 2, batches=3), Costs(update=1)))
    [(0, 0, 0.0, 16.0), (1, 1, 10.0, 23.0), (0, 2, 17.0, 24.0), (1, 3, 24.0, 24.0)]
    """
    end = [span.end for span in spans(t)]
    kept = []
    free: list[float] = []  # when each buffer is
    for life in t.schedule.lives:
        if life.stage != stage:
            continue
        born = end[life.born] if life.born >= 0 else 0.0
        dies = end[max(life.last, life.born)]
        place = free.index(min(free)) if free and min(free) <= born else len(free)
        free[place : place + 1] = [dies]
        kept.append((place, life.version, born, dies))
    return kept


def versions(t: Timeline, stage: int = 0, ax: Axes | None = None) -> Axes:
    """The weight versions that a stage keeps over time, between its actions and its gradients.

    An action has the colour and the number (v) of the version that it reads. Gradients accumulate
    for the next version: each backward adds a step, and an update takes them all.
    """
    s, kept = t.schedule, versions_in_buffers(t, stage)
    count = 1 + max(place for place, *_ in kept)
    # If there are many lanes, each has half the height.
    ax = style.axes(ax, height=1.1 + (0.55 if count <= 12 else 0.28) * (count + 2))
    ax.set_xlim(0, t.makespan * 1.002)
    mine = [span for span in spans(t) if span.action.stage == stage]

    # The first lane: actions, with names small enough for the narrowest.
    idle(ax, 0, t.makespan)
    narrowest = min(span.end - span.start for span in mine if span.action.kind <= Kind.W)
    unit = points_per_unit(ax)
    size = min(8.0, narrowest * unit / (0.68 * len(f"F{s.total - 1}")))
    for span in mine:
        kind = span.action.kind
        colour: Colour = style.GREY
        text = kind.name
        if kind <= Kind.W:
            colour = style.version_colour(span.version)
            text += f"{span.action.microbatch}\nv{span.version}"
        if size < LEGIBLE:
            text = ""
        bar(ax, 0, span.start, span.end, colour, text=text, size=size, lw=0.8)

    # A lane per buffer.
    for place, version, born, dies in kept:
        if dies > born:
            colour = style.version_colour(version)
            # The name if there is room for it, else the number, else nothing.
            room = (dies - born) * unit / (0.68 * 8)
            names = (name for name in (f"version {version}", str(version), "") if len(name) <= room)
            bar(ax, 1 + place, born, dies, colour, text=next(names), lw=0.8)

    # The last lane: gradients accumulate over an update group's backwards, until its update.
    floor = count + 1 + LANE / 2
    ended: list[float] = []  # the backwards of the group
    for span in mine:
        if span.action.kind in (Kind.B, Kind.W):
            ended.append(span.end)
        if span.action.kind is Kind.U:
            for step, (a, b) in enumerate(pairwise([*ended, span.end]), 1):
                height = LANE * step / s.per_update
                style.box(ax, (a, floor - height), b - a, height, "#d4d4d4", lw=0.8)
                if (b - a) * unit >= LEGIBLE * len(str(step)):
                    style.label(ax, (a + b) / 2, floor - 0.06, str(step), 8, va="bottom")
            ended = []

    ax.set_ylim(count + 1.6, -0.55)
    style.lanes(
        ax, range(count + 2), ["actions", *(f"buffer {i}" for i in range(count)), "gradients"]
    )
    ax.set_xlabel("time")
    words = f"{plural(count, 'weight version')}, an update every {s.per_update} micro-batches"
    style.title(ax, f"{s.name}, stage {stage}: {words}")
    return ax
