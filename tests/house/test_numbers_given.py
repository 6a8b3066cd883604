"""Sizes given to functions that need no torch: numpy's are numbers; what is none is named."""

import json

import numpy as np
import pytest

from pipelab import Action, Costs, Kind, Schedule, make, make_all, make_for, simulate
from pipelab.cli.report import describe
from pipelab.optimize.order import bound, search
from pipelab.schedules import SCHEDULES, takes
from tests.conftest import thorough

NO_SIZES = [2.0, 0, -1, None, "2", [2], np.float64(2), float("nan")]
TABLE = make("gpipe", 2, 2)
TIMELINE = simulate(TABLE)


@pytest.mark.parametrize("whole", [np.uint8, *thorough(np.int64)], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("name", SCHEDULES)
def test_sizes_may_be_numpys(name, whole):
    """In uint8, whose products would overflow, int64's other failures show as well."""
    more = {"virtual": 2, "batches": 2} if takes(name, "virtual") else {"batches": 2}
    sizes = {key: whole(value) for key, value in more.items()}
    usual = make(name, 4, 70, **more)
    told = json.dumps(describe(simulate(usual)))
    for table in (
        make(name, whole(4), whole(70), **sizes),
        SCHEDULES[name](whole(4), 70, **more),
    ):
        assert table == usual
        assert json.dumps(describe(simulate(table))) == told


def test_all_other_sizes_may_be_numpys():
    n = np.int64
    costs = Costs(forward=[1, 2], transfer=[3])
    assert Costs().split(n(2)) == Costs().split(2)
    assert costs.over(np.array([0, 1, 1, 0])) == costs.over([0, 1, 1, 0])
    found = search(
        Costs(), n(2), n(3), memory=n(2), placement=np.array([0, 1]), seconds=n(1), workers=n(1)
    )
    assert found.rows == search(Costs(), 2, 3, memory=2, workers=1).rows
    assert json.loads(json.dumps(found.proof.to_json()))["makespan"] > 0
    assert bound(Costs(), n(2), n(3), n(2), placement=np.arange(2)) == bound(Costs(), 2, 3, 2)
    rows = [[Action(n(0), kind, n(0)) for kind in (Kind.F, Kind.B, Kind.U)]]
    table = Schedule("mine", rows, np.array([0]), n(1), n(1), n(1))
    assert table == Schedule.from_grid("0F0 0B0 0U0", name="mine")
    assert all(type(x) is int for x in (*table.placement, table.microbatches, table.per_update))


@pytest.mark.parametrize("size", NO_SIZES, ids=repr)
@pytest.mark.parametrize(
    ("name", "use"),
    [
        ("devices", lambda n: make("gpipe", n, 2)),
        ("microbatches", lambda n: make("zb_v", 2, n)),
        ("virtual", lambda n: make("interleaved", 2, 2, virtual=n)),
        ("batches", lambda n: make("gpipe", 2, 2, batches=n)),
        ("devices", lambda n: make_for("zb", n, 2, Costs())),
        ("microbatches", lambda n: make_all(2, n, Costs())),
        ("virtual", lambda n: make_all(2, 2, Costs(), virtual=n)),
        ("virtual", lambda n: Costs().split(n)),
        ("devices", lambda n: search(Costs(), n, 2, seconds=0)),
        ("virtual", lambda n: search(Costs(), 2, 2, virtual=n, seconds=0)),
        ("devices", lambda n: bound(Costs(), n, 2)),
        ("microbatches", lambda n: Schedule("x", TABLE.rows, (0, 1), n)),
    ],
)
def test_what_is_no_size_is_named(name, use, size):
    with pytest.raises(ValueError) as error:
        use(size)
    assert str(error.value) == f"{name}={size!r}: give a whole number of at least 1"


@pytest.mark.parametrize("name", ["gpip", "GPipe", "", "1f1b"])
@pytest.mark.parametrize("use", [make, lambda name, *sizes: make_for(name, *sizes, Costs())])
def test_an_unknown_schedule_is_named(use, name):
    with pytest.raises(ValueError) as error:
        use(name, 2, 2)
    assert str(error.value).startswith(f"unknown schedule {name!r}: ")
    assert "There are chimera, dualpipe, dualpipe_v" in str(error.value)


@pytest.mark.parametrize("placement", [(), [0, -1], [0, 2]])
@pytest.mark.parametrize(
    "use",
    [
        lambda home: bound(Costs(), 2, 2, placement=home),
        lambda home: search(Costs(), 2, 2, placement=home, seconds=0),
        lambda home: Schedule("x", TABLE.rows, home, 2),
    ],
)
def test_a_placement_gives_each_stage_a_device(use, placement):
    with pytest.raises(ValueError) as error:
        use(placement)
    assert str(error.value).startswith(f"placement={placement!r}: give each stage a device from 0")


@pytest.mark.parametrize("use", [bound, search])
def test_a_placement_gives_each_device_a_stage(use):
    with pytest.raises(ValueError, match=r"placement=\[0, 2\]: give each of 3 devices a stage"):
        use(Costs(), 3, 2, placement=[0, 2])
