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
    slow = teach.check_schedule(
        make("inter_layer", 2, 2), devices=2, microbatches=2, makespan=9, in_flight=0
    )
    assert repr(slow).startswith(
        "Not yet: makespan 12, to reach: 9; 1 micro-batches in flight, to reach: 0.\n0F0 ."
    )
    stuck = teach.check_schedule("0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1", devices=2, microbatches=2)
    assert ">0B0<" in repr(stuck)


@pytest.mark.parametrize(
    "other",
    [
        make("gpipe", 2, 1),
        make("pipedream", 2, 1, batches=2),
        make("gpipe", 2, 1, batches=2),
        make("interleaved", 2, 2, virtual=2),
        "0F0 0B0 0F1 0B1\n.",
    ],
)
def test_less_work_or_another_training_is_not_what_was_asked(other):
    feedback = teach.check_schedule(other, devices=2, microbatches=2, makespan=99)
    assert feedback.passed is False
    assert "asked were 2 devices, 2 stages, 2 micro-batches and 1 update(s)" in repr(feedback)


@pytest.mark.parametrize("answer", [10, [5.0, 9.0], "five", [1, "x"]])
def test_a_balance_of_the_wrong_kind(answer):
    assert "is not a list of whole numbers" in repr(teach.check_balance(answer, [1] * 14, 2, 9))


@pytest.mark.parametrize(
    "function", [lambda p: "x", lambda p: [p], lambda p: None if p == 2 else p, lambda p: 1 / 0]
)
def test_a_function_of_the_wrong_kind(function):
    assert teach.check_function(function, lambda p: p, [(1,), (2,)]).passed is False
