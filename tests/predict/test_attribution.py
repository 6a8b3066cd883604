"""Who makes a device wait: every idle instant has one answer."""

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given

from pipelab import Costs, Schedule, make, simulate
from pipelab.predict.attribution import Cause, stretches, waited_for
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
def test_waits_and_causes_are_the_same_idle_time(case, costs):
    t = simulate(case[0], costs)
    idle = t.schedule.devices * t.makespan - sum(t.busy)
    assert sum(seconds(t).values()) == pytest.approx(idle)
    assert sum(map(sum, t.attribution().values())) == pytest.approx(idle)


@given(tables(largest=4), costs)
def test_stretches_leave_no_gap(case, costs):
    t = simulate(case[0], costs)
    for row in stretches(t.schedule, t.spans):
        assert (row[0].begin, row[-1].end) == (min(t.start), max(t.end))
        assert all(a.end == b.begin for a, b in pairwise(row))
