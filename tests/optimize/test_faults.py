"""Slow devices, jitter and failures: limits that can be worked out by hand."""

import math
from dataclasses import replace

import pytest

from pipelab import Costs, make, simulate
from pipelab.optimize import faults as module
from pipelab.optimize.faults import Faults, cost_of_faults
from pipelab.predict.costs import CostError

TABLE = make("pipedream_flush", 4, 16)


def test_a_slow_device_sets_the_pace():
    """One of the four, as if its speed were a half; without anything unlike nothing is added."""
    costs = Costs(overhead=0.25)  # which a slow device loses no more often
    found = cost_of_faults(TABLE, costs, Faults(slow=2.0), replicas=3, repeats=9)
    assert found["jitter"] == found["a/a"] == found["failures"] == [0.0] * 9
    whole = simulate(TABLE, costs).makespan + costs.overhead  # before the first action
    speeds = [[0.5 if d == slow else 1 for d in range(4)] for slow in range(4)]
    slowed = (simulate(TABLE, replace(costs, speed=s)).makespan + costs.overhead for s in speeds)
    possible = {round(makespan / whole - 1, 9) for makespan in slowed}
    for cause in ("slow device", "both"):
        shares = {round(share, 9) for share in found[cause]}
        assert shares <= possible and len(shares) > 1


def test_jitter_of_more_replicas_costs_more():
    """The slowest ends the step; and a seed says what is drawn."""
    costs = {
        replicas: cost_of_faults(TABLE, Costs(), Faults(jitter=0.1), replicas=replicas, repeats=9)
        for replicas in (1, 40)
    }
    assert sorted(costs[1]["jitter"])[4] < sorted(costs[40]["jitter"])[4]
    assert costs[1]["jitter"] != costs[1]["a/a"]
    assert max(costs[1]["slow device"]) == 0
    again = cost_of_faults(TABLE, Costs(), Faults(jitter=0.1), repeats=9)
    assert again == costs[1]


def test_jitter_is_drawn_around_the_costs(monkeypatch):
    """Even large, it makes no action take less than a tenth; and of many replicas only as many are
    drawn as have `MOST` actions."""
    (small,) = cost_of_faults(TABLE, Costs(), Faults(jitter=0.01, restart=0.0), repeats=1)["jitter"]
    assert 0 < small < 0.1
    monkeypatch.setattr(module.random.Random, "gauss", lambda self, mean, spread: mean - 9)
    (least,) = cost_of_faults(TABLE, Costs(), Faults(jitter=3.0), repeats=1)["jitter"]
    assert least == pytest.approx(0.1 - 1)
    monkeypatch.undo()
    monkeypatch.setattr(module, "MOST", 3 * len(TABLE.actions))
    few, many = (
        cost_of_faults(TABLE, Costs(), Faults(jitter=0.1), replicas=n, repeats=2) for n in (3, 40)
    )
    assert few == many


def test_checkpoints_that_take_no_time_are_written_a_thousand_times_between_failures():
    faults = Faults(between=1000, write=0, restart=100)
    found = cost_of_faults(TABLE, Costs(), faults, repeats=100)["failures"]
    assert sum(found) / 100 == pytest.approx((100 + 0.5) / 1000, rel=0.15)


def test_failures_cost_what_the_closed_form_says():
    """With exponential failures a segment of T + C takes (M + R) (exp((T + C) / M) - 1) on average
    (Daly, 2006)."""
    faults = Faults(between=10800, write=60, restart=300)
    every = math.sqrt(2 * 10800 * 60)
    expected = (10800 + 300) * math.expm1((every + 60) / 10800) / every - 1
    found = cost_of_faults(TABLE, Costs(), faults, repeats=20)["failures"]
    assert sum(found) / 20 == pytest.approx(expected, rel=0.03)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"slow": 0.9}, "slow=0.9: give a number of at least 1"),
        ({"jitter": math.nan}, "jitter=nan: give a number of at least 0"),
        ({"write": math.inf}, "write=inf: give a number of at least 0"),
        ({"between": 360.0}, "between=360.0: give more than the 360 s"),
    ],
)
def test_nonsense_is_refused(given, message):
    with pytest.raises(CostError, match=message):
        Faults(**given)
