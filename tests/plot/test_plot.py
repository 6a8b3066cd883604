"""The data behind the pictures."""

from dataclasses import replace
from itertools import combinations

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb

from animation import animation, state
from files import Writer, contents, milliseconds
from pipelab import SCHEDULES, THEORY, Costs, Kind, make, memory, plot, simulate
from pipelab.optimize.cut import Layer, Profile, plots, split_layers
from pipelab.plot import style
from pipelab.plot.timeline import LANE


def boxes(ax):
    (collection,) = (c for c in ax.collections if isinstance(c, PolyCollection))
    corners = [path.vertices[:4] for path in collection.get_paths()]
    return collection, [(v[:, 0].min(), v[:, 0].max(), v[:, 1].mean()) for v in corners]


@pytest.mark.parametrize("name", ["gpipe", "pipedream_flush"])
def test_every_action_is_a_box_at_its_time_in_its_lane(name):
    t = simulate(make(name, 4, 8), Costs(update=1))
    collection, found = boxes(plot.timeline(t))
    assert np.allclose(found, np.column_stack([t.start, t.end, t.schedule.device_of]))
    colours = [tuple(c[:3]) for c in collection.get_facecolors()]
    assert colours == [to_rgb(style.KINDS[a.kind]) for a in t.schedule.actions]


def test_two_actions_that_overlap_have_half_a_lane_each_the_first_above():
    schedule = make("pipedream_flush", 2, 4).overlap()
    _, found = boxes(plot.timeline(simulate(schedule)))
    half = LANE / 4
    for i in schedule.joined:
        (*_, first), (*_, second) = found[i - 1 : i + 1]
        device = schedule.device_of[i]
        assert (first, second) == pytest.approx((device - half, device + half))
    assert schedule.joined


def test_numbers_title_and_legend():
    t = simulate(make("gpipe", 4, 8))
    ax = plot.timeline(t)
    assert sorted(text.get_text() for text in ax.texts) == sorted(
        str(k) for k in range(8) for _ in range(8)
    )
    assert ax.get_title(loc="left") == "gpipe, simulated: idle 27.3% of total time"
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "forward",
        "backward",
        "update",
        "idle",
    ]
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"device {d}" for d in range(4)]


def test_numbers_of_a_kind_are_all_there_or_none():
    for p, m in ((4, 8), (8, 32), (16, 128)):
        t = simulate(make("pipedream_flush", p, m))
        shown = {}
        for text in plot.timeline(t).texts:
            shown.setdefault(text.get_color(), []).append(text.get_text())
        assert all(len(texts) == p * m for texts in shown.values())


def test_chunks_differ_in_shade_and_kinds_in_lightness():
    def light(colour):
        return np.dot(to_rgb(colour), (0.2126, 0.7152, 0.0722))

    shades = [style.colour_of(Kind.F, s, 2, 8) for s in range(8)]
    assert shades[0] == shades[1] == to_rgb(style.BLUE)
    assert all(light(a) < light(b) for a, b in zip(shades[::2], shades[2::2], strict=False))
    assert abs(light(style.KINDS[Kind.F]) - light(style.KINDS[Kind.B])) > 0.05


def test_several_timelines_share_an_axis():
    a, b = simulate(make("gpipe", 2, 2)), simulate(make("inter_layer", 2, 2))
    ax = plot.timelines({"predicted": a, "measured": b})
    first, second = (c for c in ax.collections if isinstance(c, PolyCollection))
    lanes = [
        {round(path.vertices[:4, 1].mean()) for path in c.get_paths()} for c in (first, second)
    ]
    assert lanes == [{0, 1}, {3, 4}]
    assert ax.get_xlim()[1] >= b.makespan
    assert {"predicted", "measured"} <= {text.get_text() for text in ax.texts}


def test_one_micro_batch_is_lit():
    t = simulate(make("gpipe", 2, 3))
    ax = plot.timelines({"a": t}, lit=1)
    assert [text.get_text() for text in ax.texts] == ["a", *"1111"]
    collection, _ = boxes(ax)
    grey = [a.microbatch != 1 and a.kind is not Kind.U for a in t.schedule.actions]
    unlit = to_rgb("#d4d4d4")
    assert [tuple(c[:3]) == unlit for c in collection.get_facecolors()] == grey


def test_a_given_axes_is_used_and_nothing_is_shown_or_saved(monkeypatch):
    monkeypatch.setattr(plt, "show", lambda: pytest.fail("shown"))
    _, ax = plt.subplots()
    t = simulate(make("gpipe", 2, 2))
    assert plot.timeline(t, ax) is ax
    assert plot.memory(memory(t, Costs(activations=1)), 0, ax) is ax
    assert plot.bubble(["gpipe"], [1, 2], ax=ax) is ax


def test_memory_is_stacked_by_cause():
    costs = Costs(weights=2**20, activations=2**20)
    m = memory(simulate(make("gpipe", 2, 4), costs), costs)
    ax = plot.memory(m, 0)
    assert "peak 6 MiB" in ax.get_title(loc="left")
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [
        "weights",
        "gradients",
        "activations",
    ]
    bars = plot.peaks({"gpipe": m}).patches
    assert sum(bar.get_width() for bar in bars if bar.get_y() < 0) == pytest.approx(6)
    ax = plot.peaks({"one": m, "two": m, "three": m})
    shown = {bar.get_facecolor() for bar in ax.patches if bar.get_width()}
    assert shown == {patch.get_facecolor() for patch in ax.get_legend().legend_handles}


def test_the_bubble_plot_names_its_definition_and_overlays_the_closed_form():
    ax = plot.bubble(["gpipe", "interleaved"], range(1, 9), definition="over_ideal")
    assert ax.get_ylabel() == "makespan over the ideal, minus 1"
    dots, line = ax.lines[0], ax.lines[1]
    assert np.allclose(dots.get_ydata(), [3 / m for m in range(1, 9)])
    assert np.allclose(line.get_ydata()[::8], dots.get_ydata())  # eight steps to a dot
    assert list(ax.lines[3].get_xdata()) == [4, 8]  # where p divides m


def test_a_partition_has_one_colour_for_the_slowest_stages_and_one_for_the_others():
    layers = tuple(Layer("", forward=t) for t in (1, 2, 3, 1))
    for stages, entries in ((2, 4), (1, 2)):  # a single stage: the slowest, and the pace
        found = split_layers(Profile(layers), stages)
        ax = plots.partition(found)
        boxes = [box for box in ax.patches if not box.get_hatch()]
        assert len(boxes) == len(layers)
        assert len({box.get_facecolor() for box in boxes}) == stages
        words = [text.get_text() for text in ax.get_legend().get_texts()]
        assert len(words) == entries and words[-1] == "pace: the slowest stage or link"


def test_losses():
    ax = plot.losses({"ours": [3, 2, 1], "theirs": [3, 2]})
    assert [line.get_label() for line in ax.lines] == ["ours", "theirs"]
    assert list(ax.lines[0].get_ydata()) == [3, 2, 1]


def test_names_are_no_formulas():
    odd = "$^$"  # which matplotlib would not read
    t = simulate(replace(make("gpipe", 2, 2), name=odd))
    layers = Profile((Layer(odd, forward=1), Layer("b", forward=1)))
    cut = split_layers(layers, 2)
    drawn = (
        lambda: plot.timeline(t),
        lambda: plot.timelines({odd: t}),
        lambda: plot.losses({odd: [1, 2]}),
        lambda: plot.versions(t, 0),
        lambda: plots.partition({odd: cut}),
        lambda: plots.profile(layers),
    )
    for draw in drawn:
        draw().figure.canvas.draw()


def test_colours_by_the_version_that_is_read():
    t = simulate(make("pipedream", 3, 6))
    ax = plot.timeline(t, by_version=True)
    collection, _ = boxes(ax)
    colours = {tuple(c[:3]): set() for c in collection.get_facecolors()}
    for c, span in zip(collection.get_facecolors(), t.spans, strict=True):
        read = span.version if span.action.kind is not Kind.U else "update"
        colours[tuple(c[:3])].add(read)
    assert all(len(meaning) == 1 for meaning in colours.values())
    legend = [f"version {v}" for v in range(6)] + ["update"]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == legend
    names = [f"{k.name}{i}" for _, k, i in t.schedule.actions if k <= Kind.W]
    assert sorted(text.get_text() for text in ax.texts) == sorted(names)


def test_colours_that_come_round_again_have_one_entry_in_the_legend():
    ax = plot.timeline(simulate(make("pipedream", 2, 9)), by_version=True)
    handles = ax.get_legend().legend_handles
    words = [text.get_text() for text in ax.get_legend().get_texts()]
    assert words[:3] == ["version 0, 7", "version 1, 8", "version 2"]
    assert len({patch.get_facecolor() for patch in handles[:-1]}) == len(words) - 1 == 7


def test_updates_are_visible_whether_or_not_they_take_time():
    for update, marks in ((0, 4), (0.001, 4), (1, 0)):
        ax = plot.timeline(simulate(make("gpipe", 4, 8), Costs(update=update)))
        assert len(ax.lines) == marks
        assert all(line.get_linewidth() >= 2 for line in ax.lines)


# ---- animation


class Seen(Writer):
    """Instead of a file: what each frame of an animation shows."""

    def __init__(self):
        super().__init__()
        self.started, self.running, self.words, self.cursor = [], [], [], []

    def grab_frame(self, **options):
        (ax,) = self.fig.axes
        shown = [p for p in ax.patches if p.get_gid() and p.get_visible()]
        self.started.append(sorted(p.get_gid() for p in shown))
        self.running.append(
            sorted(p.get_gid() for p in shown if p.get_edgecolor()[:3] == (0, 0, 0))
        )
        self.words.append([text.get_text() for text in ax.texts if text.get_gid()])
        self.cursor.append(ax.lines[-1].get_xdata()[0])


def seen(t, **options):
    movie, writer = animation(t, **options), Seen()
    movie.save("", writer)
    return list(movie.new_frame_seq()), writer


@pytest.mark.parametrize(
    ("name", "virtual", "update"),
    [("inter_layer", 1, 0), ("gpipe", 1, 1), ("pipedream", 1, 1), ("interleaved", 2, 0)],
)
def test_a_frame_shows_the_actions_that_have_started(name, virtual, update):
    t = simulate(make(name, 3, 3, virtual=virtual), Costs(update=update).split(virtual))
    moments, frames = seen(t, frames=25)
    text = [str(action) for action in t.schedule.actions]
    for moment, started, running in zip(moments, frames.started, frames.running, strict=True):
        assert started == sorted(
            a for a, start in zip(text, t.start, strict=True) if start <= moment
        )
        spans = zip(text, t.start, t.end, strict=True)
        assert running == sorted(a for a, start, end in spans if start <= moment < end)
    assert frames.started[-1] == sorted(text)
    assert frames.running[-1] == []


def test_the_words_beside_a_lane_say_what_its_device_does():
    t = simulate(make("pipedream", 2, 3), Costs(update=1))
    told = {
        moment: [state(t, d, moment) for d in range(2)] for moment in (0, 1.5, 3.5, 4.5, t.makespan)
    }
    assert told == {
        0: [("forward 0, version 0", 1), ("waits", 0)],
        1.5: [("forward 1, version 0", 2), ("forward 0, version 0", 1)],
        3.5: [("waits", 2), ("backward 0, version 0", 1)],
        4.5: [("backward 0, version 0", 2), ("update 0", 0)],
        t.makespan: [("done", 0), ("done", 0)],
    }
    assert state(simulate(make("interleaved", 2, 2, virtual=2)), 0, 2.5) == (
        "forward 0, stage 2",
        3,
    )


def test_in_flight_in_an_animation_is_bounded_by_the_schedules_peak():
    for name in ("gpipe", "pipedream_flush", "interleaved"):
        t = simulate(make(name, 4, 8))
        counts = np.array(
            [
                [state(t, d, moment)[1] for d in range(4)]
                for moment in np.arange(0, t.makespan + 1, 0.25)
            ]
        )
        assert counts.max(axis=0).tolist() == t.peak_in_flight
        assert (counts >= 0).all() and (counts[-1] == 0).all()


def test_an_animation_starts_at_its_own_zero_sweeps_evenly_and_holds_the_end():
    t = simulate(make("gpipe", 2, 2))
    later = [span._replace(start=span.start + 100, end=span.end + 100) for span in t.spans]
    late = replace(t, spans=tuple(later))
    (moments, a), (same, b) = seen(t, frames=40, seconds=8), seen(late, frames=40, seconds=8)
    assert moments == same == a.cursor
    assert a.started == b.started and a.words == b.words
    assert np.allclose(moments, [*np.linspace(0, 9, 30), *[9] * 10])
    movie = animation(t, frames=40, seconds=8)
    assert milliseconds(movie) == 200
    assert len(contents(movie)) > 40


def test_an_animation_takes_axes_and_refuses_nonsense():
    t = simulate(make("gpipe", 2, 2))
    figure, ax = plt.subplots()
    movie, writer = animation(t, ax, frames=4, title="mine"), Seen()
    movie.save("", writer)
    assert writer.fig is figure and len(writer.words) == 4
    assert ax.get_title(loc="left") == "mine"
    with pytest.raises(ValueError, match="frames=1: give at least 2"):
        animation(t, frames=1)
    with pytest.raises(ValueError, match="seconds=0: give a positive number"):
        animation(t, seconds=0)


@pytest.mark.parametrize(
    ("source", "end", "label"), [("simulated", 1, "time"), ("measured", 1e-6, "time (µs)")]
)
def test_a_timeline_in_which_nothing_takes_time_has_an_axis_of_one_unit(source, end, label):
    # Was: a million µs.
    t = replace(simulate(make("gpipe", 2, 2), Costs(0, 0, 0)), source=source)
    ax = plot.timeline(t)
    assert ax.get_xlim() == (0, end)
    assert ax.get_xlabel() == label
    assert ax.xaxis.get_major_formatter()(end) == "1"


def test_the_closed_form_of_slices_is_that_of_as_many_as_are_drawn():
    """Whatever the number of chunks, which other schedules have."""
    for over, values in (("virtual", [1, 2, 4]), ("microbatches", [4, 8])):
        ax = plot.bubble(["seq1f1b"], values, over=over, virtual=3, definition="over_ideal")
        dots, line = (dict(zip(*found.get_data(), strict=True)) for found in ax.lines)
        assert all(np.isclose(line[x], y) for x, y in dots.items())


def test_the_bubble_plot_draws_every_schedule_and_no_closed_form_where_it_does_not_hold():
    ax = plot.bubble(SCHEDULES, [2, 4, 8, 12])
    dots = [line for line in ax.lines if line.get_linestyle() == "None"]
    assert len(dots) == len(SCHEDULES)
    assert len({(line.get_color(), line.get_marker()) for line in dots}) == len(SCHEDULES)
    named = dict(zip(SCHEDULES, dots, strict=True))
    assert np.isnan(named["pipedream_2bw"].get_ydata()[0])  # m < p: there is none
    forms = [line for line in ax.lines if line not in dots]
    assert len(forms) == len(THEORY)
    for line in forms:  # each lies on the dots of its colour
        at = dict(zip(*line.get_data(), strict=True))
        assert any(
            all(np.isclose(at[x], y) for x, y in zip(*dot.get_data(), strict=True) if x in at)
            for dot in dots
            if dot.get_color() == line.get_color()
        )


def test_peaks_and_versions_are_legible_on_32_devices():
    costs = Costs(weights=8, activations=4)
    timeline = simulate(make("pipedream", 32, 64), costs)
    kept = memory(timeline, costs)
    ax = plot.peaks({"one": kept, "two": kept, "three": kept})
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["one", "two", "three"]
    names = [text.get_window_extent() for text in ax.texts if text.get_text()]
    assert len(names) == 3 * 11  # every third device
    assert not any(a.overlaps(b) for a, b in combinations(names, 2))
    ax = plot.versions(timeline)
    assert all(text.get_fontsize() >= 4 for text in ax.texts if text.get_text())
    assert ax.get_figure().get_size_inches()[1] < 12


def test_a_title_stands_above_a_long_legend():
    table = make("dualpipe", 4, 4).overlap().offload()
    ax = plot.timeline(simulate(table, Costs(activations=1, host=1)))
    ax.figure.draw_without_rendering()
    title = ax._left_title
    assert title.get_window_extent().y0 >= ax.get_legend().get_texts()[0].get_window_extent().y1
