"""The generators: their figures, completeness, peaks and versions over all small sizes."""

from contextlib import suppress
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelab import Costs, Kind, Reads, ScheduleError, make, memory, simulate, validate
from pipelab.optimize.order import memory_used
from pipelab.optimize.order.best import named_schedules
from pipelab.optimize.order.problem import OrderProblem
from pipelab.predict.theory import THEORY
from pipelab.schedules import SCHEDULES, takes
from pipelab.schedules.names import ALSO_KNOWN_AS
from tests.conftest import SPLIT, examples, tables
from tests.support import passing

FIGURES = {
    ("inter_layer", 3, 2, 1): """
        0F0 .   .   .   .   0B0 0F1 .   .   .   .   0B1 0U0
        .   1F0 .   .   1B0 .   .   1F1 .   .   1B1 1U0 .
        .   .   2F0 2B0 .   .   .   .   2F1 2B1 2U0 .   .""",
    ("gpipe", 3, 3, 1): """
        0F0 0F1 0F2 .   .   .   .   0B0 0B1 0B2 0U0
        .   1F0 1F1 1F2 .   .   1B0 1B1 1B2 1U0 .
        .   .   2F0 2F1 2F2 2B0 2B1 2B2 2U0 .   .""",
    ("pipedream", 3, 4, 1): """
        0F0 0F1 0F2 .   .   0B0 0U0 0F3 0B1 0U1 .   0B2 0U2 .   0B3 0U3
        .   1F0 1F1 .   1B0 1U0 1F2 1B1 1U1 1F3 1B2 1U2 .   1B3 1U3 .
        .   .   2F0 2B0 2U0 2F1 2B1 2U1 2F2 2B2 2U2 2F3 2B3 2U3 .   .""",
    # Row 0 begins as in the figure of its paper.
    ("pipedream_2bw", 3, 3, 2): """
        0F0 0F1 0F2 .   .   0B0 0F3 0B1 0F4 0B2 0U0 0F5 0B3 .   0B4 .   0B5 0U1
        .   1F0 1F1 .   1B0 1F2 1B1 1F3 1B2 1U0 1F4 1B3 1F5 1B4 .   1B5 1U1 .
        .   .   2F0 2B0 2F1 2B1 2F2 2B2 2U0 2F3 2B3 2F4 2B4 2F5 2B5 2U1 .   .""",
    ("pipedream_flush", 3, 4, 1): """
        0F0 0F1 0F2 .   .   0B0 0F3 0B1 .   0B2 .   0B3 0U0
        .   1F0 1F1 .   1B0 1F2 1B1 1F3 1B2 .   1B3 1U0 .
        .   .   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2U0 .   .""",
    ("interleaved", 2, 2, 1): """
        0F0 0F1 2F0 2F1 .   2B0 .   2B1 0B0 0B1 0U0 2U0
        .   1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1 1U0 3U0 .""",
    ("looped_bfs", 2, 2, 1): """
        0F0 0F1 2F0 2F1 .   .   2B0 2B1 0B0 0B1 0U0 2U0
        .   1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1 1U0 3U0 .""",
    ("eager_1f1b", 3, 5, 1): """
        0F0 0F1 0F2 0F3 0F4 0B0 .   0B1 .   0B2 .   0B3 .   0B4 0U0
        .   1F0 1F1 1F2 1B0 1F3 1B1 1F4 1B2 .   1B3 .   1B4 1U0 .
        .   .   2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3 2F4 2B4 2U0 .   .""",
    ("zb_h1", 3, 4, 1): """
        0F0 0F1 0F2 .   .   0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3 0U0
        .   1F0 1F1 .   1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3 1U0
        .   .   2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3 2U0""",
    ("zb_h2", 3, 6, 1): """
        0F0 0F1 0F2 0F3 0F4 0I0 0W0 0F5 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4 0I5 0W5 0U0 .   .
        .   1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1F5 1I3 1W1 1I4 1W2 1I5 1W3 1W4 1W5 1U0 .
        .   .   2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2F5 2I5 2W1 2W2 2W3 2W4 2W5 2U0""",
}


@pytest.mark.parametrize("size", FIGURES, ids=lambda size: size[0])
def test_the_grid_is_the_figure(size):
    name, p, m, batches = size
    schedule = make(name, p, m, batches=batches, virtual=2 if takes(name, "virtual") else 1)
    assert schedule.grid().split() == FIGURES[size].split()


@given(tables())
def test_complete_in_order_and_free_of_deadlock(case):
    schedule, p, m, v, batches = case
    validate(schedule)
    passes = 3 if schedule.name in SPLIT else 2
    count = p * v * (passes * m * batches + schedule.updates)
    assert sum(map(len, schedule.rows)) == count
    assert schedule.updates == (m * batches if schedule.name == "pipedream" else batches)


def test_peaks_of_split_backwards_are_the_papers():
    """Section 2.3, counted from 0: H1 (p - s, s), H2 (2 (p - s) - 1, 2 s)."""
    for name, peaks in (
        ("zb_h1", [(4, 0), (3, 1), (2, 2), (1, 3)]),
        ("zb_h2", [(7, 0), (5, 2), (3, 4), (1, 6)]),
    ):
        for_weights = [THEORY[name].for_weights(device, 4, 8) for device in range(4)]
        in_flight = make(name, 4, 8).peak_in_flight
        assert [(n - w, w) for n, w in zip(in_flight, for_weights, strict=True)] == peaks


seconds = st.sampled_from([0, 0.5, 1, 1.25, 3])


@examples(60)
@given(st.data(), st.integers(1, 6), st.integers(1, 12), st.integers(1, 2))
def test_the_automatic_schedule_keeps_to_its_memory(data, p, m, batches):
    """Any costs, any memory: complete, no deadlock, nowhere more bytes than the limit."""
    each = st.lists(seconds, min_size=p, max_size=p)
    costs = Costs(
        forward=data.draw(each),
        input_grad=data.draw(each),
        weight_grad=data.draw(each),
        transfer=data.draw(seconds),
        activations=1,
        weight_activations=data.draw(st.sampled_from([0, 0.4, 1, 1.5])),
    )
    least = max(1, costs.weight_activations)
    limit = data.draw(st.sampled_from([1, p, 1.25 * p, 1.5 * p, 2 * p])) * least
    found = simulate(make("zb", p, m, batches=batches, costs=costs, memory=limit), costs)
    assert max(memory(found, costs).peak("activations")) <= limit + 1e-9


@examples(25)
@given(st.data(), st.sampled_from(["zb", "zb_v"]), st.integers(1, 5), st.integers(1, 9))
def test_no_named_schedule_of_its_placement_that_fits_is_faster(data, name, p, m):
    placement = make(name, p, 1).placement
    each = st.lists(st.floats(0.1, 4), min_size=len(placement), max_size=len(placement))
    passes = data.draw(each), data.draw(each), data.draw(each)
    overhead = data.draw(st.sampled_from([0, 0.5]))
    costs = Costs(*passes, transfer=data.draw(seconds), overhead=overhead)
    memory = p * data.draw(st.sampled_from([1, 1.25, 1.5, 2, np.inf]))
    found = simulate(make(name, p, m, costs=costs, memory=memory), costs)
    problem = OrderProblem(costs, placement, m, memory, split=True)
    loops = {"interleaved", "looped_bfs"}  # on one device a V is a loop, too
    for other_name, other in named_schedules(problem):
        if problem.fits(other) and other_name not in loops:
            assert found.span <= simulate(other, costs).span * (1 + 1e-9)


def test_many_micro_batches_repeat_a_period_of_a_v():
    """One at a time: each row has PERIOD actions more, those of one micro-batch in its steady
    state; all devices stay as busy."""
    for name, p in (("v_half", 5), ("v_min", 4)):
        idle = {m: simulate(make(name, p, m)).span - 6 * m for m in (2 * p, 3 * p, 40 * p)}
        assert len(set(idle.values())) == 1
        assert validate(make(name, p, 40 * p)).peak_in_flight == make(name, p, 2 * p).peak_in_flight


def test_other_orders_train_as_1f1b_does_to_the_bit():
    names = ("pipedream_flush", "eager_1f1b", *SPLIT, "zb")
    first, *others = (passing(make(name, 3, 4, batches=2)).losses for name in names)
    assert all(found == first for found in others)


def test_the_automatic_schedule_between_h1_and_h2():
    figure = """
        0F0 0F1 0F2 0F3 .   0I0 0W0 0I1 0F4 0I2 0W1 0I3 0W2 0W3 0I4 0W4 0U0 .
        .   1F0 1F1 1F2 1I0 1F3 1I1 1W0 1I2 1F4 1I3 1W1 1W2 1I4 1W3 1W4 1U0 .
        .   .   2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2W0 2F4 2I4 2W1 2W2 2W3 2W4 2U0"""
    assert make("zb", 3, 5, memory=4).grid().split() == figure.split()


def test_the_automatic_schedules_memory():
    assert make("zb", 4, 8).rows == make("zb", 4, 8, memory=4).rows
    assert make("zb", 4, 8, memory=1).peak_in_flight == [1, 1, 1, 1]
    assert make("zb", 4, 8, memory=8).peak_in_flight == make("zb_h2", 4, 8).peak_in_flight
    for size in (0.5, float("nan")):
        message = f"memory={size}: zb finds no order .* give at least 1, or"
        with pytest.raises(ScheduleError, match=message):
            make("zb", 4, 8, memory=size)
    costs = Costs(activations=2, weight_activations=3)  # a split backward takes 1.5
    whole = make("zb", 4, 8, memory=1, costs=costs)
    assert Kind.W not in whole.kinds and memory_used(whole, costs) == [1, 1, 1, 1]


@given(tables(names=("pipedream",)))
def test_vertical_sync_keeps_p_versions_on_every_stage(case):
    _, p, m, _, batches = case
    kept = make("pipedream", p, m, batches=batches, reads=Reads.FIRST).weight_versions
    assert len(set(kept)) == 1
    if m * batches >= 2 * p - 2:
        assert kept == [p] * p


def test_2bw_needs_as_many_micro_batches_as_devices():
    with pytest.raises(ScheduleError, match="needs microbatches >= devices, got 3 < 4"):
        make("pipedream_2bw", 4, 3)


@pytest.mark.parametrize(("m", "makespan"), [(5, 45), (6, 48), (7, 53), (8, 57), (9, 67)])
def test_interleaved_where_p_does_not_divide_m(m, makespan):
    # A chunk's forward takes 1, its backward 2: half units of the model of two chunks.
    assert simulate(make("interleaved", 4, m, virtual=2)).makespan == makespan


@pytest.mark.parametrize(
    ("name", "other"), [("interleaved", "pipedream_flush"), ("looped_bfs", "gpipe")]
)
def test_with_one_chunk_a_device_it_is_another_schedule_row_for_row(name, other):
    for p, m, batches in product(range(1, 9), range(1, 9), (1, 2)):
        one = make(name, p, m, virtual=1, batches=batches)
        assert one.rows == make(other, p, m, batches=batches).rows, (p, m, batches)


def test_overlapped_1f1b_with_one_chunk_is_never_slower_than_1f1b():
    for p, m in product(range(1, 9), range(1, 17)):
        pairs, plain = (simulate(make(x, p, m)) for x in ("overlapped_1f1b", "pipedream_flush"))
        assert pairs.makespan <= plain.makespan, (p, m)


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_more_micro_batch_is_never_faster(name):
    largest = 4 if takes(name, "memory") else 6  # of a searched one each table takes long
    for p, v in product(range(1, largest + 1), range(1, 4) if takes(name, "virtual") else [1]):
        spans = []
        for m in range(1, 14):
            with suppress(ScheduleError):
                spans.append(simulate(make(name, p, m, virtual=v)).makespan)
        assert spans == sorted(spans), (p, v)


@given(tables())
def test_more_batches_are_the_same_batch_again(case):
    schedule, p, m, v, _ = case
    if schedule.name in ("pipedream", "pipedream_2bw"):
        return
    one, two = make(schedule.name, p, m, virtual=v), make(schedule.name, p, m, virtual=v, batches=2)
    for row, twice in zip(one.rows, two.rows, strict=True):
        shifted = [
            a._replace(microbatch=a.microbatch + (1 if a.kind is Kind.U else m)) for a in row
        ]
        assert list(row) + shifted == list(twice)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gpip", 4, 8), "unknown schedule 'gpip': did you mean gpipe?"),
        (("1F1B", 4, 8), "did you mean pipedream_flush?"),
        (("Interleaved1F1B", 4, 8), "did you mean interleaved. That is its name here"),
        (("ScheduleZBVZeroBubble", 4, 8), "did you mean zb_v. That is its name here"),
        (("DualPipeV", 4, 8), "did you mean dualpipe_v. That is its name here"),
        (("LoopedBFS", 4, 8), "did you mean looped_bfs. That is its name here"),
        (("InterleavedZeroBubble", 4, 8), "did you mean zb_interleaved"),
        (("ZB-H2", 4, 8), "did you mean zb_h2. "),
        (("inference", 4, 8), "'inference': Every schedule's forwards run alone by pipelab.eval"),
        (("Hanayo", 4, 8), "'Hanayo': Its waves are a placement of a search"),
        (("nope", 4, 8), "'nope': There are chimera"),
        ((None, 4, 8), "unknown schedule None"),
        (("gpipe", -1, 8), "devices=-1: give a whole number of at least 1"),
        (("gpipe", 4, 0), "microbatches=0"),
        (("gpipe", 4, 8.0), "microbatches=8.0"),
    ],
)
def test_bad_sizes_and_names(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        make(*arguments)


def test_other_names_lead_to_names_that_there_are():
    assert set(ALSO_KNOWN_AS.values()) <= set(SCHEDULES)


def test_chunks_are_for_interleaved_alone():
    with pytest.raises(ScheduleError, match="virtual=2: gpipe fixes its number of stages"):
        make("gpipe", 4, 8, virtual=2)
