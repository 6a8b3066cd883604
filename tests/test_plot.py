"""The data behind the pictures."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb

from pipelab import Costs, Kind, make, memory, plot, simulate
from pipelab.plot import style
from pipelab.plot.timeline import colour_of


def boxes(ax):
    (collection,) = (c for c in ax.collections if isinstance(c, PolyCollection))
    corners = [path.vertices[:4] for path in collection.get_paths()]
    return collection, [(v[:, 0].min(), v[:, 0].max(), v[:, 1].mean()) for v in corners]


@pytest.mark.parametrize("name", ["gpipe", "pipedream_flush"])
def test_every_action_is_a_box_at_its_time_in_its_lane(name):
    t = simulate(make(name, 4, 8), Costs(update=1))
    collection, found = boxes(plot.timeline(t))
    assert np.allclose(found, np.column_stack([t.start, t.end, t.device]))
    colours = [tuple(c[:3]) for c in collection.get_facecolors()]
    assert colours == [to_rgb(style.KINDS[Kind(k)]) for k in t.kind]


def test_numbers_title_and_legend():
    t = simulate(make("gpipe", 4, 8))
    ax = plot.timeline(t)
    assert sorted(text.get_text() for text in ax.texts) == sorted(str(k) for k in range(8) for _ in range(8))
    assert ax.get_title(loc="left") == "gpipe, simulated: idle 27.3% of total time, 37.5% over ideal"
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["forward", "backward", "update", "idle"]
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

    shades = [colour_of(Kind.F, s, 2, 8) for s in range(8)]
    assert shades[0] == shades[1] == to_rgb(style.BLUE)
    assert all(light(a) < light(b) for a, b in zip(shades[::2], shades[2::2], strict=False))
    assert abs(light(style.KINDS[Kind.F]) - light(style.KINDS[Kind.B])) > 0.05


def test_several_timelines_share_an_axis():
    a, b = simulate(make("gpipe", 2, 2)), simulate(make("inter_layer", 2, 2))
    ax = plot.timelines({"predicted": a, "measured": b})
    first, second = (c for c in ax.collections if isinstance(c, PolyCollection))
    lanes = [{round(path.vertices[:4, 1].mean()) for path in c.get_paths()} for c in (first, second)]
    assert lanes == [{0, 1}, {3, 4}]
    assert ax.get_xlim()[1] >= b.makespan
    assert {"predicted", "measured"} <= {text.get_text() for text in ax.texts}


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
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["weights", "gradients", "activations"]
    bars = plot.peaks({"gpipe": m}).patches
    assert sum(bar.get_height() for bar in bars if bar.get_x() < 0.5) == pytest.approx(6)


def test_the_bubble_plot_names_its_definition_and_overlays_the_closed_form():
    ax = plot.bubble(["gpipe", "interleaved"], range(1, 9), definition="over_ideal")
    assert ax.get_ylabel() == "makespan over the ideal, minus 1"
    dots, line = ax.lines[0], ax.lines[1]
    assert np.allclose(dots.get_ydata(), [3 / m for m in range(1, 9)])
    assert np.allclose(line.get_ydata(), dots.get_ydata())
    assert list(ax.lines[3].get_xdata()) == [4, 8]  # where p divides m
    with pytest.raises(ValueError, match="definition='x': use one of of_total, over_ideal, of_span"):
        plot.bubble(["gpipe"], [1], definition="x")
    with pytest.raises(ValueError, match="over='m': use one of microbatches, devices, virtual"):
        plot.bubble(["gpipe"], [1], over="m")


def test_losses():
    ax = plot.losses({"ours": [3, 2, 1], "theirs": [3, 2]})
    assert [line.get_label() for line in ax.lines] == ["ours", "theirs"]
    assert list(ax.lines[0].get_ydata()) == [3, 2, 1]


def test_colours_by_the_version_that_is_read():
    t = simulate(make("pipedream", 3, 6))
    ax = plot.timeline(t, by_version=True)
    collection, _ = boxes(ax)
    colours = {tuple(c[:3]): set() for c in collection.get_facecolors()}
    for c, k, v in zip(collection.get_facecolors(), t.kind, t.version, strict=True):
        colours[tuple(c[:3])].add((int(k), int(v)) if k != Kind.U else int(k))
    assert all(len(meaning) == 1 for meaning in colours.values())
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [f"version {v}" for v in range(6)]
