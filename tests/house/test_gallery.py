"""The pictures in images/ show what the code draws today, and it draws what the data say."""

import re
from itertools import pairwise
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.animation import FuncAnimation
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.text import Annotation
from PIL import Image

import draw
from animation import animation
from diagrams import layers, max_pool, max_pool_backward, microbatches, pooling
from draw import PICTURES, alt, flush_gaps
from files import contents, digest, save
from pipelab import Costs, Kind, make, plot, simulate
from pipelab.optimize.cut import Layer, Profile, pipedream, plots, split_layers
from pipelab.optimize.cut.vgg16 import vgg16
from pipelab.plot import style
from pipelab.plot.weight_versions import versions_in_buffers

IMAGES = Path(__file__).parents[2] / "images"
SIX = ("inter_layer", "gpipe", "pipedream", "pipedream_2bw", "pipedream_flush", "interleaved")


def stored(path):
    """The alt text and the digest in a file that `save` wrote."""
    with Image.open(path) as image:
        comment = image.info.get("comment", "")
    text = comment.decode() if isinstance(comment, bytes) else comment
    match = re.fullmatch(r"(.*) \[([0-9a-f]{16})\]", text, re.S)
    assert match, f"{path} says nothing about what it shows: draw it with `make images`"
    return match.groups()


def words(ax):
    return [text.get_text() for text in ax.texts if text.get_text()]


def boxes(ax, colour=None):
    """Rectangles as (left, right, middle of the lane)."""
    shown = [
        p
        for p in ax.patches
        if colour is None or np.allclose(p.get_facecolor()[:3], to_rgb(colour))
    ]
    return [(p.get_x(), p.get_x() + p.get_width(), p.get_y() + p.get_height() / 2) for p in shown]


# ---- the files


def test_images_holds_the_pictures_and_their_scripts_and_nothing_else():
    found = {path.name for path in IMAGES.iterdir() if path.name != "__pycache__"}
    assert found == {*PICTURES, "animation.py", "diagrams.py", "draw.py", "files.py"}


@pytest.mark.parametrize("name", PICTURES)
def test_the_stored_picture_is_what_the_code_draws_without_showing_or_saving_it(name, monkeypatch):
    saving = (plt, "show"), (plt, "savefig"), (plt.Figure, "savefig"), (FuncAnimation, "save")
    with monkeypatch.context() as patch:
        for module, function in saving:
            patch.setattr(module, function, lambda *_, **__: pytest.fail("shown or saved"))
        drawn = PICTURES[name]()
    assert isinstance(drawn, plt.Axes | FuncAnimation)
    assert stored(IMAGES / name) == (alt(name), digest(contents(drawn))), (
        f"{name} is stale: make images"
    )


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_small_and_wide_enough_to_read(name):
    assert (IMAGES / name).stat().st_size <= 400_000
    with Image.open(IMAGES / name) as image:
        assert image.format == name.split(".")[1].upper()
        assert 900 <= image.width <= 1300
        assert image.convert("RGB").getpixel((1, 1)) == (255, 255, 255)


@pytest.mark.parametrize("name", [name for name in PICTURES if name.endswith(".gif")])
def test_an_animation_loops_at_a_readable_pace(name):
    with Image.open(IMAGES / name) as image:
        assert image.info["loop"] == 0
        assert 40 <= image.n_frames <= 80
        duration = 0
        for i in range(image.n_frames):
            image.seek(i)
            duration += image.info["duration"]
        assert image.info["duration"] >= 2_000  # the end, to look at
    assert 8_000 <= duration <= 12_000


def test_every_picture_has_an_alt_text_of_its_own():
    texts = [alt(name) for name in PICTURES]
    assert len(set(texts)) == len(texts)
    assert all(40 < len(text) < 160 and text.endswith(".") for text in texts)


def test_the_pictures_that_the_course_needs_are_there():
    assert {f"timeline_{name}.png" for name in SIX} <= set(PICTURES)
    assert {"inter_layer.gif", "gpipe.gif", "pipedream.gif"} == {
        name for name in PICTURES if name.endswith(".gif")
    }


def test_a_picture_of_other_data_has_another_digest():
    def digests(*changes):
        t = simulate(make("gpipe", 2, 3), *changes)
        return digest(contents(plot.timeline(t))), digest(contents(animation(t, frames=8)))

    before = digests()
    assert before == digests()
    for change in (Costs(forward=1.01), Costs(update=0.1), Costs(transfer=0.1)):
        assert not {*before} & {*digests(change)}


def test_a_file_says_what_it_shows(tmp_path):
    for name in ("a.png", "a.gif"):
        t = simulate(make("gpipe", 2, 2))
        drawn = plot.timeline(t) if name == "a.png" else animation(t, frames=4)
        save(drawn, tmp_path / name, "Two µ-batches.")
        assert stored(tmp_path / name) == ("Two µ-batches.", digest(contents(drawn)))
        again = (tmp_path / name).read_bytes()
        save(drawn, tmp_path / name, "Two µ-batches.")
        assert (tmp_path / name).read_bytes() == again
    Image.new("RGB", (2, 2)).save(tmp_path / "plain.png")
    with pytest.raises(
        AssertionError,
        match=r"plain\.png says nothing about what it shows: draw it with `make images`",
    ):
        stored(tmp_path / "plain.png")


def test_main_draws_into_a_folder(tmp_path, monkeypatch):
    few = {name: PICTURES[name] for name in ("timeline_gpipe.png", "gpipe_microbatches.png")}
    monkeypatch.setattr(draw, "PICTURES", few)
    draw.main(tmp_path / "new")
    assert {path.name: stored(path) for path in (tmp_path / "new").iterdir()} == {
        n: stored(IMAGES / n) for n in few
    }


# ---- what the pictures show


@pytest.mark.parametrize("name", SIX)
def test_the_timelines_of_the_schedules(name):
    ax = PICTURES[f"timeline_{name}.png"]()
    batches = 2 if name in ("pipedream", "pipedream_2bw") else 1
    virtual = 2 if name == "interleaved" else 1
    t = simulate(make(name, 4, 8, virtual=virtual, batches=batches), Costs().split(virtual))
    (collection,) = (c for c in ax.collections if isinstance(c, PolyCollection))
    corners = [path.vertices[:4] for path in collection.get_paths()]
    assert np.allclose([v[:, 0].min() for v in corners], t.start)
    assert np.allclose([v[:, 0].max() for v in corners], t.end)
    assert np.allclose([v[:, 1].mean() for v in corners], t.schedule.device_of)
    assert sorted(words(ax)) == sorted(
        str(k) for _, kind, k in t.schedule.actions if kind <= Kind.B
    )


def test_inter_layer_hands_over_once_per_boundary_and_direction():
    ax = PICTURES["inter_layer_turns.png"]()
    arrows = [text for text in ax.texts if isinstance(text, Annotation)]
    assert len(arrows) == 2 * 2 * 3  # batches, directions, boundaries
    for arrow in arrows:
        (arrived, target), (sent, source) = arrow.xy, arrow.get_position()
        assert arrived == sent + 0.5
        assert abs(target - source) == 1


@pytest.mark.parametrize(
    ("counts", "placement", "rows"),
    [([3, 2], None, [0, 0, 0, 1, 1]), ([2, 2, 2, 2], (0, 1, 0, 1), [0, 0, 1, 1, 0, 0, 1, 1])],
)
def test_each_layer_is_a_box_on_its_device(counts, placement, rows):
    ax = layers(counts, placement)
    devices = max(rows) + 1
    drawn = boxes(ax)[devices:]  # after the lanes
    assert [round(lane) for *_, lane in drawn] == rows
    assert [(a + b) / 2 for a, b, _ in drawn] == pytest.approx(range(1, len(rows) + 1))
    assert words(ax) == [f"layer {i + 1}" for i in range(len(rows))]
    arrows = [(text.get_position(), text.xy) for text in ax.texts if isinstance(text, Annotation)]
    crossing = [1 for a, b in arrows if round(a[1]) != round(b[1])]
    assert len(arrows) == 2 * (len(rows) - 1)
    assert len(crossing) == 2 * sum(a != b for a, b in pairwise(rows))


def test_layers_needs_a_device_for_each_stage():
    with pytest.raises(ValueError, match="2 stages, but 3 have a device: give each stage one"):
        layers([1, 2], [0, 1, 0])


def test_the_placements_are_those_of_schedules():
    loop, v, both = PICTURES["placements.png"]().get_figure().axes
    for ax, name in ((loop, "interleaved"), (v, "zb_v")):
        options = {"virtual": 2} if name == "interleaved" else {}
        drawn = [round(lane) for *_, lane in boxes(ax, style.BLUE)]
        assert drawn == list(make(name, 4, 8, **options).placement)
        assert words(ax) == [str(s) for s in range(8)]
    down, up = ([round(lane) for *_, lane in boxes(both, c)] for c in (style.BLUE, style.ORANGE))
    assert down == [0, 1, 2, 3] and up == down[::-1]


def test_the_interleaved_picture_places_the_layers_as_its_schedule_does():
    below = PICTURES["interleaved_chunks.png"]()
    above, same = below.get_figure().axes
    assert same is below
    held = {0: [], 1: []}
    for text in above.texts:
        if not isinstance(text, Annotation):
            held[round(text.get_position()[1])].append(text.get_text())
    assert held == {
        d: [f"layer {i}" for i in layers] for d, layers in ((0, (1, 2, 5, 6)), (1, (3, 4, 7, 8)))
    }
    placement = make("interleaved", 2, 4, virtual=2).placement
    assert [placement[(i - 1) // 2] for i in (1, 2, 5, 6)] == [0] * 4


@pytest.mark.parametrize(("samples", "count", "sizes"), [(16, 4, [4, 4, 4, 4]), (7, 3, [3, 2, 2])])
def test_the_micro_batches_hold_the_mini_batch(samples, count, sizes):
    ax = microbatches(samples, count)
    whole, parts = boxes(ax)[::2], boxes(ax)[1::2]
    assert {lane for *_, lane in whole} == {0.5}
    assert all(b[0] == pytest.approx(a[1]) for a, b in pairwise(whole))
    joints = [i + 1 for i, (a, b) in enumerate(pairwise(parts)) if b[0] > a[1] + 0.1]
    assert np.diff([0, *joints, samples]).tolist() == sizes
    numbers = [int(word) for word in words(ax) if word.isdigit()]
    assert numbers == [i for i in range(samples) for _ in range(2)]
    with pytest.raises(
        ValueError, match="3 micro-batches of 2 samples: a micro-batch needs at least one sample"
    ):
        microbatches(2, 3)


def test_the_versions_written_are_the_versions_read():
    ax = PICTURES["pipedream_versions.png"]()
    s = make("pipedream", 4, 6)
    shown = sorted(word for word in words(ax) if word.startswith("v"))
    assert shown == sorted(
        f"v{s.versions[a.stage, a.microbatch]}" for row in s.rows for a in row if a.kind <= Kind.B
    )


@pytest.mark.parametrize(("name", "p", "m"), [("gpipe", 4, 6), ("pipedream_flush", 3, 8)])
def test_a_flush_costs_every_device_the_same_wait(name, p, m):
    t = simulate(
        make(name, p, m, batches=3), Costs(forward=2, input_grad=1.5, weight_grad=2, update=0.5)
    )
    waits = np.zeros(p)
    for device, a, b in flush_gaps(t):
        waits[device] += b - a
    assert waits == pytest.approx(
        [(p - 1) * (2 + 3.5) * 2] * p
    )  # two flushes between three batches


def test_the_flush_picture_marks_the_gaps():
    ax = PICTURES["pipeline_flush.png"]()
    t = simulate(make("gpipe", 4, 6, batches=2), Costs(update=0.5))
    assert [(round(lane), a, b) for a, b, lane in boxes(ax, style.YELLOW)] == flush_gaps(t)
    assert ax.get_title(loc="left") == "A flush between two batches: every device waits 9 units"


def test_flush_memory_counts_the_micro_batches_in_flight():
    axes = PICTURES["flush_memory.png"]().get_figure().axes
    for name, i in (("gpipe", 0), ("pipedream_flush", 1)):
        t = simulate(make(name, 4, 8))
        for device, ax in enumerate(axes):
            time, level = ax.lines[i].get_data()
            assert level.max() == t.peak_in_flight[device]
            mine = [span for span in t.spans if span.device == device]
            for moment in np.arange(0.5, t.makespan):
                begun = sum(s.action.kind is Kind.F and s.start <= moment for s in mine)
                ended = sum(s.action.kind is Kind.B and s.end <= moment for s in mine)
                drawn = level[time <= moment][-1] if (time <= moment).any() else 0
                assert drawn == begun - ended


# ---- max-pooling against torch


@pytest.mark.parametrize("seed", range(2))
def test_max_pooling_is_torchs(seed):
    rng = np.random.default_rng(seed)
    x, gradient = (
        rng.integers(0, 4, (6, 6)).astype(float),
        rng.normal(size=(3, 3)),
    )  # with equal values in a block
    theirs = torch.tensor(x[None], requires_grad=True)
    y = torch.nn.functional.max_pool2d(theirs, 2)
    y.backward(torch.tensor(gradient[None]))
    out, won = max_pool(x)
    assert (out == y.detach().numpy()[0]).all()
    assert (max_pool_backward(gradient, won) == theirs.grad.numpy()[0]).all()


def test_the_pooling_picture_shows_the_numbers():
    x, gradient = np.arange(16).reshape(4, 4) * 7 % 16, np.array([[1, 2], [3, 4]])
    ax = pooling(x, gradient)
    out, won = max_pool(x)
    numbers = [int(word) for word in words(ax) if word.lstrip("-").isdigit()]
    expected = [x, out, max_pool_backward(gradient, won), gradient]
    assert numbers == [int(value) for part in expected for value in part.flat]
    frames = [p for p in ax.patches if p.get_linewidth() == 2.2]
    assert [(int(p.get_y()), int(p.get_x())) for p in frames[:4]] == list(
        map(tuple, np.argwhere(won))
    )


# ---- partition


def test_vgg16_has_its_known_work():
    work = vgg16().of("forward")
    assert len(work) == 16
    assert sum(work) == pytest.approx(
        15.47, abs=0.005
    )  # billions of multiply-adds, as published for 224 x 224


def test_a_partition_is_a_bar_per_layer_in_its_stages_lane():
    profile = Profile(tuple(Layer(str(t), forward=t) for t in (1, 2, 3, 4)))
    items = {name: split_layers(profile, 2, name) for name in ("uniform", "time")}
    ax = plots.partition(items, scale=1)
    whole = [p for p in ax.patches if not p.get_hatch()]
    assert [p.get_width() for p in whole] == pytest.approx([1, 2, 3, 4] * 2)
    middles = [round(p.get_y() + p.get_height() / 2) for p in whole]
    assert middles == [0, 0, 1, 1, 3, 3, 3, 4]
    assert [p.get_x() for p in whole] == pytest.approx([0, 1, 0, 3, 0, 1, 3, 0])
    assert [line.get_xdata()[0] for line in ax.lines] == [7, 6]
    assert len(ax.patches) == len(whole) + 4  # the idle background of every lane
    assert next(t for t in words(ax) if "idle" in t) == "layers 0 to 1: 3, 57% idle"


def test_shared_layers_take_their_share():
    profile = Profile((Layer("a", forward=6, output=1), Layer("b", forward=2, weights=1e10)))
    ax = plots.partition(pipedream(profile, 4), scale=1)
    assert [p.get_width() for p in ax.patches if not p.get_hatch()] == [2, 2]
    assert "stage 0 x 3" in [label.get_text() for label in ax.get_yticklabels()]


def test_the_workflow_cuts_what_it_profiled():
    profiled, cut, _ = PICTURES["workflow.png"]().figure.axes
    heights = [[bar.get_height() for bar in ax.containers[0]] for ax in (profiled, cut)]
    assert heights[0] == heights[1] == pytest.approx(vgg16().of("time"))
    ends = [round(line.get_xdata()[0] - 0.5) for line in cut.lines]
    sums = [sum(heights[1][a:b]) for a, b in pairwise([0, *ends])]
    assert words(cut) == [f"device {s}\n{seconds:.1f}" for s, seconds in enumerate(sums)]
    assert max(sums) == pytest.approx(split_layers(vgg16(), 4, "time").bottleneck)


def test_balanced_times_beat_equal_counts_in_the_picture():
    names = [word for word in words(PICTURES["partition.png"]()) if "take" in word]
    equal, balanced = (float(name.split()[-1]) for name in names)
    assert balanced < equal


# ---- weight versions in buffers


@pytest.mark.parametrize(
    ("name", "p", "m"),
    [("pipedream", 4, 8), ("pipedream_2bw", 3, 5), ("gpipe", 2, 2)],
)
def test_buffers_hold_each_version_while_it_is_read(name, p, m):
    t = simulate(make(name, p, m, batches=3), Costs(update=0.5))
    for stage in range(p):
        kept = versions_in_buffers(t, stage)
        assert len({place for place, *_ in kept}) == t.weight_versions[stage]
        for place in range(t.weight_versions[stage]):
            spans = [(a, b) for q, _, a, b in kept if q == place]
            assert all(b <= following for (_, b), (following, _) in pairwise(spans))
        life = {version: (a, b) for _, version, a, b in kept}
        for span in t.spans:
            if span.action.stage == stage and span.action.kind <= Kind.B:
                a, b = life[span.version]
                assert a <= span.start and span.end <= b


def test_the_gradients_of_2bw_gather_to_an_update():
    t = simulate(make("pipedream_2bw", 4, 4, batches=3), Costs(update=1))
    ax = plot.versions(t)
    steps = [p for p in ax.patches if round(p.get_y() + p.get_height(), 2) == 3.43]
    heights = [round(p.get_height() / 0.86 * 4) for p in steps]
    assert heights == [1, 2, 3, 4] * 3
    mine = [span for span in t.spans if span.action.stage == 0]
    ends = [span.end for span in mine if span.action.kind is Kind.B]
    assert [p.get_x() for p in steps] == pytest.approx(ends)
    taken = [p.get_x() + p.get_width() for p in steps[3::4]]
    assert taken == pytest.approx([span.end for span in mine if span.action.kind is Kind.U])
    assert [word for word in words(ax) if word.startswith("version")] == [
        "version 0",
        "version 1",
        "version 2",
    ]
    assert [label.get_text() for label in ax.get_yticklabels()] == [
        "actions",
        "buffer 0",
        "buffer 1",
        "gradients",
    ]
