"""The six generators: their figures, completeness, peaks and versions over all small sizes."""

import pytest
from hypothesis import given

from pipelab import Kind, Reads, ScheduleError, make, simulate, validate
from pipelab.theory import THEORY
from tests.conftest import tables

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
}


@pytest.mark.parametrize("size", FIGURES, ids=lambda size: size[0])
def test_the_grid_is_the_figure(size):
    name, p, m, batches = size
    schedule = make(name, p, m, batches=batches, virtual=2 if name == "interleaved" else 1)
    assert schedule.grid().split() == FIGURES[size].split()


@given(tables())
def test_complete_in_order_and_free_of_deadlock(case):
    schedule, p, m, v, batches = case
    validate(schedule)
    count = p * v * (2 * m * batches + schedule.updates)
    assert sum(map(len, schedule.rows)) == count
    assert schedule.updates == (m * batches if schedule.name == "pipedream" else batches)


@given(tables())
def test_peaks_and_versions_are_the_closed_forms(case):
    schedule, p, m, v, batches = case
    theory = THEORY[schedule.name]
    assert schedule.weight_versions == [theory.versions(d, p, m, v, batches) for d in range(p)]
    if schedule.name != "interleaved" or m % p == 0:
        assert schedule.peak_in_flight == [theory.in_flight(d, p, m, v, batches) for d in range(p)]
    else:
        assert all(
            peak <= theory.in_flight(d, p, m, v, batches)
            for d, peak in enumerate(schedule.peak_in_flight)
        )


@given(tables(names=("pipedream",)))
def test_vertical_sync_keeps_p_versions_on_every_stage(case):
    _, p, m, _, batches = case
    kept = make("pipedream", p, m, batches=batches, reads=Reads.FIRST).weight_versions
    assert len(set(kept)) == 1
    if m * batches >= 2 * p - 2:
        assert kept == [p] * p


def test_2bw_stage_0_is_the_papers():
    row = make("pipedream_2bw", 3, 3, batches=3).rows[0]
    assert " ".join(map(str, row)).startswith("0F0 0F1 0F2 0B0 0F3 0B1 0F4 0B2 0U0 0F5 0B3")


def test_2bw_needs_as_many_micro_batches_as_devices():
    with pytest.raises(ScheduleError, match="needs microbatches >= devices, got 3 < 4"):
        make("pipedream_2bw", 4, 3)


@pytest.mark.parametrize(("m", "makespan"), [(5, 45), (6, 48), (7, 53), (8, 57), (9, 67)])
def test_interleaved_where_p_does_not_divide_m(m, makespan):
    # A chunk's forward takes 1, its backward 2: half units of the model of two chunks.
    assert simulate(make("interleaved", 4, m, virtual=2)).makespan == makespan


@given(tables(names=("interleaved",)))
def test_interleaved_with_one_chunk_is_1f1b(case):
    _, p, m, _, batches = case
    assert (
        make("interleaved", p, m, virtual=1, batches=batches).rows
        == make("pipedream_flush", p, m, batches=batches).rows
    )


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
        (("gpipe", -1, 8), "devices=-1: give a whole number of at least 1"),
        (("gpipe", 4, 0), "microbatches=0"),
        (("gpipe", 4, 8.0), "microbatches=8.0"),
    ],
)
def test_bad_sizes_and_names(arguments, message):
    with pytest.raises(ScheduleError, match=message):
        make(*arguments)


def test_chunks_are_for_interleaved_alone():
    with pytest.raises(ScheduleError, match="virtual=2: gpipe has its own number of stages"):
        make("gpipe", 4, 8, virtual=2)
