"""What makes a table invalid, and how the error shows it."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelab import Action, Kind, Schedule, ScheduleError, make, simulate, validate
from pipelab.table.validate import LARGEST_DRAWN
from tests.conftest import tables


def edited(schedule, device, change):
    rows = [list(row) for row in schedule.rows]
    change(rows[device])
    return replace(schedule, rows=tuple(map(tuple, rows)))


def swap(a, b):
    def change(row):
        i, j = row.index(Action.parse(a)), row.index(Action.parse(b))
        row[i], row[j] = row[j], row[i]

    return change


GPIPE = make("gpipe", 2, 2)
CASES = [
    (edited(GPIPE, 0, lambda row: row.pop(0)), "0F0 is missing on device 0: add it"),
    (edited(GPIPE, 1, lambda row: row.pop(2)), "1B0 is missing on device 1"),
    (edited(GPIPE, 1, lambda row: row.pop()), "1U0 is missing on device 1"),
    (edited(GPIPE, 0, lambda row: row.append(row[0])), "0F0 appears twice on device 0"),
    (edited(GPIPE, 0, swap("0F0", "0B0")), "0B0 comes before 0F0 on device 0"),
    (edited(GPIPE, 0, swap("0B1", "0U0")), "0U0 comes before 0B1 on device 0"),
    (
        edited(make("zb_h1", 1, 1, batches=2), 0, lambda row: row.append(row.pop(3))),
        "0W1 comes before 0U0",
    ),
    (
        edited(GPIPE, 0, lambda row: row.append(Action(0, Kind.W, 0))),
        "stage 0 has a full backward B and also I or W",
    ),
    (
        edited(make("gpipe", 2, 1, batches=2), 0, lambda row: row.insert(2, row.pop(4))),
        "0B1 comes before 0F1",
    ),
    (
        edited(make("gpipe", 2, 1, batches=2), 0, lambda row: row.append(row.pop(2))),
        "0B1 comes before 0U0",
    ),
]


@pytest.mark.parametrize(("schedule", "message"), CASES, ids=[message for _, message in CASES])
def test_faults_are_named_and_drawn(schedule, message):
    with pytest.raises(ScheduleError, match=message) as error:
        validate(schedule)
    assert "0F1" in str(error.value).split("\n", 1)[1]  # the grid follows
    with pytest.raises(ScheduleError, match=message):
        simulate(schedule)


def test_the_fault_is_marked_in_the_grid():
    with pytest.raises(ScheduleError) as error:
        validate(edited(GPIPE, 0, swap("0F0", "0B0")))
    assert ">0B0<" in str(error.value)
    assert ">0F0<" in str(error.value)
    assert ">1" not in str(error.value)


def test_a_split_backward_wants_both_halves():
    grid = "0F0 0I0 0W0\n1F0 1B0"
    assert validate(Schedule.from_grid(grid)).stages == 2
    with pytest.raises(ScheduleError, match="0W0 is missing"):
        validate(Schedule.from_grid("0F0 0I0 0U0\n1F0 1B0 1U0"))
    with pytest.raises(ScheduleError, match="0W0 comes before 0I0"):
        validate(Schedule.from_grid("0F0 0W0 0I0 0U0\n1F0 1B0 1U0"))


def test_the_shortest_wait_for_cycle():
    # Devices 0 and 1 wait for each other; devices 2 and 3 wait for them.
    grid = """
        0F0 0B0 0F1 0B1
        1F1 1F0 1B0 1B1
        2F0 2B0 2F1 2B1
        3F0 3B0 3F1 3B1"""
    with pytest.raises(ScheduleError, match="deadlock") as error:
        validate(Schedule.from_grid(grid))
    first, drawing = str(error.value).split("\n", 1)
    assert (
        "device 0 waits at 0B0 for 1B0 on device 1; device 1 waits at 1F1 for 0F1 on device 0"
        in first
    )
    assert drawing.count(">") == 2
    assert "device 2" not in first


def test_a_row_can_wait_for_itself():
    with pytest.raises(ScheduleError, match="device 0 waits at 1F0 for 0F0 on device 0"):
        validate(Schedule.from_grid("1F0 0F0 1B0 0B0"))


def test_rendezvous_deadlock_of_a_table_that_queues_would_pass():
    # Both send before they receive: fine with buffers, stuck when a send waits for its receive.
    spread = make("pipedream_flush", 2, 3).with_transfers()
    assert validate(spread) is spread
    broken = edited(spread, 0, swap("0SEND_F1", "0RECV_B0"))
    with pytest.raises(ScheduleError, match=r"deadlock|comes before"):
        validate(broken)
    rows = (
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1 0U0",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1 1U0",
    )
    with pytest.raises(
        ScheduleError,
        match="device 0 waits at 0SEND_F1 for 1RECV_F1 on device 1; device 1 waits at 1SEND_B0",
    ):
        validate(Schedule.from_grid("\n".join(rows)))
    compute = "\n".join(" ".join(c for c in row.split() if "_" not in c) for row in rows)
    validate(Schedule.from_grid(compute))


@pytest.mark.parametrize("cell", ["0SEND_F0", "1RECV_F0", "1SEND_B1", "0RECV_B1"])
def test_a_missing_transfer(cell):
    spread = make("gpipe", 2, 2).with_transfers()
    rows = tuple(tuple(a for a in row if str(a) != cell) for row in spread.rows)
    with pytest.raises(ScheduleError, match=f"{cell} is missing"):
        validate(replace(spread, rows=rows))


def test_a_transfer_to_nowhere():
    spread = make("gpipe", 2, 2).with_transfers()
    with pytest.raises(ScheduleError, match="1SEND_F0 has no matching transfer on another device"):
        validate(edited(spread, 1, lambda row: row.append(Action(1, Kind.SEND_F, 0))))


def test_a_version_must_exist_when_it_is_read():
    two = Schedule.from_grid(
        "# microbatches=1 batches=3 per_update=1 reads=PREVIOUS placement=0\n"
        "0F0 0F1 0F2 0B0 0U0 0B1 0U1 0B2 0U2"
    )
    with pytest.raises(
        ScheduleError,
        match=r"0F2 reads weight version 1 \(PREVIOUS\), but its row has made only 0 before it",
    ) as error:
        validate(two)
    assert ">0F2<" in str(error.value)


def test_a_large_table_is_not_drawn():
    big = make("gpipe", 16, 64)
    with pytest.raises(ScheduleError, match="too large to draw"):
        validate(replace(big, rows=(big.rows[0][1:], *big.rows[1:])))


B_AND_HALVES = "stage 0 has a full backward B and also I or W for micro-batch 0:"


@pytest.mark.parametrize(
    ("header", "row", "message"),
    [
        ("microbatches=3", "0F0 0B0 0B1 0B2 0U0", "0F1 is missing on device 0 (and 1 more like"),
        ("microbatches=2", "0F0 0F1 0B0 0I0 0W0 0B1 0W1 0U0", B_AND_HALVES),
        (
            "microbatches=4 per_update=2",
            "0F0 0F1 0F2 0F3 0B0 0B1 0B2 0B3 0U0 0U1",
            "0B2 comes before 0U0 on device 0: it needs 0U0 first",
        ),
    ],
)
def test_of_several_faults_the_first_is_named(header, row, message):
    with pytest.raises(ScheduleError) as error:
        validate(Schedule.from_grid(f"# {header} placement=0\n{row}"))
    assert message in str(error.value)


def test_of_several_transfers_without_another_side_the_first_is_named():
    rows = [[*row] for row in make("gpipe", 2, 2).with_transfers().rows]
    rows[1] += [Action(1, Kind.SEND_F, 1), Action(1, Kind.SEND_F, 0)]
    wrong = replace(GPIPE, rows=rows)
    with pytest.raises(ScheduleError, match="1SEND_F0 has no matching transfer") as error:
        validate(wrong)
    assert ">1SEND_F0<" in str(error.value)


@pytest.mark.parametrize("name", ["v_half", "dualpipe_v"])
def test_a_v_sends_nothing_where_it_turns(name):
    spread = validate(make(name, 3, 6).with_transfers())
    turning = {(2, Kind.SEND_F), (3, Kind.RECV_F), (3, Kind.SEND_B), (2, Kind.RECV_B)}
    assert turning.isdisjoint(action[:2] for action in spread.actions)
    assert (1, Kind.SEND_F, 0) in spread.position and (3, Kind.SEND_F, 0) in spread.position


def test_of_two_cycles_the_shorter_one_is_named():
    grid = """
        0F0 0B0 0F1 0B1
        1F1 1F0 1B0 1B1
        3F0 2F0 2F1 3F1 3B0 2B0 3B1 2B1"""
    with pytest.raises(ScheduleError, match="device 2 waits at 3F0 for 2F0 on device 2: change"):
        validate(Schedule.from_grid(grid))


def test_the_largest_table_that_is_drawn():
    fits = make("gpipe", 16, 62)
    assert len(fits.actions) == LARGEST_DRAWN
    with pytest.raises(ScheduleError, match=">0F0<"):
        validate(edited(fits, 0, swap("0F0", "0B0")))


@given(tables(largest=4), st.randoms(use_true_random=False))
def test_validate_and_simulate_agree_on_shuffled_tables(case, rng: random.Random):
    schedule = case[0]
    rows = [list(row) for row in schedule.rows]
    row = rng.choice(rows)
    i, j = rng.randrange(len(row)), rng.randrange(len(row))
    row[i], row[j] = row[j], row[i]
    shuffled = replace(schedule, rows=tuple(map(tuple, rows)))

    def verdict(check):
        try:
            check(shuffled)
        except ScheduleError as error:
            return str(error)
        return "valid"

    assert verdict(validate) == verdict(simulate)


SLICES = "# slices=1 1 microbatches=4 per_update={} {}\n"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (SLICES.format(2, "") + "0F0 0F1 0F2 0B1 0B0 0U0 0F3 0B3 0B2 0U1", "0F3 continues .* 0F2"),
        (
            SLICES.format(4, "copies=2 placement=0 0") + "0F0 1F1 1B1 0B0 0F2 1F3 1B3 0B2 0U0 1U0",
            "1F1 continues .* 1F0",
        ),
    ],
)
def test_a_sequence_takes_one_copy_and_version(text, error):
    with pytest.raises(ScheduleError, match=error):
        validate(Schedule.from_grid(text))


@pytest.mark.parametrize("late", ["0B0", "0OFFLOAD0"])
def test_nothing_overlaps_with_the_forward_that_it_waits_for(late):
    rows = [[Action.parse("0F0"), Action.parse(late)]]
    with pytest.raises(ScheduleError, match=f"{late} overlaps with 0F0, which it waits for"):
        Schedule("own", rows, (0,), 1, overlapped=frozenset(rows[0][1:]))


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ("0F1 0F0 0F2 0B2 0B1 0B0 0U0", "0F1 comes before 0F0"),
        ("0F0 0F1 0F2 0B1 0B2 0B0 0U0", "0B1 comes before 0B2"),
        ("0F0 0F1 0F2 0I2 0W2 0I0 0I1 0W1 0W0 0U0", "0I0 comes before 0I1"),
    ],
)
def test_slices_go_forward_in_order_and_back_in_the_opposite_one(row, error):
    header = "# slices=1 1 1 microbatches=3\n"
    assert validate(Schedule.from_grid(header + "0F0 0F1 0F2 0B2 0B1 0B0 0U0"))
    with pytest.raises(ScheduleError, match=error):
        validate(Schedule.from_grid(header + row))


def test_a_sequence_needs_no_other():
    """Not even that its forwards come before the next one's, or its backwards."""
    rows = "0F3 0F0 0F1 0F4 0F5 0F2 0B2 0B5 0B1 0B4 0B3 0B0 0U0"
    assert validate(Schedule.from_grid("# slices=1 1 1 microbatches=6\n" + rows))


@pytest.mark.parametrize(
    ("row", "error"),
    [
        ("0F0 0F1+0OFFLOAD0 0B1 0B0 0U0", "0RELOAD0 is missing on device 0: add it"),
        ("0F0 0F1 0B1+0RELOAD0 0B0 0U0", "0OFFLOAD0 is missing on device 0: add it"),
        ("0F0 0F1+0RELOAD0 0B1+0OFFLOAD0 0B0 0U0", "0RELOAD0 comes before 0OFFLOAD0"),
        ("0F0 0F1+0OFFLOAD0 0B0 0B1+0RELOAD0 0U0", "0B0 comes before 0RELOAD0"),
        ("0OFFLOAD0 0F0 0F1 0B1+0RELOAD0 0B0 0U0", "0OFFLOAD0 comes before 0F0"),
    ],
)
def test_what_is_offloaded_was_made_and_comes_back(row, error):
    assert validate(Schedule.from_grid("0F0 0F1+0OFFLOAD0 0B1+0RELOAD0 0B0 0U0"))
    with pytest.raises(ScheduleError, match=error):
        validate(Schedule.from_grid(row))


@pytest.mark.parametrize(
    ("grid", "error"),
    [
        (  # 0F1 takes nothing
            "0F0 0F1+0B0 0B1\n1F0 1F1 1B1 1B0",
            "device 0 waits at 0B0 for 1B0 on device 1; device 1 waits at 1F1 for 0F1 on device 0",
        ),
        (  # what 1F1 takes is there
            "0F0 0F1 0F2 0B0 0B1 0B2\n1F0 1F1+1B0 1B1 1F2 1B2\n2F0 2F1 2B0 2F2 2B1 2B2",
            "device 1 waits at 1B0 for 2B0 on device 2; device 2 waits at 2F1 for 1F1 on device 1",
        ),
    ],
)
def test_a_pair_waits_at_the_one_whose_input_is_missing(grid, error):
    with pytest.raises(ScheduleError, match=f"deadlock: {error}"):
        validate(Schedule.from_grid(grid))
