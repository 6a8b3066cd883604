"""The explorer without a browser: settings go in, what is drawn comes out."""

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from pipelab import CostError, Costs, Recompute, ScheduleError, make, memory, simulate
from pipelab.optimize.bounds import gap
from pipelab.schedules import SCHEDULES
from pipelab.widgets import Explorer
from pipelab.widgets.drawing import BOTH
from pipelab.widgets.explorer import BYTES, COSTS, LARGEST, SECONDS


def columns(explorer, index=0):
    """The columns of a drawn timeline, by name."""
    t = explorer.drawing["timelines"][index]
    rows = np.frombuffer(base64.b64decode(t["data"]), "<f4").reshape(len(t["columns"]), -1)
    return dict(zip(t["columns"], rows, strict=True))


def tell(explorer, **changes):
    """What the browser does when a control is moved."""
    explorer.settings = {**explorer.settings, **changes}


def numbers(explorer, column=2):
    return {row[0]: row[column] for row in explorer.drawing["numbers"]}


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_the_drawing_is_the_simulation(name):
    costs = Costs(forward=[1, 2, 1, 1], transfer=0.5, update=0.25)
    explorer = Explorer(name, 4, 4, virtual=2, batches=2, costs=costs)
    t, drawn = explorer.timeline, columns(explorer)
    assert t.schedule.name == name
    assert explorer.drawing["timelines"][0]["bounds"] == t.schedule.bounds
    assert drawn["start"] == pytest.approx(t.start) and drawn["end"] == pytest.approx(t.end)
    assert (drawn["version"] == [span.version for span in t.spans]).all()
    for number, key in enumerate(("stage", "kind", "microbatch")):
        assert (drawn[key] == [action[number] for action in t.schedule.actions]).all()
    for key, around in (("source", t.schedule.inputs), ("taker", t.schedule.takers)):
        assert (drawn[key] == [-1 if i is None else i for i in around]).all()


def test_the_gap_is_the_one_to_the_proven_bound():
    costs = Costs(forward=[1, 2, 1, 1], transfer=0.5)
    explorer = Explorer("gpipe", 4, 8, batches=2, costs=costs, compare="zb_h1")
    for column, name in ((2, "gpipe"), (3, "zb_h1")):
        least = gap(make(name, 4, 8, batches=2), costs)
        assert numbers(explorer, column)["over the bound"] == f"{least:.1%}"


def test_a_table_is_kept_while_costs_change_and_a_searched_one_is_made_anew():
    explorer = Explorer("gpipe", 4, 8, compare="zb")
    shown, searched = explorer.timeline.schedule, explorer.compared.schedule
    explorer.set(transfer=0.5)
    assert explorer.timeline.schedule is shown
    assert explorer.compared.schedule is not searched
    assert explorer.timeline.makespan == simulate(shown, Costs(transfer=0.5)).makespan


@pytest.mark.parametrize("transfer", [0, 0.5])
@pytest.mark.parametrize("name", ["gpipe", "pipedream_flush", "interleaved", "pipedream"])
def test_an_action_starts_when_what_it_waited_for_is_done(name, transfer):
    explorer = Explorer(name, 4, 8, virtual=2, costs=Costs(transfer=transfer))
    t, drawn = explorer.timeline, columns(explorer)
    causes = set()
    for i, cause in enumerate(drawn["cause"].astype(int)):
        first = i in t.schedule.bounds
        done = 0 if first else t.end[i - 1]
        source = -1 if t.schedule.inputs[i] is None else t.schedule.inputs[i]
        there = drawn["there"][i]
        assert (there == -1) == (source == -1)
        if cause == BOTH:
            assert t.start[i] == pytest.approx(there) and t.start[i] == pytest.approx(done)
        elif cause == -1:
            assert first and source == -1 and t.start[i] == 0
        elif cause == source:
            assert t.start[i] == pytest.approx(there) and there > done
        else:
            assert (
                cause == i - 1 and not first and t.start[i] == pytest.approx(done) and there < done
            )
        causes.add("both" if cause == BOTH else "input" if cause == source else "row")
    assert causes == {"both", "input", "row"} if transfer == 0 else causes >= {"input", "row"}


def test_a_moved_control_changes_the_picture():
    explorer = Explorer("gpipe", 4, 8)
    before = explorer.drawing
    tell(explorer, microbatches=16)
    assert explorer.timeline.makespan == simulate(make("gpipe", 4, 16)).makespan == 57
    assert explorer.drawing != before and len(columns(explorer)["start"]) == 4 * (2 * 16 + 1)
    tell(explorer, forward="2, 1, 1, 1", transfer="0.5", recompute="always")
    costs = Costs(forward=[2, 1, 1, 1], transfer=0.5, recompute=Recompute.ALWAYS)
    assert explorer.timeline.makespan == simulate(make("gpipe", 4, 16), costs).makespan
    assert explorer.error == ""


def test_more_chunks_are_the_same_model():
    explorer = Explorer("interleaved", 4, 8)
    base = numbers(explorer)
    peak = [sum(explorer.timeline.busy)]
    for v in (2, 4):
        tell(explorer, virtual=v)
        now = numbers(explorer)
        assert explorer.timeline.schedule.stages == 4 * v
        assert now["ideal"] == base["ideal"] and now["weights"] == base["weights"]
        assert float(now["makespan"]) < float(base["makespan"])
        peak.append(sum(explorer.timeline.busy))
    assert peak == pytest.approx([peak[0]] * 3)


def test_memory_counts_where_a_schedule_is_made_for_a_limit():
    explorer = Explorer("zb", 4, 8, memory=2, compare="gpipe")
    assert explorer.settings["memory"] == "2"
    assert explorer.timeline.peak_in_flight == make("zb", 4, 8, memory=2).peak_in_flight
    assert explorer.compared.peak_in_flight == [8] * 4
    tell(explorer, memory="2.5", compare="zb_v", weight_grad="0.5")
    for shown in (explorer.timeline, explorer.compared):
        own = Costs(weight_grad=0.5).over(shown.schedule.placement)
        name = shown.schedule.name
        assert shown.schedule == make(name, 4, 8, costs=own, memory=2.5), name
    tell(explorer, memory="", weight_grad="1")
    assert explorer.timeline.schedule == make("zb", 4, 8)
    explorer.set(memory=np.inf)
    assert explorer.settings["memory"] == "inf"
    assert explorer.timeline.schedule == make("zb", 4, 8, memory=np.inf)
    explorer.set(memory=None)
    assert explorer.settings["memory"] == ""
    assert explorer.compared.schedule == make("zb_v", 4, 8)


def test_a_comparison_is_of_one_model_on_one_axis():
    explorer = Explorer("gpipe", 4, 8, virtual=2, compare="interleaved")
    first, second = explorer.timeline, explorer.compared
    assert (first.schedule.stages, second.schedule.stages) == (4, 8)
    assert first.busy == pytest.approx(second.busy)
    assert explorer.drawing["end"] == max(first.makespan, second.makespan) == 33
    assert [t["name"] for t in explorer.drawing["timelines"]] == ["gpipe", "interleaved"]
    assert columns(explorer, 1)["end"] == pytest.approx(second.end)
    assert (numbers(explorer)["makespan"], numbers(explorer, 3)["makespan"]) == ("33", "28.5")
    tell(explorer, compare="")
    assert explorer.compared is None and len(explorer.drawing["timelines"]) == 1


def test_the_numbers_are_the_timelines_and_the_memorys():
    explorer = Explorer("pipedream", 4, 8)
    t, shown = explorer.timeline, numbers(explorer)
    m = memory(t, COSTS)
    assert shown["makespan"] == f"{t.makespan:.5g}" and shown["ideal"] == f"{t.ideal:.5g}"
    shares = f"{t.bubble.of_total:.1%} ({t.bubble.over_ideal:.1%})"
    assert shown["bubble (over ideal)"] == shares
    assert shown["peak in flight"] == shown["weight versions"] == "4 3 2 1"
    assert shown["peak memory"] == f"{m.peak()[0]:.4g} on device 0"
    for cause, value in m.at_peak(0).items():
        assert shown.get(f"{cause}", "0") == f"{value:.4g}"
    assert explorer.drawing["timelines"][0]["peaks"] == [f"{x:.4g}" for x in m.peak()]


def test_sizes_of_memory_have_units():
    shown = numbers(Explorer(costs=Costs(weights=2**30, activations=3 * 2**20)))
    assert shown["weights"] == "1 GiB" and shown["activations"] == "24 MiB"


def test_memory_strips_reach_the_peak():
    explorer = Explorer("pipedream_2bw", 4, 8, batches=2)
    t, m = explorer.drawing["timelines"][0], memory(explorer.timeline, COSTS)
    rows = np.frombuffer(base64.b64decode(t["steps"]), "<f4").reshape(
        1 + len(explorer.drawing["causes"]), -1
    )
    for d in range(4):
        time, *tops = rows[:, t["step_bounds"][d] : t["step_bounds"][d + 1]]
        assert (np.diff(time) > 0).all() and (np.diff(tops, axis=0) >= 0).all()
        assert tops[-1].max() == pytest.approx(m.peak()[d])
    assert explorer.drawing["memory"] == max(m.peak())
    tell(explorer, **dict.fromkeys(set(BYTES) - {"host"}, "0"))
    assert explorer.drawing["memory"] == 0 and explorer.drawing["causes"] == []


BAD = [
    ({"devices": 0}, "devices=0: give a whole number of at least 1"),
    ({"microbatches": None}, "microbatches=None: give a whole number of at least 1"),
    ({"batches": 1.5}, "batches=1.5: give a whole number"),
    ({"schedule": "pipedream_2bw", "microbatches": 2}, "pipedream_2bw"),
    ({"schedule": "zigzag"}, "unknown schedule 'zigzag'"),
    ({"compare": "zigzag"}, "unknown schedule 'zigzag'"),
    ({"forward": "1, 2"}, "forward has 2 values for 4 stages: give one number, or 4"),
    ({"forward": "fast"}, "forward='fast': give one number"),
    ({"forward": "1, 1, 1e308, 1"}, "forward=1e+308: the explorer draws numbers up to 1e+15"),
    ({"weights": "nan"}, "weights=nan: give numbers of at least 0"),
    ({"transfer": "-1"}, "transfer=-1.0: give numbers of at least 0"),
    ({"recompute": "sometimes"}, "recompute='sometimes': use one of never, except_last, always"),
    ({"devices": 1000, "microbatches": 1000}, f"the explorer draws at most {LARGEST:,}"),
    (
        {"schedule": "zb", "memory": "0.5"},
        "memory=0.5: zb finds no order for 4 devices; give at least 1",
    ),
    ({"compare": "zb_v", "memory": "nan"}, "memory=nan: zb_v finds no order for 4 devices"),
    (
        {"memory": "2, 3"},
        "memory='2, 3': give one number, or leave it empty for as many as there are devices",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_bad_settings_say_why_and_keep_the_picture(changes, message):
    """`set` raises; where they come from the form, the widget says it."""
    explorer = Explorer("gpipe", 4, 8)
    settings, drawing, timeline = explorer.settings, explorer.drawing, explorer.timeline
    with pytest.raises(ValueError) as caught:
        explorer.set(**changes)
    assert message in str(caught.value)
    assert (explorer.settings, explorer.drawing, explorer.error) == (settings, drawing, "")
    tell(explorer, **changes)
    assert message in explorer.error and "\n" not in explorer.error
    assert explorer.drawing == drawing and explorer.timeline is timeline
    tell(explorer, **Explorer("gpipe", 4, 9).settings)
    assert explorer.error == "" and explorer.timeline.schedule.microbatches == 9


def test_set_changes_what_the_form_shows():
    explorer = Explorer()
    explorer.set(
        schedule="interleaved",
        virtual=2,
        forward=[1, 1, 2, 1],
        weights=1.5,
        recompute=Recompute.EXCEPT_LAST,
    )
    assert explorer.settings["forward"] == "1, 1, 2, 1" and explorer.settings["weights"] == "1.5"
    assert explorer.settings["recompute"] == "except_last"
    assert explorer.timeline.schedule.stages == 8
    tell(explorer, virtual=0)
    explorer.set(virtual=1)
    assert explorer.error == ""
    with pytest.raises(TypeError, match="speed is not a setting: there are schedule, compare"):
        explorer.set(speed=2)


def test_bad_arguments_raise():
    with pytest.raises(ScheduleError, match="devices=0"):
        Explorer("gpipe", devices=0)
    with pytest.raises(CostError, match="forward has 3 values for 4 stages"):
        Explorer(costs=Costs(forward=[1, 2, 3]))


def test_costs_that_are_not_in_the_form_are_kept():
    explorer = Explorer("gpipe", 2, 4, costs=Costs(speed=2, overhead=1))
    tell(explorer, forward="2")
    assert (
        explorer.timeline.makespan
        == simulate(make("gpipe", 2, 4), Costs(forward=2, speed=2, overhead=1)).makespan
    )
    assert set(explorer.settings) >= {*SECONDS, *BYTES, "recompute"}


def test_the_form_offers_what_can_be_built():
    choices = Explorer().choices
    assert set(choices["schedules"]) == set(SCHEDULES)
    assert "interleaved" in choices["chunks"] and "zb" in choices["limited"]
    assert set(choices["chunks"]) == set(SCHEDULES) - refusing(virtual=2)
    assert set(choices["limited"]) == set(SCHEDULES) - refusing(memory=4)
    assert choices["recompute"] == ["never", "except_last", "always"]


def refusing(**option):
    """Schedules that refuse an option of `make`."""
    names = set()
    for name in SCHEDULES:
        try:
            make(name, 4, 8, **option)
        except ScheduleError:
            names.add(name)
    return names


def test_a_large_table_stays_small_to_send():
    explorer = Explorer("pipedream_flush", 32, 256)
    assert len(columns(explorer)["start"]) == 32 * 513
    assert len(json.dumps(explorer.drawing, allow_nan=False)) < 2_000_000


def test_the_largest_costs_are_finite_in_the_browser():
    explorer = Explorer("interleaved", 4, 8, virtual=2)
    tell(explorer, **dict.fromkeys(SECONDS + BYTES, "1e15"))
    assert explorer.error == ""
    assert all(np.isfinite(column).all() for column in columns(explorer).values())
    json.dumps(explorer.drawing, allow_nan=False)


@pytest.mark.parametrize("sizes", [(1, 1), (1, 3), (3, 1)])
def test_the_smallest_tables_and_no_costs_at_all_have_finite_numbers(sizes):
    for costs in (None, Costs(0, 0, 0)):
        explorer = Explorer("pipedream_flush", *sizes, costs=costs, compare="inter_layer")
        json.dumps(explorer.drawing, allow_nan=False)


def test_a_closed_notebook_shows_a_helpful_line():
    explorer = Explorer("inter_layer", devices=4, microbatches=2)
    line = "Explorer of inter_layer, p=4, m=2: makespan 24; run this cell to change it"
    assert repr(explorer) == line
    assert explorer._repr_mimebundle_()[0]["text/plain"] == line
    explorer.set(compare="gpipe", microbatches=8)
    assert (
        repr(explorer)
        == "Explorer of inter_layer and gpipe, p=4, m=8: makespan 96; run this cell to change it"
    )


def test_a_saved_notebook_has_all_that_is_drawn():
    state = Explorer().get_state()
    assert {"choices", "settings", "drawing", "error", "_esm", "_css"} <= set(state)
    json.dumps({key: state[key] for key in ("choices", "settings", "drawing", "error")})
    assert "export default" in state["_esm"] and ".pipelab-explorer" in state["_css"]


def test_the_view_is_package_data():
    import tomllib

    root = Path(__file__).parents[2]
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    packaged = settings["package-data"]["*"]
    files = {p.name for p in (root / "pipelab").rglob("*") if p.suffix in (".js", ".css")}
    scripts = {"tools.js", "picture.js", "explorer.js", "editor.js", "rules.js"}
    assert files == scripts | {"explorer.css", "editor.css"}
    assert all(any(Path(name).match(pattern) for pattern in packaged) for name in files)


def test_nothing_is_printed_and_no_figure_stays_open(capfd):
    import matplotlib.pyplot as plt

    explorer = Explorer("gpipe", 4, 8, compare="interleaved")
    tell(explorer, virtual=2)
    tell(explorer, virtual=0)
    assert capfd.readouterr() == ("", "")
    assert plt.get_fignums() == []


def test_costs_may_be_arrays_and_a_wrong_mode_says_which_there_are():
    explorer = Explorer("gpipe", devices=2, microbatches=2)
    explorer.set(forward=np.array([1.0, 2.5]))
    assert explorer.settings["forward"] == "1, 2.5"
    with pytest.raises(
        CostError, match="recompute='sometimes': use one of never, except_last, always"
    ):
        explorer.set(recompute="sometimes")
    explorer.set(recompute=Recompute.ALWAYS, forward=2)
    assert explorer.settings["recompute"] == "always"
