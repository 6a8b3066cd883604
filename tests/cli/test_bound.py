"""The command that says how good a schedule can be."""

import json
import re

import pytest

from pipelab import Costs, simulate
from pipelab.optimize.bounds import bound, gap
from pipelab.schedules import SCHEDULES, make_for


def call(capsys, line):
    from pipelab.cli import main

    status = main(["bound", *line.split()])
    return status, *capsys.readouterr()


def test_the_command(capsys):
    costs = "--forward 1,2,1,1 --transfer 0.1"
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
    assert re.search(r"^inter_layer +108\.8 +1 +yes +28\.3%$", out, re.M)
    status, out, err = call(capsys, "--devices 2 --microbatches 1 --whole")
    assert re.search(r"^round trip +6$", out, re.M)
    assert re.search(r"^gpipe +6 +1 +20\.0%$", out, re.M)
    assert "left out: pipedream_2bw needs microbatches >= devices" in out


def test_no_limit_is_null(capsys):
    status, out, _ = call(capsys, "--devices 2 --microbatches 4 --memory inf --json")
    found = json.loads(out, parse_constant=pytest.fail)
    assert (status, found["memory"]) == (0, None)


def test_errors_are_one_line(capsys):
    line = "--devices 2 --microbatches 4"
    for more, message in (
        ("--memory 0.5", "memory=0.5: give at least 1"),
        ("--forward 1,2,3", "forward has 3 values for 2 stages"),
    ):
        status, out, err = call(capsys, f"{line} {more}")
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert message in err
