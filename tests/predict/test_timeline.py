"""Measures, attribution, critical path and other forms of a timeline."""

import json
import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelab import Costs, Kind, Schedule, make, simulate
from pipelab.measure.trace import to_trace
from pipelab.predict.attribution import Cause
from pipelab.predict.timeline import Bubble, Timeline
from tests.conftest import rich_tables, tables

costs = st.builds(
    Costs,
    forward=st.floats(0.1, 3),
    input_grad=st.floats(0.1, 3),
    weight_grad=st.floats(0.1, 3),
    transfer=st.floats(0, 2),
    update=st.floats(0, 1),
)


@given(tables(largest=5), costs)
def test_attribution_sums_to_the_idle_time(case, costs):
    t = simulate(case[0], costs)
    causes = t.attribution()
    assert list(causes) == list(Cause)
    idle = np.sum([*causes.values()], axis=0)
    assert np.allclose(idle, t.makespan - np.array(t.busy))
    assert all(min(seconds) > -1e-9 for seconds in causes.values())
    assert np.allclose(causes[Cause.OVERHEAD], 0)


def test_attribution_by_hand():
    causes = simulate(make("gpipe", 2, 1), Costs(transfer=0.5)).attribution()
    # device 0: F 0-1, then waits: 1F runs 1.5-2.5, 1B 2.5-4.5, its gradient arrives at 5
    assert causes[Cause.GRADIENT] == [3.5, 0]
    assert causes[Cause.TRANSFER] == [0.5, 0.5]
    assert causes[Cause.FORWARD] == [0, 1]
    assert causes[Cause.NOTHING] == [0, 2.5]


def test_held_back_by_the_order():
    # Device 0 could run 0F1 at once, but its row wants the gradient of micro-batch 0 first.
    held = simulate(make("inter_layer", 2, 2)).attribution()
    assert held[Cause.HELD] == [3, 0]
    assert simulate(make("gpipe", 2, 2)).attribution()[Cause.HELD] == [0, 0]


@given(tables(largest=5), costs)
def test_the_critical_path_is_unbroken(case, costs):
    t = simulate(case[0], costs)
    path = t.critical_path()
    assert t.start[path[0]] == 0
    assert t.end[path[-1]] == t.makespan
    for i, j in pairwise(path):
        assert t.start[j] >= t.end[i] - 1e-9
        if t.spans[i].device == t.spans[j].device:
            assert t.start[j] == pytest.approx(t.end[i])
        else:
            assert t.start[j] == pytest.approx(t.spans[j].arrived)


@given(tables(largest=5), costs)
def test_bubbles_follow_their_definitions(case, costs):
    t = simulate(case[0], costs)
    p = t.schedule.devices
    assert t.bubble.of_total == pytest.approx(1 - sum(t.busy) / (p * t.makespan))
    assert t.bubble.over_ideal == pytest.approx((t.makespan - max(t.busy)) / max(t.busy))
    assert t.span <= t.makespan


def test_a_bubble_of_no_time_is_none():
    nothing = simulate(make("gpipe", 2, 2), Costs(0, 0, 0))
    assert nothing.bubble == Bubble(0, 0, 0)


def test_the_longest_span_is_that_of_a_device():
    idle = Schedule("idle", (*make("gpipe", 2, 2).rows, ()), (0, 1), 2)
    t = simulate(idle, Costs([1, 3]))
    assert (t.span, t.makespan, t.ideal) == (13, 13, 10)
    assert simulate(make("zb_h2", 3, 5)).span == 15 < simulate(make("zb_h2", 3, 5)).makespan
    assert t.bubble == pytest.approx((1 - (6 + 10) / 39, 0.3, 3 / 13))


@given(tables(largest=5), costs)
def test_parts_are_what_the_costs_say(case, costs):
    s, overhead = case[0], 0.25
    t = simulate(s, replace(costs, overhead=overhead))
    parts, device = t.parts(), s.device_of
    for i, (_, kind, _) in enumerate(s.actions):
        seconds = {
            Kind.F: costs.forward,
            Kind.B: costs.input_grad + costs.weight_grad,
            Kind.I: costs.input_grad,
            Kind.W: costs.weight_grad,
            Kind.U: costs.update,
        }
        source, before = s.inputs[i], None if i in s.bounds else i - 1
        crosses = source is not None and device[source] != device[i]
        assert parts.duration[i] == pytest.approx(seconds[kind])
        assert parts.delay[i] == pytest.approx(costs.transfer if crosses else 0)
        assert parts.wait[i] == pytest.approx(overhead if i else 0)  # time begins with the first
        free = min(t.start) if before is None else t.end[before]
        came = -math.inf if source is None else t.end[source] + parts.delay[i]
        if came == free or abs(came - free) > 1e-9:
            assert parts.fed[i] == (came > free)


def test_parts_of_a_clock_that_is_wrong_are_never_below_zero():
    s = make("gpipe", 2, 1)  # 0F0 0B0 0U0 | 1F0 1B0 1U0
    start, end = [5, 9, 12, 5.5, 7, 8], [6, 12, 12, 7, 6.75, 8]
    t = Timeline(s, s.spans(start, end, {1: (6.75, 6.5), 3: (6, 6.25)}), "measured")
    assert t.parts().duration == [1, 3, 0, 1.5, 0, 0]
    assert t.parts().delay == [0, 0, 0, 0.25, 0, 0]
    assert t.parts().wait == [0, 2.5, 0, 0, 0, 1.25]
    assert t.parts().fed == [False, True, False, True, False, False]
    assert s.arrivals(t.spans) == [-math.inf, 6.5, -math.inf, 6.25, -math.inf, -math.inf]


def test_times_are_those_of_the_spans():
    t = simulate(make("gpipe", 2, 1), Costs(transfer=0.5))
    assert (t.weight_versions, t.peak_in_flight) == ([1, 1], [1, 1])
    assert (t.start, t.end) == ([0, 5, 7, 1.5, 2.5, 4.5], [1, 7, 7, 2.5, 4.5, 4.5])
    assert [span.sent for span in t.spans] == [None, 4.5, None, 1, None, None]
    assert [span.arrived for span in t.spans] == [None, 5, None, 1.5, None, None]
    assert t.input_arrival() == [-math.inf, 5, -math.inf, 1.5, -math.inf, -math.inf]
    assert [span.device for span in t.spans] == [0, 0, 0, 1, 1, 1]


@pytest.mark.parametrize("name", ["gpipe", "pipedream", "pipedream_2bw"])
def test_batches_follow_each_other(name):
    """With equal stages the last device ends a batch every 3 m, without a flush."""
    t = simulate(make(name, 3, 4, batches=4))
    numbers = {Kind.U: t.schedule.per_update}
    assert t.batch == [a.microbatch * numbers.get(a.kind, 1) // 4 for a in t.schedule.actions]
    ends = [max(e for e, b in zip(t.end, t.batch, strict=True) if b == k) for k in range(4)]
    assert t.batch_seconds() == [b - a for a, b in pairwise(ends)]
    assert t.batch_seconds()[1] == (3 * (4 + 2) if name == "gpipe" else 3 * 4)
    assert t.warm == [batch > 0 for batch in t.batch]
    assert t.warmed_up().schedule.batches == 3
    assert t.warmed_up().start == [s for s, b in zip(t.start, t.batch, strict=True) if b > 0]


def test_a_first_batch_is_cut_off_where_an_update_ends_with_it():
    one = simulate(make("gpipe", 2, 2))
    assert all(one.warm) and one.warmed_up() is one
    grid = "# microbatches=1 batches=2 per_update=2\n0F0 0F1 0B0 0B1 0U0"
    both = simulate(Schedule.from_grid(grid))
    assert all(both.warm) and both.warmed_up() is both
    two = simulate(make("gpipe", 1, 1, batches=2))
    assert two.warm == [False] * 3 + [True] * 3


def test_a_span_has_its_weight_version():
    t = simulate(make("pipedream", 2, 4))
    table = {str(span.action): span.version for span in t.spans}
    assert (table["0F2"], table["0B2"], table["0U2"]) == (1, 1, 3)


@given(tables(), st.data())
def test_a_part_has_the_spans_of_its_batches(case, draw):
    s, _, m, _, batches = case
    first = draw.draw(st.integers(0, batches - 1))
    last = draw.draw(st.integers(first + 1, batches))
    whole = simulate(s, Costs(transfer=0.5))
    part = whole.part(first, last)
    assert part.schedule.rows == s.part(first, last).rows
    for i in range(len(part.start)):
        stage, kind, number = part.schedule.actions[i]
        before = first * m // s.per_update if kind is Kind.U else first * m
        j = s.position[stage, kind, number + before]
        assert part.spans[i][3:] == whole.spans[j][3:]
    assert part.makespan == max(part.end) - min(part.start)
    assert part.source == whole.source


def test_the_trace_has_transfers_and_arrows():
    t = simulate(make("gpipe", 2, 2), Costs(transfer=0.5))
    trace = json.loads(json.dumps(to_trace(t)))
    events = trace["traceEvents"]
    spans = [e for e in events if e["ph"] == "X" and e["tid"] == 0]
    assert {e["name"] for e in spans} == {f"PP:{a}" for row in t.schedule.rows for a in row}
    one = next(e for e in spans if e["name"] == "PP:1F0")
    assert (one["pid"], one["ts"], one["dur"]) == (1, 1.5e6, 1e6)
    moves = [e for e in events if e["ph"] == "X" and e["tid"] == 1]
    assert len(moves) == 4
    assert {e["dur"] for e in moves} == {0.5e6}
    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert starts.keys() == ends.keys()
    assert all(
        starts[i]["pid"] != ends[i]["pid"] and starts[i]["ts"] <= ends[i]["ts"] for i in starts
    )


def test_a_table_with_transfers_has_no_hidden_ones():
    t = simulate(make("gpipe", 2, 2).with_transfers(), Costs(transfer=0.5))
    assert all(span.sent is span.arrived is None for span in t.spans)
    assert t.busy == [6, 6]
    assert sum(span.action.kind > Kind.U for span in t.spans) == 8
    with pytest.raises(ValueError, match="attribution: gpipe has its transfers written out"):
        t.attribution()
    with pytest.raises(ValueError, match="critical_path"):
        t.critical_path()


def test_the_summary_says_what_the_picture_shows():
    words = simulate(make("interleaved", 4, 8, virtual=2)).summary()
    assert words.startswith(
        "interleaved, simulated: 4 devices, 8 stages, 8 micro-batches. Makespan 57"
    )
    assert "15.8% of all device time is idle (18.8% over ideal)" in words
    assert words.endswith("Peak in flight 11 9 7 5.")
    one = simulate(make("gpipe", 1, 1, batches=2))
    assert one.summary().startswith("gpipe, simulated: 1 device, 1 micro-batch, 2 batches. Make")
    paced = replace(one, source="measured", late=3)
    assert repr(paced).startswith("<Timeline gpipe, measured: ")
    assert repr(paced).endswith("Peak in flight 1. Paced, 3 actions late.>")


def test_the_critical_path_takes_the_row_where_both_came_at_once():
    t = simulate(make("gpipe", 2, 2))
    path = [str(t.schedule.actions[i]) for i in t.critical_path()]
    assert path == ["0F0", "1F0", "1F1", "1B0", "0B0", "0B1"]


def test_the_summary_of_slices():
    rows = "0F0 0F1 1F0 1F1 1B1 1B0 0B1 0B0 0U0 1U0"
    words = simulate(Schedule.from_grid(f"# slices=1 1 microbatches=2\n{rows}")).summary()
    assert ": 1 device, 2 stages, 1 micro-batch in 2 slices each. Makespan" in words


def test_both_of_a_pair_wait_for_the_input_that_comes_last():
    table = Schedule.from_grid("0F0 0F1+0B0 0B1 0U0\n1F0 1B0 1F1 1B1 1U0")
    parts = simulate(table).parts()
    assert parts.wait == [0] * 10
    assert parts.fed[:3] == [False, True, True]  # 0F1 takes nothing, but waits for 1B0


def test_a_pair_whose_inputs_are_there_is_not_fed_by_the_next_actions():
    rows = "0F0 0F1 0F2 0F3 0F4+0B0 0B1 0B2 0B3 0B4\n1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4"
    t = simulate(Schedule.from_grid(rows))  # 1B0 ends at 4, as 0F3 does, and 1B1 at 7
    assert t.parts().fed[:6] == [False] * 6


def test_a_measured_pair_is_busy_until_both_have_ended():
    table = Schedule.from_grid("0F0 0F1+0B0 0B1 0U0")
    for ends in ((2, 3), (3, 2)):
        spans = table.spans([0, 1, 1, 4, 5], [1, *ends, 5, 5], {})
        t = Timeline(table, spans, "measured")
        assert t.busy == [1 + 2 + 1]
        assert t.before == [None, 0, 0, 1 if ends == (3, 2) else 2, 3]


@pytest.mark.parametrize(("host", "last"), [(20, 1), (4, 2)])  # 0.5 s, and 2.5 s beside 0F1's 1 s
def test_an_action_begins_after_both_that_overlap_before_it(host, last):
    table = Schedule.from_grid("0F0 0F1+0OFFLOAD0 0F2 0B2+0RELOAD0 0B1 0B0 0U0")
    t = simulate(table, Costs(activations=10, host=host))
    assert t.before[:4] == [None, 0, 0, last]
    assert t.start[3] == t.end[last]


@pytest.mark.parametrize("transfer", [0, 0.5])
@pytest.mark.parametrize("table", rich_tables(), ids=lambda table: table.name)
def test_the_critical_path_of_pairs_is_unbroken(table, transfer):
    """Both of a pair wait for the input that comes last."""
    t = simulate(table, Costs(0.9, 1.2, 0.7, transfer=transfer, activations=1, host=2))
    path = t.critical_path()
    assert t.start[path[0]] == 0 and t.end[path[-1]] == t.makespan
    for i, j in pairwise(path):
        taker = table.takers[i]  # j, or what overlaps with it
        came = t.input_arrival()[taker] if taker in (j - 1, j, j + 1) else t.end[i]
        assert t.start[j] == pytest.approx(came)
