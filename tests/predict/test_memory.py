"""Simulated memory by cause."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelab import Costs, Kind, Recompute, Schedule, make, memory, simulate
from pipelab.predict.memory import MEMORY_CAUSES, changes, memory_used, reserved, shares
from tests.conftest import SPLIT, tables


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
        assert min(map(min, level.values())) >= -1e-9
        assert level["activations"][-1] == level["gradients"][-1] == level["versions"][-1] == 0


@pytest.mark.parametrize(
    ("mode", "peaks"), [(Recompute.NEVER, 80), (Recompute.EXCEPT_LAST, 26), (Recompute.ALWAYS, 17)]
)
def test_recomputation_keeps_only_the_input(mode, peaks):
    # 8 in flight: 8 x 10; 7 inputs, the last in full and one running again; 8 inputs of which one
    # grows to 10.
    costs = Costs(activations=10, boundary=1, recompute=mode)
    assert memory(simulate(make("gpipe", 4, 8), costs), costs).peak("activations") == [peaks] * 4


@pytest.mark.parametrize("name", ["gpipe", "pipedream_flush", "interleaved", "pipedream"])
@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("latency", [0, 0.5, 0.7, 1])
def test_peaks_do_not_depend_on_the_unit_of_time(name, virtual, latency):
    """What arrives at the moment when it is used is no buffer, whatever rounding says.

    Nor does it count beside what is given back at that moment.
    """
    if name == "interleaved":
        schedule = make(name, 2, 4, virtual=virtual, batches=2)
    else:
        schedule = make(name, 2 * virtual, 4, batches=2)
    sizes = {"activations": 1, "boundary": 0.25}
    peaks = [
        memory(simulate(schedule, costs), costs).peak()
        for unit in (1, 0.1, 0.3, 1 / 7, 1.1)
        for costs in [Costs(unit, unit, unit, transfer=latency * unit, **sizes)]
    ]
    assert all(peak == peaks[0] for peak in peaks)


def test_an_input_that_waited_counts_once():
    """When its forward starts it leaves the buffer and is part of the activations."""
    costs = Costs(forward=[1, 1 + 1e-6], boundary=100, activations=100)
    found = memory(simulate(make("gpipe", 2, 2), costs), costs)
    assert found.peak() == [200, 200]
    assert sum(found.at_peak(1).values()) == 200


def test_what_recomputation_kept_counts_once():
    """When its backward starts, the input is part of the activations that are built again."""
    costs = Costs(boundary=100, activations=100, recompute=Recompute.ALWAYS)
    found = memory(simulate(make("gpipe", 1, 2), costs), costs)
    assert found.peak() == [200]


@given(
    tables(largest=4),
    st.sampled_from(list(Recompute)),
    st.integers(0, 3),
    st.lists(st.integers(1, 3), min_size=16, max_size=16),
)
def test_the_peak_is_that_of_a_moment_that_lasts(case, recompute, transfer, seconds):
    """All times are whole: what is held in the middle of a second is what counts."""
    schedule = case[0]
    forward = seconds[: schedule.stages]
    sizes = {"activations": 8, "weight_activations": 5, "boundary": 3}
    costs = Costs(forward, transfer=transfer, recompute=recompute, **sizes)
    split = schedule.name in SPLIT
    t = simulate(schedule, costs)
    held = []  # (device, from, to, bytes)
    spans = {span.action: (span.start, span.end) for span in t.spans}
    again = recompute.mask(schedule.total, schedule.microbatches)
    for stage, device in enumerate(schedule.placement):
        for k in range(schedule.total):
            forward = spans[stage, Kind.F, k]
            backward = spans[stage, Kind.I if split else Kind.B, k]
            held.append((device, forward[0], backward[0], 3 if again[k] else 8))
            held.append((device, *backward, 8))
            if split:
                held.append((device, backward[1], spans[stage, Kind.W, k][1], 5))
    held += [(s.device, s.arrived, s.start, 3) for s in t.spans if s.arrived is not None]
    middles = np.arange(t.makespan) + 0.5
    for device, peak in enumerate(memory(t, costs).peak()):
        levels = sum(
            size * ((since < middles) & (middles < until))
            for home, since, until, size in held
            if home == device
        )
        assert peak == levels.max()


def test_what_a_weight_gradient_needs_is_kept_from_i_to_w():
    table = Schedule.from_grid("0F0 0I0 0F1 0W0 0I1 0W1")
    found = memory(simulate(table), Costs(activations=10, weight_activations=4))
    time, level = found.over_time(0)
    assert dict(zip(time, level["activations"], strict=True)) == {0: 10, 2: 14, 4: 10, 5: 4, 6: 0}


PLACEMENTS = ((0,), (0, 1), (0, 1, 0, 1), (0, 1, 1, 0))


@given(st.sampled_from(PLACEMENTS), st.data())
def test_a_micro_batch_on_a_device_counts_one(placement, data):
    n = len(placement)
    sizes = st.lists(st.sampled_from([0.0, 1.0, 3.0]), min_size=n, max_size=n)
    costs = Costs(activations=data.draw(sizes), weight_activations=data.draw(sizes))
    whole, late = (shares(costs, placement, x) for x in ("activations", "weight_activations"))
    for device in range(max(placement) + 1):
        mine = [s for s in range(n) if placement[s] == device]
        held = sum(costs.activations[s] for s in mine)
        assert sum(whole[s] for s in mine) == pytest.approx(1)
        if held:
            assert [whole[s] * held for s in mine] == pytest.approx(
                [costs.activations[s] for s in mine]
            )
            assert [late[s] * held for s in mine] == (
                pytest.approx([costs.weight_activations[s] for s in mine])
            )
        else:
            assert {late[s] for s in mine} == {1 / len(mine)}
    change = changes(costs, placement)
    assert change[Kind.F] == whole and change[Kind.B] == [-x for x in whole]
    for s in range(n):
        assert change[Kind.F][s] + change[Kind.I][s] + change[Kind.W][s] == pytest.approx(0)
        assert change[Kind.W][s] == -late[s]
        kept = reserved(change)
        assert kept[Kind.I][s] == min(change[Kind.I][s], 0)
        assert kept[Kind.F][s] == pytest.approx(max(whole[s], late[s]))
        assert kept[Kind.W] == change[Kind.W] and kept[Kind.B] == change[Kind.B]


def test_memory_is_counted_in_the_order_of_a_row():
    costs = Costs(activations=[3, 1], weight_activations=[6, 0])
    table = Schedule.from_grid("0F0 1F0 1I0 1W0 0I0 0F1 0W0 1F1 1I1 1W1 0I1 0W1")
    # 3/4, 1, 3/4, 3/4, 6/4, 9/4, 3/4, 1, 3/4, 3/4, 6/4, 0
    assert memory_used(table, costs) == [2.25]
    assert memory_used(make("gpipe", 2, 3), Costs()) == [3, 3]


def test_levels_over_time_and_at_the_peak():
    costs = Costs(weights=10, optimizer=20, activations=4, boundary=1, transfer=0.5)
    found = memory(simulate(make("gpipe", 2, 1), costs), costs)
    # device 0: F 0-1, B 5-7, U 7-7; device 1: F 1.5-2.5, B 2.5-4.5, U 4.5
    assert [(s.time, s.cause, s.change) for s in found.of_device[0]] == [
        *((0, "weights", 10), (0, "optimizer", 20), (0, "activations", 4)),
        *((5, "gradients", 10), (7, "activations", -4), (7, "gradients", -10)),
    ]
    assert found.peak() == [44, 44] and found.peak("gradients") == [10, 10]
    filled = {"weights": 10, "optimizer": 20, "activations": 4, "gradients": 10}
    assert found.at_peak(0) == dict.fromkeys(MEMORY_CAUSES, 0) | filled
    assert memory(simulate(make("gpipe", 1, 1)), Costs(weights=1)).at_peak(0)["activations"] == 0
    forwards = make("gpipe", 2, 2).forward_only()
    alone = memory(simulate(forwards), Costs(activations=4))
    assert alone.peak() == [4, 4] and alone.steps[-1].change == -4


def test_gradients_and_versions_of_an_asynchronous_table():
    costs = Costs(weights=10, update=1)
    t = simulate(make("pipedream", 2, 3), costs)
    # device 0: F0 0-1, F1 1-2, B0 4-6, U0 6-7, F2 7-8, B1 8-10, U1 10-11, ...
    steps = memory(t, costs).of_device[0]
    of = {c: [(s.time, s.change) for s in steps if s.cause == c] for c in ("gradients", "versions")}
    begins = [t.start[t.schedule.position[0, Kind.B, k]] for k in range(3)]
    ends = [t.end[t.schedule.position[0, Kind.U, k]] for k in range(3)]
    assert of["gradients"] == [
        pair for a, b in zip(begins, ends, strict=True) for pair in ((a, 10), (b, -10))
    ]
    made = [t.start[t.schedule.position[0, Kind.U, k]] for k in range(3)]
    read = [t.end[t.schedule.position[0, Kind.B, k]] for k in range(3)]
    # Version 0 is read by the backward of 1, version 1 by that of 2: each outlives the next one.
    assert of["versions"] == [(made[0], 10), (read[1], -10), (made[1], 10), (read[2], -10)]
    split = memory(simulate(make("zb_h1", 1, 2)), Costs(weights=10))  # 0F0 0I0 0W0 0F1 ...
    found = [(s.time, s.change) for s in split.steps if s.cause == "gradients"]
    assert found == [(1, 10), (6, -10)]
    part = memory(simulate(make("pipedream", 2, 1, batches=4).part(2, 4)), Costs(weights=10))
    assert part.peak("versions") == [10, 0]


def test_buffers_hold_the_input_that_crosses():
    """A forward's is its own stage's, a gradient's that of the stage that sent it."""
    costs = Costs([1, 3], boundary=[5, 7])
    found = memory(simulate(make("gpipe", 2, 3), costs), costs)
    assert found.peak("buffers") == [0, 14]
    slow = Costs([1, 1], [4, 1], 1, boundary=[5, 7])
    assert memory(simulate(make("gpipe", 2, 3), slow), slow).peak("buffers")[0] == 14
    middle = Costs(1, [1, 4, 1], 1, boundary=[5, 7, 11])
    assert memory(simulate(make("gpipe", 3, 3), middle), middle).peak("buffers")[1] == 22


def test_an_action_of_no_length_holds_what_it_needs():
    costs = Costs(0, 0, 0, activations=4)
    assert memory(simulate(make("gpipe", 2, 2).forward_only(), costs), costs).peak() == [4, 4]
    assert memory(simulate(make("gpipe", 2, 2), costs), costs).peak() == [8, 8]


def test_an_input_that_is_kept_is_no_more_than_all_that_a_forward_keeps():
    costs = Costs(activations=2, boundary=5, recompute=Recompute.ALWAYS)
    assert memory(simulate(make("gpipe", 1, 4), costs), costs).peak("activations") == [8]


def test_a_slice_keeps_its_part_of_a_sequences_activations():
    rows = "0F0 0F1 0B1 0F2 0F3 0B3 0B2 0B0 0U0"  # held: 1/4, 1, 1/4, 1/2, 5/4, ...
    table = Schedule.from_grid(f"# slices=1 3 microbatches=4\n{rows}")
    assert memory_used(table, Costs()) == [1.25]
    assert memory(simulate(table), Costs(activations=8)).peak() == [10]
    again = Costs(activations=8, boundary=4, recompute=Recompute.ALWAYS)
    # Before 0B3: inputs of two slices of 1/4 and one of 3/4, which then becomes whole.
    assert memory(simulate(table, again), again).peak("activations") == [1 + 1 + 6]


def test_what_is_offloaded_takes_no_memory():
    table = Schedule.from_grid("0F0 0F1+0OFFLOAD0 0F2 0B2+0RELOAD0 0B1 0B0 0U0")
    costs = Costs(activations=10, host=20)  # half a second there, and back
    assert memory_used(table, costs) == [3]
    time, level = memory(simulate(table, costs), costs).over_time(0)
    held = {0: 10, 1: 20, 1.5: 10, 2: 20, 3: 30, 5: 20, 7: 10, 9: 0}
    assert dict(zip(time, level["activations"], strict=True)) == held
