"""Train steps as pipelines over the processes of jax.distributed: equal to one device."""

import json

import pytest

from tests.conftest import thorough
from tests.jax.test_distributed import GUARD, ROOT, free_port, processes, tried

WORKER = ROOT / "tests" / "workers" / "pipeshard.py"
# Case -> the process of each layer's weights. The first layer's are read by the last one, too, so
# that both processes have them.
EQUAL = {
    "clipped": [0, 0, 0, 1],
    "interleaved": [0, 0, 1, 0],
    "sharded": [0, 0, 1, 1],
}
MORE = {  # in make test-all
    "1F1B": [0, 0, 0, 1],
    "gpipe": [0, 0, 0, 1],
    "donated": [0, 0, 0, 1],
    "meshes": [0, 0, 1, 1],
    "planned": [0, 0, 0, 1],
}
# A thing that differs in process 1 -> what the error says does.
OTHERS = {
    "wiring": "the update",
    "parameter": "the loss",
    "constant": "the loss",
    "derivative": "the loss",
    "plan": "the plan (Pipeshard)",
    "x": "argument 2['x']",
    "w1": "argument 0['w1']",
}
FAILING = {
    "across": ["PipeshardError: mesh 0 has devices of processes [0, 1]: give every mesh devices"]
    * 2,
    "lost": [
        f"PipeshardError: [0]['{name}'] is on another process's devices: pass it as a host array"
        for name in ("w0", "w3")
    ],
    "compare": ["PipeshardError: compare needs one process: none of several has all the results"]
    * 2,
    "differ": ["PipeshardError: the shape of the arguments differs between process 0 and"] * 2,
    **{
        case: [f"PipeshardError: {what} differs between process 0 and process 1: make"] * 2
        for case, what in OTHERS.items()
    },
    "raise": ["mesh 1 (cpu:2048, cpu:2049), action 1B2: ZeroDivisionError: by design"] * 2,
}


def start(cases, count, devices=2):
    """(statuses, outputs, errors) of so many processes."""
    port = free_port()
    return processes(
        lambda n: [str(WORKER), cases, port, str(n), str(count), str(devices)],
        count,
        guard=4 * GUARD,
    )


def results(cases, count, devices=2):
    statuses, outs, errors = start(",".join(cases), count, devices)
    ends = {0, -6} if "absent" in cases else {0}  # jax aborts whom process 0 has given up
    assert statuses[0] == 0 and ends >= {*statuses}, errors
    found = [json.loads(out.splitlines()[-1]) for out in outs]
    return {case: of for case, *of in zip(cases, *found, strict=True)}


@pytest.fixture(scope="module")
def both(request):
    """What two processes found of each case; they do them all, one after the other."""
    known = {*EQUAL, *MORE, *FAILING, "evaluated", "evaluated by marks"}
    cases = [case for case in tried(request, "case") if case in known]
    return results([*cases, "idle", "local", "the same", "absent"], 2)


@pytest.mark.parametrize("case", [*EQUAL, *thorough(*MORE)])
def test_steps_over_two_processes_equal_one_device(case, both):
    for number, found in enumerate(both[case]):
        assert found["worst"] < 1e-12
        assert found["key"] is True  # small results are everybody's
        homes = (EQUAL | MORE)[case]
        assert found["here"] == [home == number or i == 0 for i, home in enumerate(homes)]
        seen = [{*at} for at in found["at"]]
        assert seen[1:] == [{home} for home in homes[1:]]  # with their sharding everywhere
        assert seen[0] == {number}
    one, other = both[case]
    for name in ("loss", "kept", "names", "makespan", "actions"):
        assert one[name] == other[name]
    assert one["names"][0][0] == one["names"][-1][1] == "[0]['w0']"


@pytest.mark.parametrize("case", ["evaluated", *thorough("evaluated by marks")])
def test_evaluation_over_two_processes_equals_one_device(case, both):
    one, other = both[case]
    for found in (one, other):
        assert found["worst"] < 1e-12 and found["kinds"] == ["F"]
        assert found["stays"] and found["home"] == [1]  # the state is not copied
    assert one["hits"] == other["hits"]


def test_a_process_may_run_a_pipeline_alone(both):
    one, other = both["idle"]
    assert one["loss"] == pytest.approx(1.0916664353078191)
    assert other["error"].startswith("PipeshardError: process 1 has none of the 2 meshes: start")
    for found in both["local"]:
        assert found["worst"] < 1e-12 and found["here"] == [True] * 4


@pytest.mark.parametrize("case", FAILING)
def test_a_failure_is_told_in_both_and_the_next_call_works(case, both):
    for found, message in zip(both[case], FAILING[case], strict=True):
        assert found["error"].startswith(message)


def test_the_same_step_of_the_same_arrays_is_not_refused(both):
    """Each process has addresses and hashes of its own."""
    one, other = both["the same"]
    assert one == other and "loss" in one


@pytest.mark.thorough
def test_four_processes():
    found = results(["1F1B", "clipped"], 4, devices=1)
    for of in found.values():
        assert [each["worst"] < 1e-12 for each in of] == [True] * 4
        assert [each["here"] for each in of] == [
            [True, True, False, False],
            [False, False, True, False],
            [False, False, False, True],
            [True, False, False, False],  # which reads what process 0 updates
        ]
        assert len({each["loss"] for each in of}) == 1


@pytest.mark.timed
@pytest.mark.parametrize(
    ("case", "message"),
    [
        *thorough(
            ("kill 0", "process 0 disconnected; it was at: mesh 0"),
            ("kill 1", "process 1 disconnected; it was at: mesh 1"),
        ),
        ("stop 1", "no action ended within 3 s: "),
    ],
)
def test_a_process_that_does_not_get_on_ends_the_others(case, message):
    statuses, outs, errors = start(case, 3)
    failed = int(case[-1])
    # The others end, too: jax would wait for it, and abort them.
    assert statuses == [-9 if number == failed else 0 for number in range(3)], errors
    began = float(outs.pop(failed).split()[-1])
    for out in outs:
        [found] = json.loads(out.splitlines()[-1])
        assert found["error"].startswith(message), errors
        assert found["time"] - began < 5 + 3 * (case == "stop 1")


def test_a_process_that_makes_no_call_is_named(both):
    found, _ = both["absent"]
    assert found["error"].startswith("process 1 has not made the call within 3 s: make it in all")


@pytest.mark.thorough
def test_nobody_waits_for_a_process_that_has_ended():
    # Was: until jax's end gave the other ones up, which takes five minutes by default.
    statuses, outs, errors = start("early", 2)
    assert statuses == [0, 0], errors
    [found] = json.loads(outs[0].splitlines()[-1])
    assert found["error"] == "process 1 has ended"
