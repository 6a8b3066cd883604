"""Weight versions: counted action by action, beside the table's own account."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelab import Kind, Reads, Schedule, make
from tests.conftest import tables


def kept_at_each_action(schedule, stage):
    """The versions of a stage that are there while each action of its row runs."""
    device = schedule.placement[stage]
    row = schedule.rows[device]
    made = {0: -1} | {a.microbatch + 1: i for i, a in enumerate(row) if a[:2] == (stage, Kind.U)}
    uses = {}
    for i, action in enumerate(row):
        if action.stage == stage and action.kind < Kind.U:
            uses.setdefault(schedule.versions[stage, action.microbatch], []).append(i)
    for i in range(len(row)):
        newest = max(version for version, place in made.items() if place <= i)
        read_later = {v for v, places in uses.items() if made.get(v, -1) <= i <= max(places)}
        yield {newest} | read_later


@given(tables(), st.sampled_from(Reads))
def test_the_most_versions_are_those_of_some_action(case, reads):
    schedule = case[0]
    if reads is not Reads.PREVIOUS:
        schedule = replace(schedule, reads=reads)
    most = [0] * schedule.devices
    for stage, device in enumerate(schedule.placement):
        most[device] = max(most[device], *map(len, kept_at_each_action(schedule, stage)))
    # A version read by an action of a row that comes before it is no table that can run.
    if all(version <= schedule.latest[cell] for cell, version in schedule.versions.items()):
        assert schedule.weight_versions == most


def test_lives_begin_with_an_update_and_end_with_the_last_reader():
    #                                  0   1   2   3   4   5   6
    stash = Schedule.from_csv("# microbatches=1 batches=2\n0F0,0F1,0B0,0U0,0B1,0U1\n")
    assert [tuple(life) for life in stash.lives] == [(0, 0, -1, 4), (0, 1, 3, 5), (0, 2, 5, 5)]
    flush = make("gpipe", 2, 1, batches=2)
    assert flush.rows[1] == stash_row(1, "F0 B0 U0 F1 B1 U1")
    assert [tuple(life) for life in flush.lives] == [
        *((0, 0, -1, 2), (0, 1, 2, 5), (0, 2, 5, 5)),
        *((1, 0, -1, 8), (1, 1, 8, 11), (1, 2, 11, 11)),
    ]
    alone = flush.forward_only()
    assert [tuple(life) for life in alone.lives] == [(0, 0, -1, 1), (1, 0, -1, 3)]


def stash_row(stage, text):
    return Schedule.from_csv(
        f"# placement={' '.join('0' for _ in range(stage + 1))} microbatches=1 batches=2\n"
        + ",".join(f"{stage}{cell}" for cell in text.split())
    ).rows[0]


def test_a_part_keeps_what_was_made_before_it():
    part = make("pipedream", 2, 1, batches=4).part(2, 4)
    assert part.versions == {(0, 0): -1, (0, 1): 0, (1, 0): 0, (1, 1): 1}
    assert part.weight_versions == [2, 1]
    assert [tuple(life) for life in part.lives if life.stage == 0][:2] == [
        (0, -1, -1, 2),
        (0, 0, -1, 4),
    ]


@given(tables())
def test_latest_counts_the_updates_before_a_forward(case):
    schedule = case[0]
    for row in schedule.rows:
        for i, action in enumerate(row):
            if action.kind is Kind.F:
                before = sum(a[:2] == (action.stage, Kind.U) for a in row[:i])
                assert schedule.latest[action.stage, action.microbatch] == before


@given(tables())
def test_in_flight_is_forwards_less_backwards(case):
    schedule = case[0]
    for row, peak in zip(schedule.rows, schedule.peak_in_flight, strict=True):
        forwards = [sum(a.kind is Kind.F for a in row[:i]) for i in range(len(row) + 1)]
        ended = [sum(a.kind in (Kind.B, Kind.W) for a in row[:i]) for i in range(len(row) + 1)]
        assert peak == max(a - b for a, b in zip(forwards, ended, strict=True))


@pytest.mark.parametrize(
    ("name", "per_update", "late"),
    [
        ("gpipe", 4, False),
        ("gpipe", 2, True),
        ("pipedream", 1, True),
        ("pipedream_2bw", 4, True),
    ],
)
def test_asynchronous_is_a_forward_without_the_updates_before_it(name, per_update, late):
    schedule = make(name, 2, 4)
    bare = [[a for a in row if a.kind is not Kind.U] for row in schedule.rows]
    schedule = replace(schedule, per_update=per_update, rows=bare)
    assert schedule.asynchronous == late


def test_the_peak_may_come_after_the_first_backward():
    whole = Schedule.from_grid("0F0 0B0 0F1 0F2 0B1 0B2")
    assert whole.peak_in_flight == [2]
    split = Schedule.from_grid("0F0 0I0 0W0 0F1 0F2 0I1 0W1 0I2 0W2")
    assert split.peak_in_flight == [2]


def test_a_single_late_forward_makes_a_table_asynchronous():
    assert make("pipedream", 2, 1, batches=3).asynchronous  # on stage 0 alone
    assert not make("gpipe", 2, 1, batches=3).asynchronous


def test_a_device_without_a_stage_keeps_nothing():
    idle = Schedule("idle", (*make("gpipe", 1, 2).rows, ()), (0,), 2)
    assert idle.weight_versions == [1, 0]
    assert idle.peak_in_flight == [2, 0]


def test_tables_that_cannot_run_have_versions_too():
    lost = Schedule.from_csv("# reads=FIRST microbatches=2\n0F0,0B0,0B1\n1F0,1F1,1B0,1B1")
    assert lost.versions == {(0, 0): 0, (1, 0): 0, (1, 1): 0}
    bare = Schedule.from_csv("0U0")
    assert [tuple(life) for life in bare.lives] == [(0, 0, -1, 0), (0, 1, 0, 0)]
    #                                             0   1   2   3   4   5
    late = Schedule.from_csv("# microbatches=1 batches=2\n0F0,0B0,0U0,0B1,0U1,0F1\n")
    assert [tuple(life) for life in late.lives] == [(0, 0, -1, 2), (0, 1, 2, 4), (0, 2, 4, 5)]


def test_spans_have_the_version_read_or_made_and_when_inputs_came():
    s = Schedule.from_grid("0F0 .   .   0B0 0U0\n.   1F0 1B0 1U0 .")
    start, end = [0.0, 3.0, 4.0, 1.0, 2.0, 2.5], [1.0, 4.0, 5.0, 2.0, 2.5, 3.0]
    spans = s.spans(start, end, {1: (2.5, 2.75), 3: (1.0, None)})
    assert [(x.device, str(x.action), x.version, x.start, x.end) for x in spans] == [
        (0, "0F0", 0, 0.0, 1.0),
        (0, "0B0", 0, 3.0, 4.0),
        (0, "0U0", 1, 4.0, 5.0),
        (1, "1F0", 0, 1.0, 2.0),
        (1, "1B0", 0, 2.0, 2.5),
        (1, "1U0", 1, 2.5, 3.0),
    ]
    assert [(x.sent, x.arrived) for x in spans if x.sent] == [(2.5, 2.75), (1.0, None)]
    # What moved, when it arrived; what did not, when it was made; and what takes nothing.
    assert s.arrivals(spans) == [-math.inf, 2.75, -math.inf, 1.0, -math.inf, -math.inf]


def test_transfers_read_no_version():
    s = Schedule.from_grid("0F0 .   .   0B0 0U0\n.   1F0 1B0 1U0 .").with_transfers()
    count = len(s.actions)
    spans = s.spans([0.0] * count, [1.0] * count, {})
    assert [x.version for x in spans if x.action.kind >= Kind.SEND_F] == [-1] * 4


def test_the_version_read_is_that_of_the_copy_a_micro_batch_uses():
    stash = make("pipedream", 3, 6)
    assert {(s, k): stash.read_at(s, k) for s, k in stash.versions} == stash.versions
    two = make("chimera", 4, 4, batches=2)
    read = [[two.read_at(stage, k) for k in range(8)] for stage in range(8)]
    assert read == [[0] * 4 + [1] * 4] * 8


def test_an_update_makes_its_version_in_every_copy():
    two = make("chimera", 2, 2)  # each copy has a forward of one micro-batch alone
    nothing = [0.0] * len(two.actions)
    spans = two.spans(nothing, nothing, {})
    assert {span.version for span in spans if span.action.kind is Kind.U} == {1}
    assert {span.version for span in spans if span.action.kind is not Kind.U} == {0}
