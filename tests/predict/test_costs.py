"""Costs: what is one, and what becomes of a device's share in its stages."""

import json
import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelab import CostError, Costs, Recompute, make
from pipelab.predict.costs import OF_DEVICE, recompute_of

numbers = st.floats(0, 9)
PLACEMENTS = ((0,), (0, 1), (0, 1, 0, 1), (0, 1, 1, 0), (0, 1, 2, 2, 1, 0), (0, 1, 1), (1, 0))


@given(st.sampled_from(PLACEMENTS), st.data())
def test_a_devices_share_is_divided_evenly_among_its_stages(placement, data):
    devices = max(placement) + 1
    each = numbers | st.lists(numbers, min_size=devices, max_size=devices)
    whole = Costs(**{name: data.draw(each) for name in OF_DEVICE})
    stages = whole.over(placement)
    for name in OF_DEVICE:
        values = stages.of(name, len(placement))
        for device, share in enumerate(whole.of(name, devices)):
            mine = [x for x, home in zip(values, placement, strict=True) if home == device]
            assert sum(mine) == pytest.approx(share)
            assert max(mine) == min(mine)
    assert (stages.transfer, stages.overhead, stages.speed) == (0, 0, 1)


def test_what_is_as_large_as_it_was():
    costs = Costs(overhead=2, transfer=3, boundary=[5, 7], bandwidth=9, speed=[1, 2])
    assert costs.over([0, 1, 0, 1]).boundary == (5, 7, 7, 7)
    assert costs.over([0, 1, 1, 0]).boundary == (5, 7, 7, 7)
    assert costs.over([1, 0]).boundary == (7, 7)
    three = Costs(boundary=[5, 7, 11], overhead=2, transfer=3, bandwidth=9, speed=[1, 2, 4])
    split = three.split(2)
    assert split.boundary == (5, 7, 11, 7, 7, 11)
    assert (split.overhead, split.transfer, split.bandwidth, split.speed) == (2, 3, 9, (1, 2, 4))
    assert Costs(boundary=[5]).split(3).boundary == (5, 5, 5)
    assert Costs(activations=4).over([0, 0]).weight_activations is None


def test_links_are_those_of_neighbours():
    costs = Costs(transfer=[3, 4])
    assert costs.over([0, 1, 2, 2, 1, 0]).transfer == (3, 4, 0, 4, 3)
    assert costs.over([2, 1, 0]).transfer == (4, 3)
    assert Costs(transfer=[3]).split(2).transfer == (3, 3, 3)
    with pytest.raises(CostError, match="no value for the link from the last device back to the"):
        costs.over([0, 2, 1])
    with pytest.raises(CostError, match="no value for the link from the last device"):
        costs.split(2)


def test_the_number_of_devices_is_that_of_whatever_has_a_value_each():
    for name in (*OF_DEVICE, "boundary", "speed"):
        values = [1, 2, 3]
        assert len(Costs(**{name: values, "forward": [3, 3, 3]}).split(2).forward) == 6
        assert len(Costs(**{name: values, "update": [1, 1, 1]}).split(2).update) == 6
    assert Costs(transfer=[3, 4], boundary=1).over([0, 1, 2]).transfer == (3, 4)
    assert Costs().split(2).forward == 0.5
    assert Costs(forward=[4]).split(2).forward == (2, 2)


def test_links_take_latency_and_bytes():
    costs = Costs(transfer=[1, 2], boundary=[100, 8, 12], bandwidth=4)
    assert costs.links(3) == [1 + 2, 2 + 3]
    assert Costs(transfer=1).links(3) == [1, 1]
    assert Costs(transfer=1).links(1) == []


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("forward", 0, -1e-9),
        ("transfer", [0, 1], [0, -1]),
        ("weights", 0.5, math.inf),
        ("bandwidth", math.inf, 0),
        ("bandwidth", 1e-9, -1),
        ("speed", [0.1, 2], [1, 0]),
        ("speed", 1, math.inf),
        ("update", 0, math.nan),
        ("overhead", 1, [1, 2]),
        ("bandwidth", 5, [5]),
        ("boundary", 1, "ab"),
        ("forward", [1], []),
        ("forward", [1, 2], [[1]]),
        ("forward", 1, None),
        ("speed", [1], ()),
        ("transfer", [], ["x"]),
        ("weights", [1, 2], {2, 1}),
        ("input_grad", [1], {0: 1}),
        pytest.param("weights", 1, 10**400, id="huge"),
    ],
)
def test_a_cost_is_a_number_of_the_right_size(name, good, bad):
    kept = getattr(Costs(**{name: good}), name)
    assert kept == (tuple(good) if isinstance(good, list) else good)
    with pytest.raises(CostError, match=f"{name}="):
        Costs(**{name: bad})


def test_words_for_what_is_wrong():
    with pytest.raises(CostError, match="give numbers of at least 0, one in all or one per stage"):
        Costs(forward=-1)
    with pytest.raises(CostError, match="give positive numbers, one in all or one per stage"):
        Costs(speed=0)
    with pytest.raises(CostError, match=r"overhead=\[1\]: give one number$"):
        Costs(overhead=[1])
    with pytest.raises(CostError, match="recompute='some': use one of never, except_last, always"):
        Costs(recompute="some")
    assert Costs(recompute="always") == Costs(recompute=Recompute.ALWAYS)
    with pytest.raises(CostError, match="weight_activations has 2 values for 3 stages"):
        Costs(weight_activations=[1, 2]).of("weight_activations", 3)


def test_which_micro_batches_are_recomputed():
    assert Recompute.NEVER.mask(4, 2) == [False] * 4
    assert Recompute.ALWAYS.mask(4, 2) == [True] * 4
    assert Recompute.EXCEPT_LAST.mask(6, 3) == [True, True, False] * 2


def test_what_a_weight_gradient_needs_is_by_default_all():
    assert Costs(activations=[1, 2]).of("weight_activations", 2) == [1, 2]
    assert Costs(activations=[1, 2], weight_activations=0).of("weight_activations", 2) == [0, 0]


def test_the_micro_batches_to_recompute_may_be_listed():
    assert recompute_of([0, 2]).mask(6, 3) == [True, False, True] * 2
    assert recompute_of([]) is Recompute.NEVER
    with pytest.raises(CostError, match=r"recompute=\[0, 3\]: a batch has micro-batches 0 to 2"):
        recompute_of([0, 3]).mask(6, 3)


@pytest.mark.parametrize("value", [2, None, {0}, [1.5], [0, -1]])
def test_what_names_no_micro_batches(value):
    with pytest.raises(CostError, match="use one of never, except_last, always, or list the micro"):
        Costs(recompute=value)


@pytest.mark.parametrize(
    ("attention", "seconds"), [(0, [0.5, 0.5]), (0.5, [0.375, 0.625]), (1, [0.25, 0.75])]
)
def test_a_later_slice_attends_to_more(attention, seconds):
    """Of the squared length, the first half of a sequence has a quarter."""
    costs, whole = Costs(attention=attention), make("gpipe", 1, 2)
    assert costs.of_slices(replace(whole, slices=(1, 1))) == seconds
    assert costs.of_slices(whole) == [1]


def test_even_slices_take_equally_long():
    assert Costs().even_slices(4) == (0.25,) * 4
    assert Costs(attention=1).even_slices(4) == pytest.approx(
        (0.5, 0.5**0.5 - 0.5, 0.75**0.5 - 0.5**0.5, 1 - 0.75**0.5)  # (i / 4)^0.5 is the end of i
    )
    for attention, count in product((0, 0.3, 1), (1, 3)):
        costs = Costs(attention=attention)
        table = replace(make("gpipe", 1, count), slices=costs.even_slices(count))
        assert costs.of_slices(table) == pytest.approx([1 / count] * count)


def test_copies_of_the_model_cost_the_same():
    costs = Costs([1, 2], transfer=[3], speed=[1, 4], weights=5)
    both = costs.of_copies(make("chimera", 2, 2))
    assert (both.forward, both.weights) == ((1, 2, 1, 2), 5)
    assert both.transfer == (3, 0, 3)  # nothing goes from one copy to the next
    assert both.speed == (1, 4)  # of the devices
    assert costs.of_copies(make("gpipe", 2, 2)) == costs


def test_costs_as_json_are_those_that_were_given():
    text = Costs(forward=[1, 2], transfer=0.5, update=0).to_json()
    assert json.loads(text) == {"forward": [1, 2], "transfer": 0.5}


def test_the_smallest_and_the_largest_costs():
    assert Costs(forward=[1e100, 1e-100, 0.99e-100]).forward == (1e100, 1e-100, 0)
    assert Costs(speed=[1e-100, 1e100]).speed == (1e-100, 1e100)
    for name, value in (("forward", 1.01e100), ("speed", 1.01e100), ("speed", 0.99e-100)):
        with pytest.raises(CostError, match=f"{name}=.*: give numbers from 1e-100 to 1e\\+100"):
            Costs(**{name: value})
    with pytest.raises(CostError, match=r"attention=1\.01: give a share of the seconds, 0 to 1"):
        Costs(attention=1.01)
