"""Every schedule has its closed forms with sources.

test_schedules and test_simulate sweep them against the simulator.
"""

import re

import pytest

from pipelab import THEORY


@pytest.mark.parametrize("name", THEORY)
def test_every_formula_names_its_source_and_assumptions(name):
    theory = THEORY[name]
    for source in (theory.bubble, theory.peak, theory.stash):
        assert re.fullmatch(r"arXiv \d{4}\.\d{5}", source.paper)
        assert re.match(r"\d", source.section)
        assert source.formula
    assert theory.assumes


def test_megatrons_and_gpipes_bubble_are_one_bubble():
    gpipe = THEORY["gpipe"]
    assert gpipe.over_ideal(4, 8, 1, 1) == 3 / 8
    assert gpipe.of_total(4, 8) == pytest.approx(3 / 11)
