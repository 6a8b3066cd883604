"""Tables made of a table: parts, repetitions, forwards alone, transfers."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelab import Action, Kind, Reads, Schedule, ScheduleError, make, validate
from pipelab.table.transform import fewer, repeat
from tests.conftest import FLUSH, rich_tables, tables


@given(tables(), st.data())
def test_a_part_is_the_cells_of_its_batches_counted_from_0(case, data):
    schedule, _, _, _, batches = case
    if schedule.microbatches % schedule.per_update:
        return
    first = data.draw(st.integers(0, batches - 1))
    last = data.draw(st.integers(first + 1, batches))
    part = schedule.part(first, last)
    assert (part.batches, part.microbatches) == (last - first, schedule.microbatches)
    begin = first * schedule.microbatches
    updated = begin // schedule.per_update
    counted_back = [
        [
            a._replace(microbatch=a.microbatch + (updated if a.kind is Kind.U else begin))
            for a in row
        ]
        for row in part.rows
    ]
    numbers = {
        kind: range(first * each, last * each)
        for kind in Kind
        for each in [schedule.microbatches // (schedule.per_update if kind is Kind.U else 1)]
    }
    of_these = [[a for a in row if a.microbatch in numbers[a.kind]] for row in schedule.rows]
    assert counted_back == of_these
    assert part.versions == {
        (stage, k - begin): version - updated
        for (stage, k), version in schedule.versions.items()
        if k in numbers[Kind.F]
    }


@given(tables(names=FLUSH))
def test_a_part_of_a_flush_is_the_table_of_fewer_batches(case):
    schedule, p, m, v, batches = case
    for last in range(1, batches + 1):
        assert schedule.part(0, last) == make(schedule.name, p, m, virtual=v, batches=last)
    one = schedule.part(batches - 1, batches)
    assert one.versions_read is None
    assert repeat(one, 1) is one
    assert repeat(one, batches) == schedule


@pytest.mark.parametrize(("first", "last"), [(-1, 1), (1, 1), (2, 1), (0, 4), (3, 4)])
def test_a_part_is_of_batches_that_are_there(first, last):
    with pytest.raises(ScheduleError, match=f"batches {first} to {last} of gpipe, which has 3:"):
        make("gpipe", 2, 2, batches=3).part(first, last)


@pytest.mark.parametrize(("first", "last"), [(0, 1), (1, 2)])
def test_no_part_ends_inside_an_update(first, last):
    text = "# microbatches=2 batches=2 per_update=4\n" + ",".join(
        f"0{kind}{k}" for kind in "FB" for k in range(4)
    )
    with pytest.raises(
        ScheduleError, match="updates every 4 micro-batches: cut it where an update"
    ):
        validate(Schedule.from_csv(text)).part(first, last)


@given(tables())
def test_forwards_alone_read_the_first_version(case):
    alone = case[0].forward_only()
    assert alone.rows == tuple(tuple(a for a in row if a.kind is Kind.F) for row in case[0].rows)
    assert alone.reads is Reads.LATEST
    assert set(alone.versions.values()) == {0}
    assert not alone.training
    validate(alone)


def test_forwards_alone_keep_their_transfers():
    alone = make("gpipe", 2, 1).with_transfers().forward_only()
    assert [[str(a) for a in row] for row in alone.rows] == [
        ["0F0", "0SEND_F0"],
        ["1RECV_F0", "1F0"],
    ]
    assert alone.has_transfers


def test_forwards_of_a_part_forget_what_it_read():
    part = make("pipedream", 2, 1, batches=4).part(2, 4)
    assert part.versions_read
    assert part.forward_only().versions_read is None


def test_transfers_stand_where_the_unit_times_put_them():
    written = make("pipedream_flush", 2, 2).with_transfers()
    assert [[str(a) for a in row] for row in written.rows] == [
        ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1", "0U0"],
        ["1RECV_F0", "1F0", "1RECV_F1", "1B0", "1SEND_B0", "1F1", "1B1", "1SEND_B1", "1U0"],
    ]


def test_a_table_that_cannot_run_has_no_order_of_transfers():
    gpipe = make("gpipe", 2, 2)
    stuck = replace(gpipe, rows=[[*reversed(gpipe.rows[0])], gpipe.rows[1]])
    with pytest.raises(ScheduleError, match="gpipe cannot run"):
        stuck.with_transfers()


def test_a_batch_is_repeated_by_its_own_numbers():
    one = make("gpipe", 1, 2)
    assert [str(a) for a in repeat(one, 2).rows[0]] == (
        ["0F0", "0F1", "0B0", "0B1", "0U0", "0F2", "0F3", "0B2", "0B3", "0U1"]
    )
    assert repeat(one, 2).position[Action(0, Kind.U, 1)] == 9


@given(tables(FLUSH), st.data())
def test_a_batch_with_fewer_micro_batches_can_run(case, data):
    one = case[0].part(0, 1)
    count = data.draw(st.integers(1, one.microbatches))
    short = fewer(one, count)
    validate(short)
    assert (short.microbatches, short.updates) == (count, 1)
    if count == one.microbatches:
        assert short == one


def test_offload_again_moves_only_what_stayed():
    table = make("gpipe", 3, 4)
    assert table.offload().offload() == table.offload()
    assert Kind.OFFLOAD in validate(table.offload(stages=[0]).offload()).kinds


def test_with_fewer_micro_batches_none_overlaps_that_is_not_there():
    short = fewer(make("dualpipe", 2, 3).overlap(), 2)
    assert short.overlapped <= {*short.actions}


def test_copies_stay_beside_what_has_no_partner():
    table = validate(make("pipedream_flush", 3, 6).offload().overlap())
    copies = {a for a in table.overlapped if a.kind in (Kind.OFFLOAD, Kind.RELOAD)}
    assert copies and copies <= make("pipedream_flush", 3, 6).offload().overlapped


@pytest.mark.parametrize("table", rich_tables(), ids=lambda table: table.name)
def test_rich_tables_are_repeated_cut_and_spread(table):
    one = table.part(0, 1)
    two = repeat(one, 2)
    validate(two)
    assert two.part(0, 1) == two.part(1, 2) == one
    spread = validate(table.with_transfers())
    assert spread.without_transfers() == table


def test_a_pair_stays_where_both_of_it_do():
    table = Schedule.from_grid("0F0 0F1+0B0 0F2+0B1 0B2 0U0")
    assert fewer(table, 2) == Schedule.from_grid("0F0 0F1+0B0 0B1 0U0")
    assert not fewer(table, 1).overlapped


@pytest.mark.parametrize(
    ("table", "stages", "grid"),
    [
        # Each moves out during the next action that is free, and back during the last one.
        (
            "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3 0U0",
            None,
            "0F0 0F1+0OFFLOAD0 0F2+0OFFLOAD1 0F3+0RELOAD0 0B0+0RELOAD1 0B1 0B2 0B3 0U0",
        ),
        # Device 0 waits before 0B0, where the reload then stands alone.
        (
            "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3 0U0\n1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3 1U0",
            [0],
            "0F0 0F1+0OFFLOAD0 0F2+0OFFLOAD1 0F3+0OFFLOAD2 0RELOAD0 . 0B0+0RELOAD1 0B1+0RELOAD2 "
            "0B2 0B3 0U0\n. 1F0 1F1 1F2 1F3 1B0 1B1 1B2 1B3 1U0 .",
        ),
        # There is no whole action between 0F0 and the wait.
        (
            "0F0 0F1 0B0 0B1 0U0\n1F0 1F1 1B0 1B1 1U0",
            None,
            "0F0 0F1 . . 0B0 0B1 0U0\n. 1F0 1F1 1B0 1B1 1U0 .",
        ),
        # No copy moves during an update.
        (
            "# per_update=1\n0F0 0F1 0F2 0F3 0B0 0U0 0B1 0U1 0B2 0U2 0B3 0U3",
            None,
            "0F0 0F1+0OFFLOAD0 0F2+0OFFLOAD1 0F3+0RELOAD0 0B0+0RELOAD1 0U0 0B1 0U1 0B2 0U2 0B3 0U3",
        ),
        # Nor beside a pair: the reload of 0B1 comes before it, and that of 0B0 one action earlier.
        (
            "0F0 0F1 0F2 0F3 0F4 0F5+0B0 0B1 0B2 0B3 0B4 0B5 0U0",
            None,
            "0F0 0F1+0OFFLOAD0 0F2+0OFFLOAD1 0F3+0RELOAD0 0F4+0RELOAD1 0F5+0B0 0B1 0B2 0B3 0B4 0B5 "
            "0U0",
        ),
    ],
    ids=["gpipe", "wait", "short", "update", "pair"],
)
def test_activations_move_out_early_and_back_late(table, stages, grid):
    found = validate(Schedule.from_grid(table).offload(stages))
    assert [row.split() for row in found.grid().splitlines()] == [
        row.split() for row in grid.splitlines()
    ]
