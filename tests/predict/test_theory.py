"""Every closed form beside the schedules themselves, over all small sizes."""

from itertools import product

import pytest

from pipelab import THEORY, Costs, ScheduleError, make, memory, simulate
from pipelab.schedules import takes


def sizes(name):
    """(p, m, v, batches), larger ones where the schedule is not searched."""
    most = (3, 7) if name == "zb_v" else (7, 14)
    chunks = (1, 2, 3) if takes(name, "virtual") else (1,)
    many = [(5, 15, 2, 1), (3, 9, 2, 2)]  # a period in the middle of a row
    devices, microbatches = (range(1, n + 1) for n in most)
    yield from [(p, m, v, 1) for p, m, v in product(devices, microbatches, chunks)]
    yield from [(p, m, v, 3) for p, m, v in product((1, 2, 4), (1, 3, 4, 8), chunks)]
    yield from many if len(chunks) > 1 else []


def every_table(name):
    for p, m, v, batches in sizes(name):
        try:
            yield make(name, p, m, virtual=v, batches=batches), p, m, v, batches
        except ScheduleError:
            assert (name, m < p) == ("pipedream_2bw", True)


@pytest.mark.parametrize("name", THEORY)
def test_bubbles_peaks_and_versions_are_those_of_the_tables(name):
    theory = THEORY[name]
    for schedule, *of in every_table(name):
        versions = [theory.versions(device, *of) for device in range(schedule.devices)]
        peaks = [theory.in_flight(device, *of) for device in range(schedule.devices)]
        assert schedule.weight_versions == versions, of
        *three, _ = of
        assumed = theory.holds(*three)
        if name == "interleaved" and not assumed:  # it has lost some of the full rounds'
            assert all(a <= b for a, b in zip(schedule.peak_in_flight, peaks, strict=True)), of
        else:
            assert schedule.peak_in_flight == peaks, of
        if assumed:
            bubble = simulate(schedule).bubble
            assert bubble.over_ideal == pytest.approx(theory.over_ideal(*of)), of
            assert bubble.of_total == pytest.approx(theory.of_total(*of)), of


@pytest.mark.parametrize(
    ("name", "least"), [("zb_v", 1), ("v_half", 1), ("v_min", 1), ("dualpipe_v", 2)]
)
def test_forms_of_a_v_hold_from_as_many_rounds_of_devices(name, least):
    for p in (3, 4, 7):
        assert THEORY[name].holds(p, least * p, 2)
        assert not THEORY[name].holds(p, least * p - 1, 2)


@pytest.mark.parametrize("name", ["gpipe", "pipedream_flush", "zb_h1", "zb_h2"])
def test_what_waits_for_its_weight_gradient_at_the_peak(name):
    """A third of a byte each, where what is before its I has a byte."""
    costs = Costs(activations=1, weight_activations=1 / 3)
    for schedule, p, m, _, batches in every_table(name):
        peaks = memory(simulate(schedule, costs), costs).peak("activations")
        waiting = [THEORY[name].for_weights(device, p, m) for device in range(p)]
        whole = [THEORY[name].in_flight(device, p, m, 1, batches) for device in range(p)]
        found = [n - 2 / 3 * late for n, late in zip(whole, waiting, strict=True)]
        assert peaks == pytest.approx(found), (p, m, batches)


def test_by_default_a_bubble_is_that_of_one_batch_and_one_chunk():
    assert THEORY["gpipe"].of_total(4, 8) == pytest.approx(3 / 11)
    assert THEORY["interleaved"].of_total(4, 8) == pytest.approx(3 / 11)
    assert THEORY["pipedream"].of_total(4, 8) == pytest.approx(3 / 11)


@pytest.mark.parametrize("name", THEORY)
def test_the_words_are_the_formula(name):
    """`bubble` and `share` as an author writes them, where no letter stands in for another."""
    p, m, v, batches = 6, 18, 2, 3
    theory, names = THEORY[name], {"p": p, "m": m, "v": v, "batches": batches, "c": 7}

    def worth(words):
        words = words.partition(";")[0].partition(",")[0]  # p even; c = 7 where p mod 3 = 0
        for written, python in (
            (" x ", " * "),
            ("3 m", "3 * m"),
            ("6 m", "6 * m"),
            ("v m", "v * m"),
        ):
            words = words.replace(written, python)
        for number in "34":
            words = words.replace(f"{number} p", f"{number} * p")
        return eval(words, names)

    over_ideal = theory.over_ideal(p, m, v, batches)
    if "F" not in theory.bubble:
        assert worth(theory.bubble) == pytest.approx(over_ideal)
    assert worth(theory.share) == pytest.approx(over_ideal / (1 + over_ideal))
