"""Guess and check: what all exercises share."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import teach
from pipelab import make
from teach.feedback import Exercise, balance, build, write
from tests.support import PYTHON


def test_a_guess():
    undone = teach.guess("01-a", None)
    assert undone.passed is None
    assert repr(undone) == "Guess first: replace None above."
    assert (
        "<details><summary>Show it</summary>It is 83.3333."
        in undone._repr_mimebundle_()["text/html"]
    )
    assert teach.guess("01-a", 83.2).passed is True
    assert repr(teach.guess("01-a", 30)).startswith("You said 30, it is 83.3333.")
    assert repr(teach.guess("01-a", "half")) == "Not yet: 'half' is not a number."


@pytest.mark.parametrize("name", ["77-1", "01-99", "1-1", "one", "01-a"])
def test_an_unknown_exercise_says_how_names_look(name):
    with pytest.raises(ValueError, match='write it as the lecture does, "02-1"'):
        teach.check(name, 1)


def test_a_stub_is_not_attempted():
    assert teach.check("01-1", None) is teach.NOT_ATTEMPTED
    stub = write(abs, [(1,)]).check(lambda p: None)
    assert stub is teach.NOT_ATTEMPTED


def test_a_wrong_schedule_is_shown():
    exercise = build(devices=2, microbatches=2, makespan=9, in_flight=0)
    slow = exercise.check(make("inter_layer", 2, 2))
    assert repr(slow).startswith(
        "Not yet: makespan 12, must be at most 9; 1 micro-batches in flight, must be at most 0.\n"
    )
    stuck = exercise.check("0F0 0B0 0F1 0B1\n1F1 1F0 1B0 1B1")
    assert ">0B0<" in repr(stuck)


def test_a_right_table_is_shown_with_what_each_device_holds():
    """Was: "at most 4 in flight", of device 0, where device 1 had been asked to hold 2."""
    row = "1F0 1F1 1B0 1F2 1B1 1F3 1B2 1F4 1B3 1F5 1B4 1B5"
    said = repr(teach.check("03-2", row))
    assert said.startswith("Right: makespan 39; at most in flight, by device: 4, 2, 2, 1.\n0F0 ")


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
    said = build(devices=2, microbatches=2, makespan=99).check(other)
    assert said.passed is False
    assert "asks for 2 devices, 2 stages, 2 micro-batches and 1 update(s)" in repr(said)


@pytest.mark.parametrize("answer", [10, [5.0, 9.0], "five", [1, "x"]])
def test_a_balance_of_the_wrong_kind(answer):
    assert "is not a list of whole numbers" in repr(Exercise(balance, [1] * 14, 2, 9).check(answer))


@pytest.mark.parametrize(
    "function",
    [7, lambda p: "x", lambda p: [p], lambda p: None if p == 2 else p, lambda p: 1 / 0],
)
def test_a_function_of_the_wrong_kind(function):
    assert write(lambda p: p, [(1,), (2,)]).check(function).passed is False


def test_a_function_may_give_arrays():
    cases = [(1,), (2,)]
    exercise = write(lambda p: [p, 2.0 * p], cases)
    assert exercise.check(lambda p: (p, 2 * p)).passed
    assert not exercise.check(lambda p: (p, p)).passed


def test_a_likely_mistake_has_a_hint_of_its_own():
    def slips(p):
        return {"Not squared.": p * p}

    said = write(lambda p: p, [(1,), (2,)], slips).check(lambda p: p**2)
    assert repr(said) == "Not yet: for (2) it gives 4, but 2 is right. Not squared."
    assert "Not squared" not in repr(write(lambda p: 3, [(2,)], slips).check(abs))


def repr_of_type(value):
    """A name for a test, where the value itself may be too long to print."""
    return value if isinstance(value, str) else type(value).__name__


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("00-b", 2.91, "as fast"),
        ("00-b", 0.25, "fills and drains"),
        ("01-a", 5 / 6, "in per cent"),
        ("01-a", 16.67, "busy"),
        ("01-a", 50, "How many"),
        ("02-b", 21.1, "without recomputation"),
        ("02-b", 5.28, "at a time"),
        ("03-b", 1.27, "inverse"),
        ("03-b", 0.57, "fills and drains once"),
    ],
)
def test_a_guess_has_a_remark_that_fits_it(name, value, why):
    said = teach.guess(name, value)
    assert said.passed is False and why in repr(said)


@pytest.mark.parametrize(("name", "value"), [("00-b", 33 / 96), ("02-b", 2.64), ("03-b", 33 / 42)])
def test_a_guess_of_what_the_lecture_will_measure(name, value):
    assert teach.guess(name, value).passed


def test_a_slow_second_run_is_told_from_noise():
    seconds = iter([1.0, 2.0, 1.02, 1.0, 2.1, 0.98])
    said = teach.in_turns(partial(next, seconds), partial(next, seconds), turns=2, tries=1)
    assert said.startswith("slower: 2.05 (1.32 to 3.17) times as long; the same run twice 1.00 (")


@pytest.mark.parametrize(("turns", "least"), [(4, 0.55), (8, 0.95), (16, 0.999)])
def test_a_fifth_less_time_shows_through_ten_per_cent_of_noise(turns, least):
    """Was: ranges that overlap told nothing, and more turns made ranges wider."""
    random, trials = np.random.default_rng(0), 2000
    noise = np.exp(0.1 * random.standard_normal((trials, turns, 3)))
    words = [
        [
            teach.told_apart(true * b / a, again / a).partition(":")[0]
            for a, b, again in noise.transpose(0, 2, 1)
        ]
        for true in (0.8, 1.0)
    ]
    assert words[0].count("faster") >= least * trials
    assert words[1].count("faster") + words[1].count("slower") <= 0.07 * trials


def test_equally_good_answers_both_pass():
    """The last best divisor, where the truth takes the first."""

    def last(samples, p, fixed, each):
        divisors = [m for m in range(samples, 0, -1) if samples % m == 0]
        return min(divisors, key=lambda m: (m + p - 1) * (fixed + samples / m * each))

    assert teach.check("14-5", last).passed


@pytest.mark.parametrize("name", ["00-4", "04-2", "01-2", "01-5", "02-1", "04-3", "04-6", "05-4"])
@pytest.mark.parametrize(
    "answer",
    [10**5000, np.ones(3), ["C"], (np.inf, np.inf), [np.nan] * 3, lambda *a: 10**400, object()],
    ids=repr_of_type,
)
def test_whatever_is_answered_the_check_says_so_in_words(name, answer):
    said = teach.check(name, answer)
    assert said.passed is False and repr(said).startswith("Not yet")


def test_numbers_of_every_library_count():
    assert teach.guess("01-a", np.float32(83.3333)).passed
    weight = torch.tensor(9.0, requires_grad=True)
    assert teach.check("04-2", weight).passed
    assert write(lambda p: 9 * p, [(1,)]).check(lambda p: weight * p).passed


def test_an_answer_may_use_up_its_lists():
    """A generator has to fit as well; a function's hint is for the case as it was."""
    assert teach.check("04-3", iter([1, 1, 5])).passed is False
    exercise = write(sum, [([1, 2],)], lambda given: {"The first alone.": given[0]})
    said = exercise.check(lambda given: given.pop(0))
    assert repr(said) == "Not yet: for ([1, 2]) it gives 1, but 3 is right. The first alone."


def test_what_a_lecture_lacks_is_not_a_wrong_name(monkeypatch):
    monkeypatch.delitem(sys.modules, "teach.lecture_05", raising=False)
    monkeypatch.setitem(sys.modules, "dataclasses", None)
    with pytest.raises(ModuleNotFoundError, match="dataclasses"):
        teach.check("05-1", 1)


def test_a_lecture_goes_on_with_what_passes():
    def mine(k, m):
        return 0 if k < 2 * m else k // m - 1

    assert teach.yours("05-1", mine) is mine
    theirs = teach.yours("05-1", lambda k, m: k // m)
    assert theirs is teach.yours("05-1", None) and theirs(4, 2) == 1
    with pytest.raises(ValueError, match="'05-2' has nothing to go on with"):
        teach.yours("05-2", mine)


def test_a_lecture_has_its_devices_where_accelerators_are_too_few():
    code = """
import jax, teach
jax.devices()  # JAX was used before
real, jax.device_count = jax.device_count, lambda: 1
teach.jax_devices(4)
jax.device_count = real
teach.jax_devices(4)  # the first cell, run again
print(jax.devices(), float(jax.numpy.ones(3).sum()))
"""
    folder = Path(__file__).parents[2] / "notebooks"
    done = subprocess.run(
        [PYTHON, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    said, devices = done.stdout.splitlines()
    assert said.startswith("This lecture takes 4 devices, but this machine has 1 (cpu)")
    assert devices.count("CpuDevice") == 4 and devices.endswith(" 3.0")
