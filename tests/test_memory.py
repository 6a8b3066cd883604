"""Simulated memory by cause."""

import pytest
from hypothesis import given

from pipelab import Costs, Recompute, make, memory, simulate
from pipelab.memory import CAUSES
from tests.conftest import tables


@given(tables(largest=5))
def test_activations_and_versions_are_the_schedules_peaks(case):
    schedule = case[0]
    m = memory(simulate(schedule), Costs(activations=1, weights=10))
    assert m.peak("activations") == schedule.peak_in_flight
    per_device = schedule.stages // schedule.devices
    assert m.peak("weights") == [10 * per_device] * schedule.devices
    if per_device == 1:
        assert [1 + extra / 10 for extra in m.peak("versions")] == schedule.weight_versions
    for device in range(schedule.devices):
        _, level = m.over_time(device)
        assert (level >= -1e-9).all()
        at_end = dict(zip(CAUSES, level[:, -1], strict=True))
        assert at_end["activations"] == at_end["gradients"] == at_end["versions"] == 0


def test_gradients_optimizer_and_buffers():
    m = memory(
        simulate(make("gpipe", 2, 3), Costs(forward=[1, 3])),
        Costs(weights=5, optimizer=7, boundary=2),
    )
    assert m.peak("gradients") == [5, 5]
    assert m.peak("optimizer") == [7, 7]
    assert m.peak("buffers") == [0, 4]  # device 1 is slow: two inputs wait for it
    assert m.peak() == [17, 17]
    assert m.at_peak(0) == {
        "weights": 5,
        "versions": 0,
        "gradients": 5,
        "optimizer": 7,
        "activations": 0,
        "buffers": 0,
    }


@pytest.mark.parametrize(
    ("mode", "peaks"), [(Recompute.NEVER, 80), (Recompute.EXCEPT_LAST, 26), (Recompute.ALWAYS, 17)]
)
def test_recomputation_keeps_only_the_input(mode, peaks):
    # 8 in flight: 8 x 10; 7 inputs, the last in full and one running again; 8 inputs of which one
    # grows to 10.
    costs = Costs(activations=10, boundary=1, recompute=mode)
    assert memory(simulate(make("gpipe", 4, 8), costs), costs).peak("activations") == [peaks] * 4


def test_a_split_backward_frees_at_the_weight_gradient():
    from pipelab import Schedule

    late = Schedule.from_grid("0F0 0F1 0I0 0I1 0W0 0W1")
    assert (
        memory(simulate(late), Costs(activations=1)).peak("activations")
        == late.peak_in_flight
        == [2]
    )
    assert memory(simulate(late), Costs(activations=1)).over_time(0)[0].tolist() == [0, 1, 5, 6]


@pytest.mark.parametrize("name", ["gpipe", "pipedream_flush", "interleaved"])
def test_peaks_do_not_depend_on_the_unit_of_time(name):
    """What arrives at the moment when it is used is no buffer, whatever rounding says."""
    schedule, sizes = make(name, 4, 4), {"activations": 1, "boundary": 0.25}
    peaks = [
        memory(simulate(schedule, costs), costs).peak()
        for unit in (1, 0.1, 0.3, 1 / 7)
        for costs in [Costs(unit, unit, unit, transfer=0.7 * unit, **sizes)]
    ]
    assert all(peak == peaks[0] for peak in peaks)
