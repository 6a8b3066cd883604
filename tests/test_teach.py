"""Guess and check."""

import pytest

from pipelab import make, teach


def test_a_guess():
    assert teach.guess(None, 33).passed is None
    assert repr(teach.guess(None, 33)) == "No guess made. It is 33."
    assert teach.guess(33.1, 33).passed is True
    assert teach.guess(30, 33).passed is False


@pytest.mark.parametrize(
    "check",
    [
        lambda: teach.check_number(None, 1),
        lambda: teach.check_function(None, abs, [(1,)]),
        lambda: teach.check_function(lambda x: None, abs, [(1,)]),
        lambda: teach.check_schedule(None, devices=1, microbatches=1),
        lambda: teach.check_balance(None, [1], 1, 1),
    ],
)
def test_a_stub_is_not_attempted(check):
    assert check() is teach.NOT_ATTEMPTED


def test_a_wrong_schedule_is_shown():
    slow = teach.check_schedule(make("inter_layer", 2, 2), devices=2, microbatches=2, makespan=9, in_flight=0)
    assert repr(slow).startswith("Not yet: makespan 12, to reach: 9; 1 micro-batches in flight, to reach: 0.\n0F0 .")
    stuck = teach.check_schedule("0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1", devices=2, microbatches=2)
    assert ">0B0<" in repr(stuck)
    assert "2 devices and 1 micro-batches, asked were 2 devices and 2" in repr(
        teach.check_schedule(make("gpipe", 2, 1), devices=2, microbatches=2)
    )
