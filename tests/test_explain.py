"""The gap between a prediction and a run, by cause."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelab import Costs, Kind, Timeline, explain, make, simulate
from pipelab.explain import CAUSES, CONTENTION, IMBALANCE, LAUNCH, MOVING, UNEXPLAINED, WAITING
from tests.conftest import tables

seconds = st.floats(0.01, 3)


def lay(schedule, duration, delay=0.0, wait=0.0, began=0.0):
    """A timeline of any durations, delays and waits, by a relaxation of its own, no walk."""
    count = schedule.bounds[-1]
    duration, delay, wait = (np.broadcast_to(x, count) for x in (duration, delay, wait))
    end, source = np.full(count, -np.inf), schedule.inputs
    before = np.where(np.isin(np.arange(count), schedule.bounds), -1, np.arange(count) - 1)
    moves = np.isin(np.arange(count), schedule.crossing)
    while True:
        free = np.where(before >= 0, end[before], began)
        there = np.where(source >= 0, end[source] + np.where(moves, delay, 0), began)
        free[(before >= 0) & np.isinf(free)] = there[(source >= 0) & np.isinf(there)] = np.inf
        start = np.maximum(free, there) + wait
        new = np.where(np.isinf(start), -np.inf, start + duration)
        if (new == end).all():
            break
        end = new
    assert np.isfinite(end).all()
    sent = np.where(moves, end[source], np.nan)
    return Timeline(schedule, start, end, sent, sent + delay, "measured")


def flat(schedule, base=1.0):
    """Different durations for different stages and kinds, the same for all micro-batches."""
    return base + schedule.columns.stage / 4 + schedule.columns.kind / 2


def only(cause, predicted, measured):
    found = explain(predicted, measured)
    others = {c: x for c, x in found.causes.items() if c != cause}
    assert others == pytest.approx(dict.fromkeys(others, 0), abs=1e-9)
    assert found.causes[cause] == pytest.approx(found.gap, abs=1e-9)
    return found.gap


def some(data, schedule, low=0.01):
    return np.array(
        data.draw(st.lists(st.floats(low, 3), min_size=(n := schedule.bounds[-1]), max_size=n))
    )


@given(tables(largest=4), st.data())
def test_the_causes_sum_to_the_gap(case, data):
    schedule = case[0]
    predicted = simulate(schedule, Costs(transfer=data.draw(seconds)))
    measured = lay(
        schedule, *(some(data, schedule, low) for low in (0.01, 0, 0)), began=data.draw(seconds)
    )
    found = explain(predicted, measured)
    assert tuple(found.causes) == CAUSES
    assert sum(found.causes.values()) == pytest.approx(found.gap)
    assert found.causes[UNEXPLAINED] == pytest.approx(0, abs=1e-9)
    # Clocks that disagree: spans overlap, inputs come after their use. The sum still holds.
    odd = replace(
        measured,
        start=measured.start - some(data, schedule, 0),
        arrived=measured.arrived + some(data, schedule, 0),
    )
    assert sum(explain(predicted, odd).causes.values()) == pytest.approx(
        odd.makespan - predicted.makespan
    )


@given(tables(largest=4), st.data())
def test_nothing_to_explain(case, data):
    measured = lay(case[0], *(some(data, case[0], low) for low in (0.01, 0, 0)))
    for t in (
        simulate(case[0], Costs(forward=0.3, transfer=0.7, update=0.1)),
        measured,
        replace(measured, late=3),
    ):
        found = explain(t, t)
        assert set(found.causes.values()) == {0}
        assert found.gap == found.error == 0


@given(tables(largest=4), seconds, seconds)
def test_one_change_is_one_cause(case, extra, began):
    schedule = case[0]
    base = flat(schedule)
    predicted = lay(schedule, base, 0.5)
    only(
        IMBALANCE,
        predicted,
        lay(schedule, base + extra * (schedule.columns.stage + 1), 0.5, began=began),
    )
    only(MOVING, predicted, lay(schedule, base, 0.5 + extra, began=began))
    gap = only(LAUNCH, predicted, lay(schedule, base, 0.5, extra, began=began))
    assert gap > 0


@given(tables(largest=4).filter(lambda case: case[0].total >= 3), st.data(), seconds)
def test_one_action_is_no_type(case, data, extra):
    schedule = case[0]
    base = flat(schedule)
    one = np.zeros(len(base))
    one[data.draw(st.sampled_from(np.flatnonzero(schedule.columns.kind == Kind.B).tolist()))] = (
        extra
    )
    predicted = lay(schedule, base, 0.5)
    only(CONTENTION, predicted, lay(schedule, base + one, 0.5))
    only(WAITING, predicted, lay(schedule, base, 0.5, one))


def test_causes_by_hand():
    # GPipe, 2 devices, 3 micro-batches: 12 units, of which device 1 computes 9 in one go.
    schedule = make("gpipe", 2, 3)
    predicted, at = simulate(schedule), schedule.position
    duration, wait = (predicted.end - predicted.start), np.zeros(len(predicted.start))
    duration[schedule.columns.stage == 1] += (
        0.5  # three forwards and three backwards on the longest chain
    )
    duration[at[Kind.B, 1, 1]] += 2
    duration[at[Kind.U, :, 0]] = 0
    wait[1:] = 0.125
    wait[at[Kind.B, 0, 2]] += 1
    measured = lay(schedule, duration, 0.25, wait, began=100)
    found = explain(predicted, measured)
    # The chain: 0F0, device 1's six, 0B2, 0U0: two transfers, eight waits (0F0 does not wait).
    assert found.causes == pytest.approx(
        {IMBALANCE: 3, CONTENTION: 2, MOVING: 0.5, LAUNCH: 8 * 0.125, WAITING: 1, UNEXPLAINED: 0}
    )
    assert (found.predicted, found.measured, found.gap) == (12, 19.5, 7.5)
    assert found.error == -7.5 / 19.5


def test_what_overlaps_is_unexplained():
    t = simulate(make("gpipe", 2, 3))
    # 1F0 is said to start before 0F0 has sent, and takes its time: 0.25 s of it cannot be.
    early = replace(
        t, start=t.start - 0.25 * (np.arange(len(t.start)) == t.schedule.position[Kind.F, 1, 0])
    )
    found = explain(t, early)
    assert found.gap == 0
    assert found.causes[CONTENTION] == pytest.approx(0.25)
    assert found.causes[UNEXPLAINED] == pytest.approx(-0.25)


@given(tables(largest=4), seconds)
def test_what_leaves_late_is_transfer(case, extra):
    schedule = case[0]
    predicted, measured = (lay(schedule, flat(schedule), delay) for delay in (0.5, 0.5 + extra))
    only(MOVING, predicted, replace(measured, sent=measured.sent + extra))


def test_recomputing_only_some_is_not_contention():
    from pipelab import Recompute

    costs = Costs(recompute=Recompute.EXCEPT_LAST)
    schedule = make("gpipe", 2, 4)
    only(IMBALANCE, simulate(schedule, costs), simulate(schedule, replace(costs, input_grad=1.5)))


def test_other_tables_are_refused():
    t = simulate(make("gpipe", 2, 3))
    with pytest.raises(
        ValueError,
        match=r"gpipe \(2 devices, 1 x 3 .*pipedream_flush \(2 devices, 1 x 3 .*: row 0 differs",
    ):
        explain(t, simulate(make("pipedream_flush", 2, 3)))
    with pytest.raises(ValueError, match="different tables"):
        explain(t, simulate(make("gpipe", 3, 3)))
    written = simulate(make("gpipe", 2, 3).with_transfers())
    with pytest.raises(ValueError, match="explain: gpipe has its transfers written out"):
        explain(written, written)


@pytest.mark.parametrize(
    ("unit", "shown"), [(1, "12.00 s"), (1e-3, "12.00 ms"), (1e-6, "12.00 µs"), (1e-9, "0.01 µs")]
)
def test_the_table_is_in_a_fitting_unit(unit, shown):
    schedule = make("gpipe", 2, 3)
    predicted = simulate(schedule, Costs(2 * unit, unit / 2, unit / 2))
    text = str(explain(predicted, simulate(schedule, Costs(unit, unit, unit))))
    lines = text.splitlines()
    assert [line.split()[0] for line in lines] == [
        "predicted",
        *(c.split()[0] for c in CAUSES),
        "measured",
    ]
    assert shown in lines[-1] and lines[-1].endswith("100.0 %")
    assert len({len(line) for line in lines}) == 1
    assert "-0.00" not in text


def test_no_time_at_all():
    nothing = simulate(make("gpipe", 2, 3), Costs(0, 0, 0))
    assert explain(nothing, nothing).error == 0
    assert explain(simulate(make("gpipe", 2, 3)), nothing).error == np.inf
    assert "0.00 µs" in str(explain(nothing, nothing))
