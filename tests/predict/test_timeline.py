"""Measures, attribution, critical path and other forms of a timeline."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelab import Costs, Kind, Schedule, make, simulate
from pipelab.measure.trace import to_trace
from pipelab.predict.attribution import Cause
from tests.conftest import tables

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
    # Device 1 waits for a gradient; the forward that its row puts later arrives while it waits.
    t = simulate(Schedule.from_grid("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n2F0 2B0 2F1 2B1"))
    assert t.attribution()[Cause.HELD] == [0, 3, 0]
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
            assert t.start[j] == pytest.approx(t.arrived[j])


@given(tables(largest=5), costs)
def test_bubbles_follow_their_definitions(case, costs):
    t = simulate(case[0], costs)
    p = t.schedule.devices
    assert t.bubble.of_total == pytest.approx(1 - sum(t.busy) / (p * t.makespan))
    assert t.bubble.over_ideal == pytest.approx((t.makespan - max(t.busy)) / max(t.busy))
    assert t.span <= t.makespan


def test_a_span_has_its_weight_version():
    t = simulate(make("pipedream", 2, 4))
    table = {str(span.action): span.version for span in t.spans}
    assert (table["0F2"], table["0B2"], table["0U2"]) == (1, 1, 3)


@given(tables(), st.data())
def test_a_part_has_the_spans_of_its_batches(case, draw):
    s, _, m, _, batches = case
    first = draw.draw(st.integers(0, batches - 1))
    last = draw.draw(st.integers(first + 1, batches))
    whole = simulate(s)
    part = whole.part(first, last)
    assert part.schedule.rows == s.part(first, last).rows
    for i in range(len(part.start)):
        stage, kind, number = part.schedule.actions[i]
        before = first * m // s.per_update if kind is Kind.U else first * m
        j = s.position[stage, kind, number + before]
        assert (part.start[i], part.end[i]) == (whole.start[j], whole.end[j])
    assert part.source == whole.source


def test_the_frame_has_a_row_per_action():
    frame = simulate(make("gpipe", 2, 2)).to_frame()
    assert list(frame.columns) == [
        "device",
        "stage",
        "kind",
        "microbatch",
        "version",
        "start",
        "end",
    ]
    assert frame[frame.kind == "B"].end.max() == 9
    assert len(frame) == 10


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
