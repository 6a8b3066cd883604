"""Measures, attribution, critical path and other forms of a timeline."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelab import Costs, Kind, Schedule, fit, make, memory, simulate
from pipelab.idle import CAUSES, FORWARD, GRADIENT, HELD, NOTHING, OVERHEAD, TRANSFER
from tests.conftest import tables
from tests.test_explain import flat, lay

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
    assert list(causes) == list(CAUSES)
    assert np.allclose(sum(causes.values()), t.makespan - t.busy)
    assert all((seconds > -1e-9).all() for seconds in causes.values())
    assert np.allclose(causes[OVERHEAD], 0)


def test_attribution_by_hand():
    causes = simulate(make("gpipe", 2, 1), Costs(transfer=0.5)).attribution()
    # device 0: F 0-1, then waits: 1F runs 1.5-2.5, 1B 2.5-4.5, its gradient arrives at 5
    assert causes[GRADIENT].tolist() == [3.5, 0]
    assert causes[TRANSFER].tolist() == [0.5, 0.5]
    assert causes[FORWARD].tolist() == [0, 1]
    assert causes[NOTHING].tolist() == [0, 2.5]


def test_held_back_by_the_order():
    # Device 0 could run 0F1 at once, but its row wants the gradient of micro-batch 0 first.
    held = simulate(make("inter_layer", 2, 2)).attribution()
    assert held[HELD].tolist() == [3, 0]
    # Device 1 waits for a gradient; the forward that its row puts later arrives while it waits.
    t = simulate(Schedule.from_grid("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n2F0 2B0 2F1 2B1"))
    assert t.attribution()[HELD].tolist() == [0, 3, 0]
    assert simulate(make("gpipe", 2, 2)).attribution()[HELD].tolist() == [0, 0]


@given(tables(largest=5), costs)
def test_the_critical_path_is_unbroken(case, costs):
    t = simulate(case[0], costs)
    path = t.critical_path()
    assert t.start[path[0]] == 0
    assert t.end[path[-1]] == t.makespan
    for i, j in pairwise(path):
        assert t.start[j] >= t.end[i] - 1e-9
        if t.device[i] == t.device[j]:
            assert t.start[j] == pytest.approx(t.end[i])
        else:
            assert t.start[j] == pytest.approx(t.arrived[j])


@given(tables(largest=5), costs)
def test_bubbles_follow_their_definitions(case, costs):
    t = simulate(case[0], costs)
    p = t.schedule.devices
    assert t.bubble.of_total == pytest.approx(1 - t.busy.sum() / (p * t.makespan))
    assert t.bubble.over_ideal == pytest.approx((t.makespan - t.busy.max()) / t.busy.max())
    assert t.span <= t.makespan


def test_versions_are_a_column():
    t = simulate(make("pipedream", 2, 4))
    table = {str(t.schedule.action(i)): int(v) for i, v in enumerate(t.version)}
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
        stage, kind, number = part.schedule.action(i)
        before = first * m // s.per_update if kind is Kind.U else first * m
        j = s.position[kind, stage, number + before]
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
    trace = json.loads(json.dumps(t.to_trace()))
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
    assert len(t.transfers["action"]) == 0
    assert t.busy.tolist() == [6, 6]
    assert (t.kind > Kind.U).sum() == 8
    with pytest.raises(ValueError, match="attribution: gpipe has its transfers written out"):
        t.attribution()
    with pytest.raises(ValueError, match="critical_path"):
        t.critical_path()


@given(tables(largest=4))
def test_fit_recovers_the_costs(case):
    schedule = case[0]
    n = schedule.stages
    costs = Costs(
        forward=[1 + s for s in range(n)], input_grad=2, weight_grad=2, update=0.25, transfer=0.5
    )
    found = fit(simulate(schedule, costs))
    assert np.allclose(found.forward, costs.forward)
    assert np.allclose(found.input_grad, 2)
    assert simulate(schedule, found).makespan == pytest.approx(simulate(schedule, costs).makespan)


@given(tables(largest=4), tables(largest=4), st.floats(0, 1))
def test_fit_predicts_other_tables_with_the_time_lost(case, other, lost):
    seen, other = case[0], other[0]
    if seen.stages != other.stages or not seen.crossing.size:  # one device shows no transfer
        return
    if (Kind.I in seen.columns.kind) != (Kind.I in other.columns.kind):  # I and W are not B's parts
        return
    found = fit(lay(seen, flat(seen), 0.5, lost))
    assert simulate(other, found).makespan == pytest.approx(
        lay(other, flat(other), 0.5, lost).makespan
    )


def test_fit_averages_what_varies_and_leaves_out_the_first_batch():
    schedule = make("gpipe", 2, 4, batches=2)
    duration = flat(schedule)
    duration[schedule.columns.microbatch < 4] *= 20
    duration[schedule.position[Kind.B, 1, 4]] += 0.8  # one of four backwards that count
    duration[schedule.position[Kind.U]] = 0
    found = fit(measured := lay(schedule, duration))
    # All of stage 1's are on the longest chain, so that means predict it.
    assert found.forward == pytest.approx([1, 1.25])
    assert np.add(found.input_grad, found.weight_grad) == pytest.approx([1.5, 1.75 + 0.8 / 4])
    duration[schedule.position[Kind.B, 0, 4]] += 0.8  # beside the longest chain
    found = fit(measured := lay(schedule, duration))
    scale = found.forward[0]
    assert scale < 1
    assert found.forward == pytest.approx([scale, 1.25 * scale])
    seen = measured.warmed_up().makespan
    assert simulate(schedule, found).warmed_up().makespan == pytest.approx(seen)


def test_fit_tells_a_stage_from_its_core():
    schedule = make("gpipe", 2, 4, batches=2)
    base = flat(schedule)
    device = schedule.columns.device
    found = fit(replace(lay(schedule, base * (1 + device)), on_core=base))  # half the time
    assert found.speed == pytest.approx([1, 0.5])
    assert found.forward == pytest.approx([1, 1.25])
    assert fit(lay(schedule, base)).speed == 1


def test_fit_tells_lost_time_from_latency():
    schedule = make("gpipe", 2, 3)
    wait = np.zeros(schedule.bounds[-1])
    wait[schedule.position[Kind.F, 0, 1:]] = (
        0.2  # two of device 0's; of device 1's none waits but for its input
    )
    wait[schedule.position[Kind.F, 1, 0]] = wait[schedule.position[Kind.B, 0, 0]] = 3
    wait[schedule.position[Kind.U, 1, 0]] = 50  # an update may wait for other stages: no time lost
    t = lay(schedule, flat(schedule, 10), 0.5, wait)
    fed = [i for i in schedule.crossing if t.arrived[i] > t.end[i - 1] or i in schedule.bounds]
    prompt = [
        i for i in range(len(wait)) if i not in (*fed, *schedule.bounds) and t.kind[i] != Kind.U
    ]
    lost = 0.4 / len(prompt)
    found = fit(t)
    scale = found.forward[0] / 10  # by which the run took longer than its means
    assert found.forward == pytest.approx([10 * scale, 10.25 * scale])
    assert found.overhead == pytest.approx(lost * scale)
    assert found.split(2).overhead == found.overhead  # shorter actions lose no less
    assert found.transfer == pytest.approx((0.5 + 3 / (len(fed) - 1) - lost) * scale)


@given(tables(largest=4))
def test_fit_recovers_bytes(case):
    schedule = case[0]
    costs = Costs(weights=12, optimizer=24, activations=5)
    t = simulate(schedule, costs)
    found = fit(t, memory(t, costs))
    for name in ("weights", "optimizer", "activations"):
        assert found.of(name, schedule.stages) == pytest.approx(costs.of(name, schedule.stages))
    assert fit(t).weights == fit(t).activations == found.boundary == 0


def test_fit_divides_the_bytes_of_a_shared_device_evenly():
    schedule = make("interleaved", 2, 4, virtual=2)
    costs = Costs(weights=[1, 2, 3, 4], optimizer=[0, 0, 8, 6])
    found = fit(t := simulate(schedule), memory(t, costs))
    assert (found.weights, found.optimizer, found.activations) == (
        (2, 3, 2, 3),
        (4, 3, 4, 3),
        (0, 0, 0, 0),
    )


def test_fit_refuses_what_does_not_fit():
    t = simulate(make("gpipe", 2, 2))
    with pytest.raises(ValueError, match="fit: memory of 3 devices for the 2 of gpipe"):
        fit(t, memory(simulate(make("gpipe", 3, 2)), Costs()))
    with pytest.raises(ValueError, match="fit: gpipe has its transfers written out"):
        fit(simulate(make("gpipe", 2, 2).with_transfers()))


def test_the_summary_says_what_the_picture_shows():
    words = simulate(make("interleaved", 4, 8, virtual=2)).summary()
    assert words.startswith(
        "interleaved, simulated: 4 devices, 8 stages, 8 micro-batches. Makespan 57"
    )
    assert "15.8% of all device time is idle (18.8% over ideal)" in words
