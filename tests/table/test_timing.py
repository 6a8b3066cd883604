"""The walk beside a plain one: whoever can go on goes on, until nobody can."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelab import Kind, make
from pipelab.table.timing import earliest
from tests.conftest import tables

seconds = st.sampled_from([0.0, 0.0, 0.25, 1.0, 2.0])
SENDS = {Kind.SEND_F: (Kind.RECV_F, 1), Kind.SEND_B: (Kind.RECV_B, -1)}


def plain(schedule, duration, delay):
    """Start, end of what can run, and how many actions of each row do."""
    start, end, done = {}, {}, [0] * schedule.devices
    clock = [0.0] * schedule.devices
    at = schedule.position

    def head(device):
        row = schedule.rows[device]
        return row[done[device]] if done[device] < len(row) else None

    def run(device, action, begin):
        i = at[action]
        start[i], end[i] = begin, begin + duration[i]
        clock[device] = end[i]
        done[device] += 1

    moved = True
    while moved:
        moved = False
        for device in range(schedule.devices):
            while (action := head(device)) is not None:
                stage, kind, k = action
                if kind in SENDS:  # with its RECV, when both are there
                    other, step = SENDS[kind]
                    receive = (stage + step, other, k)
                    partner = schedule.placement[stage + step]
                    if head(partner) != receive:
                        break
                    begin = max(clock[device], clock[partner])
                    run(device, action, begin)
                    run(partner, schedule.actions[at[receive]], begin)
                elif kind > Kind.U:
                    break
                else:
                    i = at[action]
                    source = schedule.inputs[i]
                    if source is not None and source not in end:
                        break
                    arrived = 0.0 if source is None else end[source] + delay[i]
                    run(device, action, max(clock[device], arrived))
                moved = True
    return start, end, done


def check(schedule, data):
    count = len(schedule.actions)
    duration = data.draw(st.lists(seconds, min_size=count, max_size=count))
    delay = data.draw(st.lists(seconds, min_size=count, max_size=count))
    for i, source in enumerate(schedule.inputs):
        kind = schedule.actions[i].kind
        if kind in (Kind.RECV_F, Kind.RECV_B) and source is not None:
            duration[i] = duration[source]  # both sides of a transfer
        if schedule.has_transfers:
            delay[i] = 0.0
    start, end, done = plain(schedule, duration, delay)
    walk = schedule.walk(duration, delay)
    assert walk.head == [first + n for first, n in zip(schedule.bounds, done, strict=False)]
    assert {i: walk.start[i] for i in start} == start
    assert {i: walk.end[i] for i in end} == end


@given(tables(largest=3), st.data(), st.booleans(), st.randoms(use_true_random=False))
def test_the_walk_starts_everything_as_early_as_can_be(case, data, written, rng):
    """Of tables that can run, and of others: then up to where they are stuck."""
    schedule = case[0].with_transfers() if written else case[0]
    check(schedule, data)
    rows = [[*row] for row in schedule.rows]
    row = rng.choice(rows)
    i, j = rng.randrange(len(row)), rng.randrange(len(row))
    row[i], row[j] = row[j], row[i]
    broken = replace(schedule, rows=rows)
    check(broken, data)


def test_who_waits_is_woken_and_who_meets_starts_together():
    #        0     1     2    |   3      4      5
    # row 0: F     S     S2   |   R      R2     -
    bounds, needs = [0, 3, 5], [None, 3, 4, 1, 2]
    walk = earliest(bounds, needs, [0, 0, 0, 1, 1], [5.0, 2, 1, 2, 1], [0.0] * 5)
    assert walk.start == [0, 5, 7, 5, 7] and walk.end == [5, 7, 8, 7, 8] and walk.head == [3, 5]
    walk = earliest([0, 1, 3], [2, None, None], [0, 1, 1], [1.0, 4, 1], [0.5, 0, 0])
    assert walk.start == [5.5, 0, 4] and walk.head == [1, 3]


def test_a_send_does_not_meet_its_own_row():
    walk = earliest([0, 2], [1, 0], [0, 0], [1.0, 1.0], [0.0, 0.0])
    assert walk.head == [0]


@pytest.mark.parametrize("name", ["gpipe", "zb_h1"])
def test_unit_times_are_one_an_action(name):
    walk = make(name, 2, 3).unit_times()
    assert [b - a for a, b in zip(walk.start, walk.end, strict=True)] == [1] * len(walk.end)
    assert walk.start[0] == 0


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    ("delays", "makers", "start"),
    [
        ((0.5, 3.0), (2.0, 5.0), 10.0),  # the second input comes at 2 + 5 + 3
        ((9.0, 3.0), (2.0, 5.0), 11.0),  # the first one at 2 + 9
        ((0.0, 0.5), (0.0, 0.0), 1.0),  # both at once, but the row is busy until 1
    ],
)
def test_a_pair_waits_for_both_inputs_and_the_row_for_both_ends(last, delays, makers, start):
    """Whether the row of the pair is the last one or the first."""
    for pair in ((4.0, 2.0), (2.0, 4.0)):
        ours, theirs = [1.0, *pair, 1.0], [*makers]
        if last:
            bounds, needs, device = [0, 2, 6], [None] * 3 + [0, 1, None], [0] * 2 + [1] * 4
            duration, delay = theirs + ours, [0.0] * 3 + [*delays, 0.0]
        else:
            bounds, needs, device = [0, 4, 6], [None, 4, 5] + [None] * 3, [0] * 4 + [1] * 2
            duration, delay = ours + theirs, [0.0, *delays] + [0.0] * 3
        begin = 2 if last else 0
        walk = earliest(bounds, needs, device, duration, delay, {begin + 2})
        assert walk.start[begin : begin + 4] == [0, start, start, start + 4]
        assert walk.end[begin : begin + 4] == [1, start + pair[0], start + pair[1], start + 5]
        assert walk.head == bounds[1:]


def test_a_pair_takes_an_input_that_was_made_at_once():
    #                                  0 + 1, which takes what 2 makes
    walk = earliest([0, 2, 3], [None, 2, None], [0, 0, 1], [1.0, 1.0, 0.0], [0.0] * 3, {1})
    assert walk.start == [0, 0, 0] and walk.head == [2, 3]
