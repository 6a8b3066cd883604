"""What lecture 4 shows step by step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelab.optimize.cut import Profile, pipedream
from tests.conftest import examples
from tests.optimize.test_cut import layers
from widgets.steps import Steps


@examples(40)
@given(st.lists(layers, min_size=1, max_size=5), st.integers(1, 4))
def test_the_steps_are_the_optimizers(found, devices):
    profile = Profile(tuple(found))
    steps = Steps(profile, devices, bandwidth=3.0)
    best = pipedream(profile, devices, bandwidth=3.0, model="max")
    assert steps.entries[-1].pace == pytest.approx(best.bottleneck)
    for value in range(len(steps.entries)):
        steps.slider.value = value
        entry = steps.entries[value]
        assert f"A({entry.j}, {entry.n})" in steps.view.value
        assert entry.pace == min(pace for _, pace in entry.candidates)
