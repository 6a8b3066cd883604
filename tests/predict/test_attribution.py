"""Who makes a device wait: every idle instant has one answer."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given

from pipelab import Costs, Schedule, make, simulate
from pipelab.predict.attribution import Cause, stretches, waited_for
from pipelab.predict.timeline import Timeline
from tests.conftest import tables
from tests.predict.test_timeline import costs


def seconds(t):
    found = Counter()
    for begin, end, who in waited_for(t.schedule, t.spans):
        assert begin < end
        found[who] += end - begin
    return found


def test_who_is_waited_for_by_hand():
    # 0F 0-1, 1F 1.5-2.5, 1B 2.5-4.5, 0B 5-7
    t = simulate(make("gpipe", 2, 1), Costs(transfer=0.5))
    # device 0: 1-1.5 on its way, 1.5-4.5 stage 1, 4.5-5 on its way back
    # device 1: 0-1 stage 0, 1-1.5 on its way; after 4.5 as device 0 does, which ends last
    assert seconds(t) == {0: 1 + 2, 1: 3, Cause.TRANSFER: 4 * 0.5}


def test_a_wait_is_asked_on_from_device_to_device():
    # Device 0's gradient waits for device 1, and that for device 2's F and B; then 1 computes.
    t = simulate(Schedule.from_grid("0F0 0B0\n1F0 1B0\n2F0 2B0"))
    first = [who for begin, end, who in waited_for(t.schedule, t.spans)][:4]
    assert first == [1, 2, 2, 1]


def test_a_device_that_could_start_loses_overhead():
    t = simulate(make("gpipe", 1, 2), Costs(overhead=0.25))
    assert seconds(t) == {Cause.OVERHEAD: pytest.approx(0.25 * 4)}


@given(tables(largest=5), costs)
def test_waits_are_all_of_the_idle_time(case, costs):
    t = simulate(case[0], costs)
    idle = t.schedule.devices * t.makespan - sum(t.busy)
    assert sum(seconds(t).values()) == pytest.approx(idle)


@given(tables(largest=4), costs)
def test_stretches_leave_no_gap(case, costs):
    t = simulate(case[0], costs)
    for row in stretches(t.schedule, t.spans):
        assert (row[0].begin, row[-1].end) == (min(t.start), max(t.end))
        assert all(a.end == b.begin for a, b in pairwise(row))


def test_a_measured_run_is_taken_apart_too():
    """Late inputs, an overlap of two actions and an input that came before its row was free."""
    s = make("gpipe", 2, 2)  # 0F0 0F1 0B0 0B1 0U0 | 1F0 1F1 1B0 1B1 1U0
    start = [10, 12, 18, 19.5, 23, 12, 14, 15, 17, 19]
    end = [11, 13, 20, 22, 23, 13, 15, 17, 19, 19.5]
    moved = {2: (17, 17.5), 3: (19, 19.25), 5: (11, 11.5), 6: (13, 13.5)}
    spans = s.spans(start, end, moved)
    found = [[(a, b, c, stage) for a, b, c, stage, _ in row] for row in stretches(s, spans)]
    assert found[0] == [
        *((10, 11, None, 0), (11, 12, Cause.OVERHEAD, 0), (12, 13, None, 0)),
        *((13, 17, Cause.GRADIENT, 0), (17, 17.5, Cause.TRANSFER, 0), (17.5, 18, "overhead", 0)),
        *((18, 20, None, 0), (20, 22, None, 0), (22, 23, Cause.OVERHEAD, 0)),
    ]
    assert found[1] == [
        *((10, 11, Cause.FORWARD, 1), (11, 11.5, Cause.TRANSFER, 1), (11.5, 12, "overhead", 1)),
        *((12, 13, None, 1), (13, 13.5, Cause.TRANSFER, 1), (13.5, 14, Cause.OVERHEAD, 1)),
        *((14, 15, None, 1), (15, 17, None, 1), (17, 19, None, 1), (19, 19.5, None, 1)),
        (19.5, 23, Cause.NOTHING, None),
    ]
    asks = [[(stretch.cause, stretch.asks) for stretch in row] for row in stretches(s, spans)]
    assert (Cause.GRADIENT, 1) in asks[0] and (Cause.FORWARD, 0) in asks[1]
    assert (Cause.NOTHING, 0) in asks[1] and (Cause.TRANSFER, None) in asks[0]


def test_a_circle_of_rounded_times_ends():
    """Each device waits while, by the other's clock, it is that one that waits."""
    s = make("gpipe", 2, 1)  # 0F0 0B0 0U0 | 1F0 1B0 1U0
    start, end = [0, 8, 9, 4, 6, 7], [1, 9, 9, 5, 7, 7]
    spans = s.spans(start, end, {1: (8, 8), 3: (4, 4)})
    t = Timeline(s, spans, "measured")
    assert sum(seconds(t).values()) == pytest.approx(2 * 9 - sum(t.busy))
    assert seconds(t)[Cause.OVERHEAD] > 0


def test_held_back_only_while_the_later_forward_is_there():
    t = simulate(Schedule.from_grid("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1\n2F0 2B0 2F1 2B1"))
    assert t.attribution()[Cause.HELD] == [0, 3, 0]
    row = stretches(t.schedule, t.spans)[1]
    held = [(a, b, asks) for a, b, cause, _, asks in row if cause is Cause.HELD]
    assert held == [(2, 5, 2)]
    late = simulate(t.schedule, Costs(forward=[1, 1, 1], transfer=[1.5, 0]))
    row = stretches(late.schedule, late.spans)[1]
    assert [(a, b, c) for a, b, c, *_ in row if c in (Cause.GRADIENT, Cause.HELD)] == (
        [(3.5, 6.5, Cause.HELD), (9.5, 12.5, Cause.GRADIENT)]
    )


def test_who_is_waited_for_may_be_far_away():
    t = simulate(make("inter_layer", 6, 1))
    assert seconds(t) == {s: 3 * 5 for s in range(6)}


def test_who_has_nothing_left_waits_for_the_device_that_ends_last():
    t = simulate(make("zb_h2", 3, 5))
    rows = stretches(t.schedule, t.spans)
    assert [row[-1].asks for row in rows if row[-1].cause is Cause.NOTHING] == [2, 2]


def test_a_pair_waits_for_the_later_of_its_inputs():
    for name in ("dualpipe", "pipedream_flush"):
        for transfer in (0, 0.3):
            timeline = simulate(make(name, 4, 8).overlap(), Costs(transfer=transfer))
            assert sum(timeline.attribution()[Cause.OVERHEAD]) == pytest.approx(0)
