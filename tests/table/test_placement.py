"""Placements of stages on devices, and what is none."""

import pytest

from pipelab import Action, Kind, ScheduleError
from pipelab.table.placement import (
    check_placement,
    loop_placement,
    placement_of,
    stages_of,
    v_placement,
)


def test_placements_go_around_and_back():
    assert loop_placement(3) == (0, 1, 2)
    assert loop_placement(2, virtual=3) == (0, 1, 0, 1, 0, 1)
    assert v_placement(3) == (0, 1, 2, 2, 1, 0)
    assert v_placement(1) == (0, 0)


def test_a_device_has_its_stages_in_their_order():
    assert stages_of(v_placement(3)) == [[0, 5], [1, 4], [2, 3]]
    assert stages_of((2, 0)) == [[1], [], [0]]


def test_a_placement_is_a_tuple_of_devices():
    assert check_placement([1, 0, 0]) == (1, 0, 0)
    assert check_placement([1, 0], 2, each=True) == (1, 0)
    assert check_placement([0, 0], 2) == (0, 0)
    assert check_placement([0, 3]) == (0, 3)


@pytest.mark.parametrize(
    ("placement", "devices", "each", "message"),
    [
        ((), None, False, r"placement=\(\): give each stage a device from 0 on$"),
        ((0, -1), None, False, r"placement=\(0, -1\): give each stage a device from 0 on$"),
        ((0, 2), 2, False, r"placement=\(0, 2\): give each stage a device from 0 to 1$"),
        ((), 3, True, r"placement=\(\): give each stage a device from 0 to 2$"),
        (None, 2, False, "placement=None: give each stage a device from 0 to 1$"),
        ((0, 1.0), 2, False, r"placement=\(0, 1\.0\): give each stage a device from 0 to 1$"),
        ((0, 0), 2, True, r"placement=\(0, 0\): give each of 2 devices a stage$"),
    ],
)
def test_what_is_no_placement_is_named(placement, devices, each, message):
    with pytest.raises(ScheduleError, match=message):
        check_placement(placement, devices, each=each)


def test_the_placement_of_rows_is_where_their_stages_stand():
    def row(*stages):
        return [Action(stage, Kind.F, 0) for stage in stages]

    assert placement_of([row(0, 3), row(1, 2)]) == (0, 1, 1, 0)
    with pytest.raises(ScheduleError, match="stage 1 has no action, though stage 3 has: number"):
        placement_of([row(0, 3), row(2)])
    with pytest.raises(ScheduleError, match="stage 1 has no action, though stage 5 has"):
        placement_of([row(0, 4), row(5)])
    with pytest.raises(ScheduleError, match="stage 0 has no action, though stage 1 has"):
        placement_of([row(1)])


def test_a_stage_in_two_rows_is_an_error_that_names_both():
    """Was: "row 0, cell 0, 0F0: stage 0 is placed on device 2", where row 2 was wrong."""
    rows = [[Action(s, Kind.F, 0), Action(s, Kind.B, 0)] for s in range(3)]
    rows[2].append(Action(0, Kind.B, 0))
    with pytest.raises(ScheduleError, match="stage 0 has actions in rows 0 and 2: put all"):
        placement_of(rows)


def test_the_most_stages_of_a_placement(monkeypatch):
    monkeypatch.setattr("pipelab.table.placement.MOST_STAGES", 6)
    assert len(v_placement(3)) == len(loop_placement(2, virtual=3)) == 6
    with pytest.raises(ScheduleError, match="devices=4 with 2 stages each: give at most 6 stages"):
        v_placement(4)
    with pytest.raises(ScheduleError, match="devices=2 with 4 stages each: give at most 6 stages"):
        loop_placement(2, virtual=4)
