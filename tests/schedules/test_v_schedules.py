"""Schedules with two chunks a device in a V: figures, published bubbles, peaks, torch's tables."""

import csv
import io
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.pipelining.schedules import (
    ScheduleDualPipeV,
    ScheduleZBVZeroBubble,
    _add_reduce_grad,
    _add_send_recv,
    _add_unshard_reshard,
)

from pipelab import Costs, Kind, Schedule, ScheduleError, make, memory, simulate, validate
from pipelab.optimize.order import memory_used
from pipelab.predict.theory import THEORY
from pipelab.table.action import Action
from pipelab.table.placement import v_placement
from tests.conftest import V, examples, thorough
from tests.support import passing

FIGURES = {
    ("zb_v", 2, 3): """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0I0 0W0 3F2 3I2 0I1 3W2 0I2 0W1 0W2 0U0 3U0 .
        .   1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2 1U0 2U0""",
    ("v_half", 2, 3): """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 0W0 3W1 3F2 3I2 0I1 3W2 0I2 0W1 0W2 0U0 3U0 .
        .   1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 1I1 2I2 1I2 2W1 1W1 2W2 1W2 1U0 2U0""",
    ("v_min", 3, 2): """
        0F0 0F1 .   .   .   5F0 5I0 5W0 5F1 5I1 5W1 0I0 0W0 .   .   0I1 0W1 0U0 5U0
        .   1F0 1F1 .   4F0 .   4F1 4I0 4W0 .   1I0 4I1 1W0 4W1 1I1 1W1 1U0 4U0 .
        .   .   2F0 3F0 2F1 3F1 .   .   3I0 2I0 3W0 2W0 3I1 2I1 3W1 2W1 2U0 3U0 .""",
    ("dualpipe_v", 2, 4): """
        0F0 0F1 0F2 3F0 3I0 3W0 3F1 0F3 3B1 3F2 0B0 3B2 3F3 0B1 3B3 0I2 0W2 0I3 0W3 0U0 3U0
        .   1F0 2F0 1F1 2F1 1F2 2B0 2F2 1B0 1F3 2B1 2F3 1B1 2B2 1B2 2I3 1I3 2W3 1W3 1U0 2U0""",
}  # fmt: skip


@pytest.mark.parametrize("size", FIGURES, ids=lambda size: size[0])
def test_the_grid_is_the_figure(size):
    assert make(*size).grid().split() == FIGURES[size].split()


def test_the_model_goes_down_the_devices_and_back():
    assert v_placement(4) == (0, 1, 2, 3, 3, 2, 1, 0)
    costs = Costs(transfer=100)  # nothing is sent in the middle: 3 links down and 3 back, twice
    assert simulate(make("v_min", 4, 1), costs).makespan == 12 * 100 + 17


sizes = st.sampled_from(V), st.integers(1, 8), st.integers(1, 18), st.integers(1, 2)


@given(*sizes)
def test_complete_free_of_deadlock_and_peaks_as_stated(name, p, m, batches):
    schedule = validate(make(name, p, m, batches=batches))
    assert schedule.placement == v_placement(p)
    count = sum({Kind.B: 2}.get(a.kind, 1) for row in schedule.rows for a in row)
    assert count == 2 * p * batches * (3 * m + 1)  # F, I, W of every micro-batch, and an update
    theory = THEORY[name]
    assert schedule.peak_in_flight == [theory.in_flight(d, p, m, 1, batches) for d in range(p)]
    assert schedule.weight_versions == [theory.versions(d, p, m, 1, batches) for d in range(p)]


@pytest.mark.parametrize(
    ("name", "idle"), [("v_half", (5, 11, 17)), ("v_min", (11, 17, 27)), ("zb_v", (0, 0, 0))]
)
def test_unit_bubbles_and_peaks_are_no_larger_than_the_papers(name, idle):
    for p, published in zip((4, 6, 8), idle, strict=True):
        found = simulate(make(name, p, 4 * p))
        assert found.span - found.ideal <= published
        micro_batches = {"v_half": (p + 2) // 2, "v_min": (p + 4) // 3, "zb_v": p}[name]
        assert max(found.peak_in_flight) <= 2 * micro_batches


@given(st.integers(1, 6), st.integers(0, 4), st.floats(0, 2), st.floats(0, 2))
def test_dualpipe_vs_bubble_without_overlap(p, more, w, longer):
    """The paper's (p - 1) (F&B + B - 3 W), in the stages of its V, counts a pair as one action that
    sends when it ends; here its forward sends before the backward begins, which saves an I."""
    f = i = w + longer
    found = simulate(make("dualpipe_v", p, 2 * p + more), Costs(f, i, w))
    assert found.span - found.ideal == pytest.approx((p - 1) * (f + i - w))


# Zero Bubble (arXiv 2401.10241), table 8, and its sweep of the memory: p, m, F, I, W of a chunk,
# transfer, hidden size, heads -> memory over p: bubble. M_B = 34 h + 5 a s, M_W = 32 h, s = 1024.
SWEEP = {1: 0.0697, 1.25: 0.0306, 1.5: 0.0065, 1.75: 0.0035}
PUBLISHED = [
    (16, 48, 14407, 14380, 9676, 1610, 4096, 32, {1.5: SWEEP[1.5]}),
    *thorough(
        (16, 48, 14407, 14380, 9676, 1610, 4096, 32, SWEEP),
        (16, 64, 14412, 14393, 9688, 1621, 4096, 32, {1: 0.0533}),
        (32, 96, 9458, 9748, 7288, 879, 5120, 40, {1: 0.0593}),
    ),
]


@pytest.mark.parametrize(("p", "m", "f", "i", "w", "c", "h", "a", "rates"), PUBLISHED)
def test_zb_v_is_no_worse_than_published(p, m, f, i, w, c, h, a, rates):
    kept, for_weights = 34 * h + 5 * a * 1024, 32 * h
    costs = Costs(f, i, w, transfer=c, activations=kept, weight_activations=for_weights)
    for times, rate in rates.items():
        found = simulate(make("zb_v", p, m, costs=costs, memory=times * p), costs)
        assert round(found.bubble.of_span, 4) <= rate
        assert max(memory(found, costs).peak("activations")) <= times * 2 * p * kept


@examples(40)
@given(st.data(), st.integers(1, 4), st.integers(1, 9))
def test_zb_v_keeps_to_its_memory(data, p, m):
    """Stages that differ, and any memory that holds a micro-batch; the bubble may be large."""

    def of_stages(most):
        each = st.lists(st.floats(0.25, most), min_size=2 * p, max_size=2 * p)
        return data.draw(each)

    transfer, share = data.draw(st.floats(0, 1)), data.draw(st.floats(0, 1.5))
    seconds = of_stages(2), of_stages(2), of_stages(2)
    costs = Costs(*seconds, transfer=transfer, activations=1, weight_activations=share)
    fits = max(1, share) * data.draw(st.sampled_from([1, (p + 1) / 2, p, 1.5 * p]))
    table = validate(make("zb_v", p, m, costs=costs, memory=fits))
    assert max(memory(simulate(table, costs), costs).peak("activations")) <= 2 * fits * (1 + 1e-6)


def test_less_than_a_micro_batch_is_no_memory():
    for less in (0.9, float("nan")):
        with pytest.raises(ScheduleError, match=f"memory={less}: zb_v .* give at least 1, or"):
            make("zb_v", 4, 8, memory=less)
    assert max(make("zb_v", 4, 8, memory=1).peak_in_flight) == 2  # one, of each of two chunks


@pytest.mark.parametrize("name", ["v_half", "v_min"])
def test_zb_v_in_less_memory_is_no_slower_than_the_blocks(name):
    block = make(name, 8, 16)
    found = make("zb_v", 8, 16, batches=2, memory=max(block.peak_in_flight) / 2)
    assert simulate(found.part(0, 1)).span <= simulate(block).span
    assert max(found.peak_in_flight) <= max(block.peak_in_flight)


def test_zb_v_may_have_any_memory_and_devices_without_bytes():
    assert make("zb_v", 3, 8, memory=float("inf")) == make("zb_v", 3, 8, memory=1e6)
    costs = Costs(weight_grad=[1.5, 2, 1, 1, 2, 1.5], activations=[1, 0, 2, 2, 0, 1])
    assert max(memory_used(make("zb_v", 3, 12, costs=costs), costs)) <= 3


# ---- torch's tables


def of_torch(kind, p, m):
    """torch's rows, by rank."""
    sizes = SimpleNamespace(pp_group_size=p, num_stages=2 * p, _n_microbatches=m)
    return {rank: kind._calculate_single_rank_operations(sizes, rank) for rank in range(p)}


def dumped(rows):
    """What torch's `_dump_csv` writes of rows."""
    text = io.StringIO(newline="")
    csv.writer(text).writerows(rows.values())
    return text.getvalue()


def cells_of_torch(kind, p, m):
    return [[str(cell) for cell in row if cell] for row in of_torch(kind, p, m).values()]


def compute_of(schedule):
    return [[str(a) for a in row if a.kind is not Kind.U] for row in schedule.rows]


def test_dualpipe_v_is_torchs():
    """Also as torch dumps it: pairs that it overlaps in a cell, by default also what its runtime
    adds, transfers among them. It refuses fewer micro-batches than stages."""
    for p in range(1, 6):
        home = (*range(p), *reversed(range(p)))
        for m in range(2 * p, 2 * p + 5):
            rows, ours = of_torch(ScheduleDualPipeV, p, m), make("dualpipe_v", p, m).overlap()
            # The last device computes its first pair one after the other.
            ours = replace(ours, overlapped=ours.overlapped - {Action(p, Kind.B, 0)})
            assert "OVERLAP_F_B" in dumped(rows)
            assert Schedule.from_csv(dumped(rows), ours.name) == ours
            full = {r: _add_reduce_grad(_add_unshard_reshard(row), m) for r, row in rows.items()}
            text = dumped(_add_send_recv(full, home.__getitem__, 2 * p))
            assert "0UNSHARD" in text and Schedule.from_torch_csv(text, ours.name) == ours
            written = validate(Schedule.from_csv(text, ours.name))
            assert set(written.actions) == set(ours.with_transfers().actions)


def with_torchs_weights(row, rank, p, m):
    """A row of F and I with W where torch has it: behind its I, but for the drain's p + rank I.

    There the last p - rank I each free the oldest W of the first chunk; then the second chunk's.
    """
    found, waiting = [], []
    left = sum("I" in cell for cell in row)
    for cell in row:
        found.append(cell)
        if "I" not in cell:
            continue
        weights = cell.replace("I", "W")
        if left > p + rank:
            found.append(weights)
        else:
            waiting.append(weights)
        if left <= p - rank:
            first = next(w for w in waiting if w.startswith(f"{rank}W"))
            waiting.remove(first)
            found.append(first)
        left -= 1
    waiting.sort(key=lambda weights: weights.startswith(f"{rank}W"))
    return [cell for cell in found + waiting if int(re.split("[FIW]", cell)[1]) < m]


def test_zb_v_has_torchs_forwards_and_input_gradients_and_is_no_slower():
    """With F = I = W and p micro-batches' memory the orders of F and I are one; ours puts W where a
    device would wait. From 2 p - 1 micro-batches on no device waits in either. With fewer, torch's
    is the table of 2 p - 1 without the absent ones: p = m = 4 takes 6 units more, ours 3."""
    for p in range(1, 5):
        for m in range(1, 2 * p + 3):
            ours, theirs = make("zb_v", p, m), cells_of_torch(ScheduleZBVZeroBubble, p, m)
            full = compute_of(make("zb_v", p, max(m, 2 * p - 1)))
            for rank, row in enumerate(full):
                order = [cell for cell in row if "W" not in cell]
                assert theirs[rank] == with_torchs_weights(order, rank, p, m), (p, m, rank)
                mine = [cell for cell in compute_of(ours)[rank] if "W" not in cell]
                assert mine == [cell for cell in theirs[rank] if "W" not in cell]
            table = Schedule.from_torch_csv("\n".join(map(",".join, theirs)), "theirs")
            assert simulate(ours).span <= simulate(validate(table)).span
            assert max(ours.peak_in_flight) == max(table.peak_in_flight)
            if p == m == 4:
                assert [simulate(t).span - 24 for t in (ours, table)] == [3, 6]


# ---- for real


@pytest.mark.parametrize("name", ["zb_v", "dualpipe_v"])
def test_a_v_runs_and_its_gradients_are_right(name):
    spans = passing(make(name, 2, 4)).timeline.spans
    moved = [span for span in spans if span.arrived is not None]
    assert len(moved) == 4 * 4  # of a micro-batch: two links, there and back
