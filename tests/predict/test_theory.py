"""Every closed form beside the schedules themselves, over all small sizes."""

import re
from itertools import permutations, product

import pytest

from pipelab import THEORY, Costs, ScheduleError, make, memory, simulate
from pipelab.predict.simulate import delays, durations
from pipelab.schedules import takes


def sizes(name):
    """(p, m, v, batches), larger ones where the schedule is not searched."""
    most = (3, 7) if name == "zb_v" else (7, 14)
    several = takes(name, "virtual") or takes(name, "slices")
    chunks = (1, 2, 3) if several else (1,)
    many = [(5, 15, 2, 1), (3, 9, 2, 2)]  # a period in the middle of a row
    searched = [(5, 5, 1, 2), (6, 14, 1, 1)]
    devices, microbatches = (range(1, n + 1) for n in most)
    yield from [(p, m, v, 1) for p, m, v in product(devices, microbatches, chunks)]
    yield from [(p, m, v, 3) for p, m, v in product((1, 2, 4), (1, 3, 4, 8), chunks)]
    yield from many if several else searched if name == "zb_v" else []


def every_table(name):
    option = "slices" if takes(name, "slices") else "virtual"
    for p, m, v, batches in sizes(name):
        try:
            yield make(name, p, m, batches=batches, **{option: v}), p, m, v, batches
        except ScheduleError:
            assert (name, m < p) == ("pipedream_2bw", True) or p % 2


@pytest.mark.parametrize("name", THEORY)
def test_bubbles_peaks_and_versions_are_those_of_the_tables(name):
    theory = THEORY[name]
    for schedule, *of in every_table(name):
        versions = [theory.versions(device, *of) for device in range(schedule.devices)]
        peaks = [theory.in_flight(device, *of) for device in range(schedule.devices)]
        assert schedule.weight_versions == versions, of
        *three, _ = of
        if theory.peaks(*three):
            assert schedule.peak_in_flight == peaks, of
        else:  # some of a larger table's are absent
            assert all(a <= b for a, b in zip(schedule.peak_in_flight, peaks, strict=True)), of
        if theory.holds(*three):
            bubble = simulate(schedule).bubble
            assert bubble.over_ideal == pytest.approx(theory.over_ideal(*of)), of
            assert bubble.of_total == pytest.approx(theory.of_total(*of)), of


# F, I, W of a device: each order of the three, equal ones, W without time, a backward that is the
# shorter of the two passes.
COSTS = [
    *permutations((1, 2, 3)),
    *((2, 2, 2), (2, 2, 1), (1, 2, 2), (2, 1, 1), (1, 2, 1), (1, 1, 2), (3, 2, 1)),
    *((1, 1, 0), (5, 1, 1), (1, 5, 1), (1, 1, 5), (1.5, 1, 0.75), (0.3, 1.1, 0.7)),
]


@pytest.mark.parametrize("name", THEORY)
def test_seconds_are_the_simulations_for_all_costs_where_they_are_known(name):
    theory, known, asked = THEORY[name], 0, 0
    for schedule, p, m, v, batches in every_table(name):
        for costs in COSTS if batches == 1 and p < 6 and m < 11 else ():
            of = dict(zip(("forward", "input_grad", "weight_grad"), costs, strict=True))
            seconds = theory.seconds(p, m, v, **of)
            asked += 1
            if seconds is not None:
                stages = schedule.placement[: schedule.model_stages]
                own = Costs(**of) if schedule.slices else Costs(**of).over(stages)
                ends = schedule.walk(durations(schedule, own), delays(schedule, own)).end
                idle = max(ends) - m * sum(costs)
                assert idle == pytest.approx(seconds), (p, m, v, costs)
                known += 1
    assert known > 0.02 * asked


@pytest.mark.parametrize(
    ("changed", "told"),
    [({"m": 0}, "m=0: give a whole"), ({"p": 2.5}, "p=2.5"), ({"forward": -1}, "forward=-1")],
)
def test_a_size_or_a_cost_that_no_table_has_is_refused(changed, told):
    of = {"p": 4, "m": 8, "forward": 1, "input_grad": 1, "weight_grad": 1}
    with pytest.raises(ValueError, match=told):
        THEORY["zb_h1"].seconds(**of | changed)


@pytest.mark.parametrize(("name", "last"), [("dualpipe", False), ("dualpipe_v", True)])
def test_pairs_idle_as_the_paper_has_it(name, last):
    """(PP / 2 - 1) (F&B + B - 3 W), with two copies on PP devices or a V on half as many: arXiv
    2412.19437, table 2."""
    for devices, (f, w) in product((2, 4, 6, 8), ((1, 1), (2, 1), (3, 0.5), (1, 0))):
        p, b = devices // 2 if last else devices, f + w
        for share in (0, 0.4, 1):
            pair = max(f, b) + share * min(f, b)
            paper = (devices / 2 - 1) * (pair + b - 3 * w)
            half = 2 if last else 1  # a stage of the paper's is half of a V's device
            assert THEORY[name].paired(p, f, f, w, pair) * half == pytest.approx(paper)
            for m in (2 * p, 3 * p):
                table = make(name, p, m).overlap()
                stages = table.placement[: table.model_stages]
                found = simulate(table, Costs(f, f, w, together=pair).over(stages))
                waits = found.makespan - found.busy[p - 1 if last else p // 2 - 1]
                assert waits * half == pytest.approx(paper), (p, m, f, w, pair)


def test_outside_its_conditions_there_is_no_answer():
    one = {"forward": 1, "input_grad": 1, "weight_grad": 1}
    for name, size, costs in (
        ("interleaved", (4, 6, 2), one),
        ("chimera", (4, 6), one),
        ("dualpipe", (4, 6), one),
        ("zb_interleaved", (4, 3, 2), one),
        ("zb_h1", (4, 3), one | {"weight_grad": 2}),
        ("zb_h2", (4, 6), one | {"weight_grad": 2}),
        ("zb_v", (4, 8), one | {"weight_grad": 2}),
        ("dualpipe_v", (4, 8), one | {"weight_grad": 2}),
        ("dualpipe_v", (4, 8), one | {"forward": 3}),
    ):
        assert THEORY[name].seconds(*size, **costs) is None, name


@pytest.mark.parametrize(
    ("name", "least"),
    [
        *(("zb_v", 1), ("v_half", 1), ("v_min", 1), ("dualpipe_v", 2)),
        *(("dualpipe", 2), ("zb_interleaved", 1)),
    ],
)
def test_forms_of_a_v_hold_from_as_many_rounds_of_devices(name, least):
    for p in (3, 4, 7):
        assert THEORY[name].holds(p, least * p, 2)
        assert not THEORY[name].holds(p, least * p - 1, 2)


@pytest.mark.parametrize(("name", "least"), [("chimera", 1), ("dualpipe", 2)])
def test_peaks_of_two_copies_hold_from_as_many_rounds_of_devices(name, least):
    for p in (2, 4, 6):
        assert THEORY[name].peaks(p, least * p, 1)
        assert not THEORY[name].peaks(p, least * p - 1, 1)


@pytest.mark.parametrize("name", ["gpipe", "pipedream_flush", "zb_h1", "zb_h2"])
def test_what_waits_for_its_weight_gradient_at_the_peak(name):
    """A share of a byte each, where what is before its I has a byte."""
    for schedule, p, m, _, batches in every_table(name):
        share = (0, 1 / 3, 1)[(p + m) % 3]
        costs = Costs(activations=1, weight_activations=share)
        peaks = memory(simulate(schedule, costs), costs).peak("activations")
        waiting = [THEORY[name].for_weights(device, p, m) for device in range(p)]
        whole = [THEORY[name].in_flight(device, p, m, 1, batches) for device in range(p)]
        found = [n - (1 - share) * late for n, late in zip(whole, waiting, strict=True)]
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

    costs = {"F": 2, "I": 2, "W": 1, "B": 3}

    def worth(words):
        words = re.sub(r"\|(.*?)\|", r"abs(\1)", words.replace(" x ", " * "))
        return eval(re.sub(r"(?<=[\w)]) (?=[(\w])", " * ", words), names | costs)

    def first(words):  # p even; c = 7 where p mod 3 = 0
        return words.partition(";")[0].partition(", c")[0]

    over_ideal, seconds = theory.over_ideal(p, m, v, batches), None
    if {*"FIW"} & {*theory.bubble}:
        each = (costs[letter] for letter in "FIW")
        of = dict(zip(("forward", "input_grad", "weight_grad"), each, strict=True))
        seconds = theory.seconds(p, m, v, **of)
        assert worth(first(theory.bubble)) == pytest.approx(seconds / (5 * m))
    else:
        assert worth(first(theory.bubble)) == pytest.approx(over_ideal)
    assert worth(first(theory.share)) == pytest.approx(over_ideal / (1 + over_ideal))
    if theory.paired:
        words = theory.bubble.partition("; paired ")[2].removesuffix(" s").replace("F&B", "4")
        assert worth(words) == pytest.approx(theory.paired(p, 2, 2, 1, 4))
