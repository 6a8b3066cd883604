"""Slow devices, jitter and failures: limits that can be worked out by hand."""

import math

import pytest

from pipelab import Costs, make, simulate
from pipelab.optimize.faults import Faults, cost_of_faults
from pipelab.predict.costs import CostError

TABLE = make("pipedream_flush", 4, 16)


def test_a_slow_device_sets_the_pace():
    """One of the four, as if its speed were a half; without anything unlike nothing is added."""
    found = cost_of_faults(TABLE, Costs(), Faults(slow=2.0), replicas=3, repeats=9)
    assert found["jitter"] == found["a/a"] == found["failures"] == [0.0] * 9
    whole = simulate(TABLE).makespan
    speeds = [[0.5 if d == slow else 1 for d in range(4)] for slow in range(4)]
    possible = {round(simulate(TABLE, Costs(speed=s)).makespan / whole - 1, 9) for s in speeds}
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
