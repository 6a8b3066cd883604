"""Train steps as pipelines over the processes of jax.distributed: equal to one device."""

import json
import pickle
from multiprocessing import Pipe

import pytest

from pipelab import RunError
from pipelab.executors.cluster import Peer
from pipelab.executors.jax.distributed import Distributed
from tests.test_jax_distributed import GUARD, ROOT, free_port, processes

WORKER = ROOT / "tests" / "pipeshard_worker.py"
# Case -> the process of each layer's weights. The first layer's are read by the last one, too, so
# that both processes have them.
EQUAL = {
    "1F1B": [0, 0, 0, 1],
    "gpipe": [0, 0, 0, 1],
    "donated": [0, 0, 0, 1],
    "clipped": [0, 0, 0, 1],
    "interleaved": [0, 0, 1, 0],
    "sharded": [0, 0, 1, 1],
    "meshes": [0, 0, 1, 1],
    "planned": [0, 0, 0, 1],
}
OTHER = "runs another step, or on arguments of other shapes, than process"
FAILING = {
    "across": ["PipeshardError: mesh 0 has devices of processes [0, 1]: make every mesh of devices"]
    * 2,
    "lost": [
        f"PipeshardError: [0]['{name}'] is on another process's devices: pass it as a host array"
        for name in ("w0", "w3")
    ],
    "compare": ["PipeshardError: compare on one host: no process has all the results"] * 2,
    "differ": [
        f"PipeshardError: process {1 - n} {OTHER} {n}: make the same call in all" for n in (0, 1)
    ],
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
    assert statuses == [0] * count, errors
    found = [json.loads(out.splitlines()[-1]) for out in outs]
    return {case: of for case, *of in zip(cases, *found, strict=True)}


@pytest.fixture(scope="module")
def both():
    """What two processes found of each case; they do them all, one after the other."""
    return results([*EQUAL, "idle", "local", *FAILING, "gpipe"], 2)


@pytest.mark.parametrize("case", EQUAL)
def test_steps_over_two_processes_equal_one_device(case, both):
    for number, found in enumerate(both[case]):
        assert found["worst"] < 1e-12
        assert found["key"] is True  # small results are everybody's
        homes = EQUAL[case]
        assert found["here"] == [home == number or i == 0 for i, home in enumerate(homes)]
        seen = [{*at} for at in found["at"]]
        assert seen[1:] == [{home} for home in homes[1:]]  # with their sharding everywhere
        assert seen[0] == {number}
    one, other = both[case]
    for name in ("loss", "kept", "names", "makespan", "actions"):
        assert one[name] == other[name]
    assert one["names"][0][0] == one["names"][-1][1] == "[0]['w0']"


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


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("kill 0", "process 0 disconnected; it was at: mesh 0"),
        ("kill 1", "process 1 disconnected; it was at: mesh 1"),
        ("stop 1", "no action ended within 3 s: "),
    ],
)
def test_a_process_that_does_not_get_on_ends_the_others(case, message):
    statuses, outs, errors = start(case, 3)
    failed = int(case[-1])
    assert statuses[failed] == -9
    began = float(outs.pop(failed).split()[-1])
    for out in outs:
        [found] = json.loads(out.splitlines()[-1])
        assert found["error"].startswith(message), errors
        assert found["time"] - began < 5 + 3 * (case == "stop 1")


def test_what_a_process_said_before_it_failed_counts():
    ours, theirs = Pipe()
    for said in (("value", (7,)), ("last", (RunError("in the next call"), False))):
        theirs.send_bytes(pickle.dumps(said))
    cluster = Distributed((), 1.0, "a call")
    cluster.peers[1] = Peer(1, ours, True)
    assert cluster._value(cluster.peers[1], cluster._hear_all) == 7
    with pytest.raises(RunError, match="in the next call"):
        cluster._value(cluster.peers[1], cluster._hear_all)
