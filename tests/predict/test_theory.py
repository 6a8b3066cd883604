"""The closed forms among themselves; test_schedules and test_simulate sweep them against the
simulator.
"""

import pytest

from pipelab import THEORY


def test_megatrons_and_gpipes_bubble_are_one_bubble():
    gpipe = THEORY["gpipe"]
    assert gpipe.over_ideal(4, 8, 1, 1) == 3 / 8
    assert gpipe.of_total(4, 8) == pytest.approx(3 / 11)
