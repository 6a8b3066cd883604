"""Costs from a measured timeline, and from its memory."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelab import Costs, Kind, diagnose, explain, fit, make, memory, memory_used, simulate
from pipelab.measure.trace import to_trace
from pipelab.optimize.bounds import gap
from pipelab.optimize.plan import MACHINES, MODELS, Problem
from tests.conftest import tables
from tests.measure.test_prediction import flat, kinds_of, lay, microbatches_of

TABLE = make("gpipe", 2, 4)
WRITTEN = simulate(TABLE.with_transfers())


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: fit(None), "timeline is a NoneType: give a Timeline"),
        (lambda: fit(TABLE), "timeline is a Schedule: give a Timeline"),
        (lambda: fit(simulate(TABLE), 3), "memory is a int: give a Memory"),
        (lambda: diagnose(TABLE), "timeline is a Schedule: give a Timeline"),
        (lambda: explain(Costs(), TABLE), "measured is a Schedule: give a Timeline"),
        (lambda: explain(None, simulate(TABLE)), "costs is a NoneType: give a Costs"),
        (lambda: to_trace(TABLE), "timeline is a Schedule: give a Timeline"),
        (lambda: gap(simulate(TABLE), Costs()), "schedule is a Timeline: give a Schedule"),
        (lambda: memory_used(TABLE, None), "costs is a NoneType: give a Costs"),
        (lambda: Problem(None, MACHINES["H200"], 1, 1), "model is a NoneType: give a Transformer"),
        (lambda: Problem(MODELS["deepseek-v3"], None, 1, 1), "machine is a NoneType"),
        (lambda: fit(WRITTEN), "fit: gpipe has its transfers written out"),
        (lambda: explain(Costs(), WRITTEN), "explain: gpipe has its transfers written out"),
        (lambda: diagnose(WRITTEN), "diagnose: gpipe has its transfers written out"),
    ],
)
def test_something_else_than_what_is_asked_for_is_named(call, told):
    with pytest.raises(ValueError, match=told):
        call()


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
    if seen.stages != other.stages or not seen.crossing:  # one device shows no transfer
        return
    if (Kind.I in seen.kinds) != (Kind.I in other.kinds):  # I and W are not B's parts
        return
    found = fit(lay(seen, flat(seen), 0.5, lost))
    assert simulate(other, found).makespan == pytest.approx(
        lay(other, flat(other), 0.5, lost).makespan
    )


def test_fit_averages_what_varies_and_leaves_out_the_first_batch():
    schedule = make("gpipe", 2, 4, batches=2)
    duration = flat(schedule)
    duration[microbatches_of(schedule) < 4] *= 20
    duration[schedule.position[1, Kind.B, 4]] += 0.8  # one of four backwards that count
    duration[kinds_of(schedule) == Kind.U] = 0
    found = fit(measured := lay(schedule, duration))
    # All of stage 1's are on the longest chain, so that means predict it.
    assert found.forward == pytest.approx([1, 1.25])
    assert np.add(found.input_grad, found.weight_grad) == pytest.approx([1.5, 1.75 + 0.8 / 4])
    duration[schedule.position[0, Kind.B, 4]] += 0.8  # beside the longest chain
    found = fit(measured := lay(schedule, duration))
    scale = found.forward[0]
    assert scale < 1
    assert found.forward == pytest.approx([scale, 1.25 * scale])
    seen = measured.warmed_up().makespan
    assert simulate(schedule, found).warmed_up().makespan == pytest.approx(seen)


def test_fit_tells_lost_time_from_latency():
    schedule = make("gpipe", 2, 3)
    wait = np.zeros(schedule.bounds[-1])
    at = schedule.position
    # Two of device 0's; of device 1's none waits but for its input.
    wait[[at[0, Kind.F, 1], at[0, Kind.F, 2]]] = 0.2
    wait[at[1, Kind.F, 0]] = wait[at[0, Kind.B, 0]] = 3
    wait[at[1, Kind.U, 0]] = 50  # an update may wait for other stages: no time lost
    t = lay(schedule, flat(schedule, 10), 0.5, wait)
    fed = [
        i for i in schedule.crossing if t.spans[i].arrived > t.end[i - 1] or i in schedule.bounds
    ]
    prompt = [
        i
        for i, action in enumerate(schedule.actions)
        if i not in (*fed, *schedule.bounds) and action.kind is not Kind.U
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
    assert (found.weights, found.optimizer) == ((2, 3, 2, 3), (4, 3, 4, 3))
    assert not any(found.activations)
