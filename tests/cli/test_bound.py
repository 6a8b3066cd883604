"""compare with predictions: how good a schedule can be."""

import json
import re

import pytest

from pipelab import Costs, simulate
from pipelab.optimize.bounds import bound, gap
from pipelab.schedules import SCHEDULES, make_for


def call(capsys, line):
    from pipelab.cli import main

    line = line if "--costs" in line else f"--costs forward=1 {line}"
    status = main(["compare", *line.split()])
    return status, *capsys.readouterr()


def test_the_command(capsys):
    costs = "--costs forward=1,2,1,1,transfer=0.1"
    line = f"--devices 4 --microbatches 8 {costs} --memory 3"
    status, out, err = call(capsys, f"{line} --json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    model = Costs([1, 2, 1, 1], transfer=0.1)
    least = bound(model, 4, 8, 3)
    shown = found["makespan"], found["binding"], found["bounds"]
    assert shown == (least.makespan, least.binding, least.by)
    named = {x["schedule"]: x for x in found["schedules"]}
    assert {*named, *found["left_out"]} == {*SCHEDULES}
    own, stages = make_for("interleaved", 4, 8, model, virtual=2)
    interleaved = named["interleaved"]
    assert interleaved["makespan"] == simulate(own, stages).makespan
    assert (interleaved["memory"], interleaved["fits"]) == (5.5, False)
    assert interleaved["gap"] == gap(own, stages)
    assert named["zb"]["memory"] <= 3 and named["zb"]["fits"]
    status, out, err = call(capsys, line)
    assert (status, err) == (0, "")
    assert re.search(r"^memory limit +34\.8$", out, re.M)
    assert re.search(r"^inter_layer +108\.8 .* 1 +yes +28\.3% ", out, re.M)
    status, out, err = call(capsys, "--devices 2 --microbatches 1 --whole")
    assert re.search(r"^round trip +6$", out, re.M)
    assert re.search(r"^gpipe +6 .* 1 +yes +20\.0% ", out, re.M)
    assert "left out: pipedream_2bw needs microbatches >= devices" in out


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("memory", [None, 4])
def test_no_schedule_beats_the_bound_of_its_own_stages(capsys, whole, memory):
    """25.5 of two stages a device under 27 of one: each has its own bound, which none that fits is
    under; and what has no bound says why."""
    limit = f"--memory {memory}" if memory else ""
    line = f"--devices 4 --microbatches 8 --virtual 2 {limit} {'--whole' * whole}"
    found = json.loads(call(capsys, f"{line} --json")[1])
    of = {stages: bounds["makespan"] for stages, bounds in found["by_stages"].items()}
    assert of["one stage a device"] == found["makespan"] == (33 if whole else 27)
    both = {"2 stages a device in a loop", "2 stages a device in a V"}
    assert {*of} == {"one stage a device", *both}
    for each in found["schedules"]:
        if each["fits"] and not each["not_bounded"]:
            assert each["makespan"] >= of[each["stages"]]
        assert (each["gap"] is None) == bool({*each["not_bounded"]} - {"split backwards"})
    named = {each["schedule"]: each for each in found["schedules"]}
    assert named["dualpipe"]["not_bounded"][0] == "copies of the model"
    out = call(capsys, line)[1]
    assert re.search(r"^lower bound, 2 stages a device in a V, (whole|split) backwards ", out, re.M)
    assert re.search(r"^zb_v .*% .*   2 stages a device in a V", out, re.M)


def test_no_limit_is_null(capsys):
    status, out, _ = call(capsys, "--devices 2 --microbatches 4 --memory inf --json")
    found = json.loads(out, parse_constant=pytest.fail)
    assert (status, found["memory"]) == (0, None)
