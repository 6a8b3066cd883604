"""Processes of jax.distributed on this machine: the worker over transfers, and SPMD."""

import json
import os
import re
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from threading import Timer

import tests.jax_setup  # isort: skip  # noqa: F401
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pipelab
from pipelab.jax.distributed import arrays_of
from pipelab.models.flax_mlp import mlp
from pipelab.runtime.wire import apart, whole
from tests.conftest import thorough

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "tests" / "workers" / "distributed.py"
GUARD = 60

# A thing that differs in process 1 -> what the error says does.
OTHERS = {
    "stage": "stage 1",
    "loss": "stage 3 with the loss",
    "optimizer": "the optimizer",
    "clip": "what `run` was asked for",
    "weights": "the weights of stage 2: ['Dense_0']['bias']",
    "data": "batch 1",
}
FAILING = {
    "early": "RunError: device 0, action 0F0: ZeroDivisionError: division by zero",
    "differ": "ValueError: process 1 runs a different schedule from process 0: "
    "call run with the same one in all",
    **{
        f"other {thing}": f"ValueError: {name} differs between process 0 and process 1: make "
        "the same call in all, with start weights from one seed, and whole batches in the same "
        "order: no shards, one seed for shuffling and augmentation"
        for thing, name in OTHERS.items()
    },
    "idle": "ValueError: 2 processes were started, but process 1 has none of the 4 rows: "
    "start fewer",
}
# Which stages are process 1's: 2 weights in each
OWN = {
    "pipedream_2bw": [0, 0, 2, 2],
    "zb_v": [0, 2, 2, 0],
    "keys": [2, 0, 2, 0],  # micro-batches of 3 and 2 samples, on devices named one by one
}
MORE = {  # in make test-all
    "gpipe": [0, 0, 2, 2],
    "interleaved": [0, 2, 0, 2],
    "zb_h1": [0, 0, 2, 2],
    "dualpipe_v": [0, 2, 2, 0],
    "paced": [0, 0, 2, 2],
}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def start(command, count=2, environment=None, hosts=None):
    """`count` processes, their outputs piped; `hosts`: what starts a command on each one's."""
    shell = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(
            [*(hosts[n] if hosts else ()), sys.executable, *command(n)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=shell | (environment(n) if environment else {}),
        )
        for n in range(count)
    ]


@contextmanager
def guarded(started, guard=GUARD):
    """After so many seconds, or afterwards, none of them is left.

    They are killed, since they ignore SIGTERM.
    """

    def end():
        for process in started:
            process.kill()

    timer = Timer(guard, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        end()
        for process in started:
            process.communicate()


def processes(command, count=2, environment=None, guard=GUARD, hosts=None):
    """(statuses, standard outputs, standard errors) of `count` processes."""
    started = start(command, count, environment, hosts)
    with guarded(started, guard):
        said = [process.communicate() for process in started]
    return [p.returncode for p in started], [out for out, _ in said], [err for _, err in said]


def worker(twists, count=2, guard=GUARD, host="localhost", hosts=None):
    address = f"{host}:{free_port()}"
    command = [str(WORKER), twists, address]
    return processes(lambda n: [*command, str(n), str(count)], count, guard=guard, hosts=hosts)


def results(twists, count=2, guard=GUARD):
    statuses, outs, errors = worker(twists, count, guard)
    assert statuses == [0] * count, errors
    return [json.loads(out.splitlines()[-1]) for out in outs]


def tried(request, name):
    """What the tests of this file that run are given as `name`, in their order."""
    items = [item for item in request.session.items if item.path == request.path]
    given = [item.callspec.params for item in items if hasattr(item, "callspec")]
    return [params[name] for params in given if name in params]


@pytest.fixture(scope="module")
def both(request):
    """What both processes found of each twist; two processes do them all, one after the other."""
    twists = [twist for twist in tried(request, "twist") if twist in {*FAILING, *OWN, *MORE}]
    twists += ["evaluate", "spmd"]
    found = results(",".join(twists), guard=3 * GUARD)
    return {twist: pair for twist, *pair in zip(twists, *found, strict=True)}


@pytest.mark.parametrize("twist", FAILING)
def test_a_failure_is_one_error_in_both_and_the_next_run_works(twist, both):
    assert both[twist] == [{"error": FAILING[twist]}] * 2


@pytest.mark.parametrize("twist", [*OWN, *thorough(*MORE)])
def test_both_processes_have_the_whole_result_and_the_verdict(twist, both):
    one, other = both[twist]
    assert one["passed"] is True
    assert one["late"] >= 0  # one clock
    assert one.pop("weights") == [2, 2, 2, 2]  # process 0 has all; the other its own
    assert other.pop("weights") == (OWN | MORE)[twist]
    assert one == other


def test_both_processes_have_the_whole_evaluation(both):
    one, other = both["evaluate"]
    assert one == other
    assert one["passed"] is True


def test_the_spmd_program_over_two_processes(both):
    one, other = both["spmd"]
    assert one == other
    assert [process for process, _ in one["devices"]] == [0, 0, 1, 1]
    assert one["leaves"] == 2
    assert abs(one["loss"] - one["expected"]) < 1e-12
    assert one["max_rel"] < 1e-12


@pytest.mark.thorough
def test_three_processes():
    outcomes = [found for [found] in results("pipedream", count=3)]
    assert all(found["passed"] and found["losses"] == outcomes[0]["losses"] for found in outcomes)
    assert [found["weights"] for found in outcomes] == [[2, 2, 2, 2], [0, 0, 2, 0], [0, 0, 0, 2]]


@pytest.mark.thorough
def test_two_hosts_with_clocks_of_their_own_train_what_one_process_trains():
    [one], [other] = results("skewed")
    assert one["passed"] is True
    # Right but for half a round trip, where the clocks are an hour apart.
    assert one["late"] > -0.05
    assert one["makespan"] < GUARD
    with jax.enable_x64(True):
        random = np.random.default_rng(0)
        batches = [tuple(random.normal(size=(12, 8)) for _ in range(2)) for _ in range(2)]
        here = pipelab.run(
            pipelab.make("pipedream_flush", 4, 4, batches=2),
            mlp(4, width=8, layers=1),
            batches,
            lambda y, t: ((y - t) ** 2).mean(),
            optax.adam(0.01),
            backend="jax",
            check=False,
        )
    assert one["losses"] == other["losses"] == here.losses


@pytest.mark.thorough
@pytest.mark.skipif(not which("ip"), reason="needs ip")
def test_two_hosts_with_a_cable_and_no_way_elsewhere(two_hosts):
    # Was: where no route led further, each host called itself 127.0.0.1, and neither was reached.
    commands, (host, _) = zip(*two_hosts, strict=True)
    statuses, outs, errors = worker("pipedream_2bw", host=host, hosts=commands, guard=2 * GUARD)
    assert statuses == [0, 0], errors
    [one], [other] = (json.loads(out.splitlines()[-1]) for out in outs)
    assert one["passed"] and one["losses"] == other["losses"]


@pytest.mark.thorough  # in make test "early" raises, is caught, and the next run works
def test_a_process_that_raises_ends_both_with_its_error():
    statuses, outs, errors = worker("raise 1")
    assert 0 not in statuses
    assert "losses" not in "".join(outs)
    for error in errors:
        assert "RunError: device 3, action 3F0: ZeroDivisionError: by design" in error


@pytest.mark.timed
@pytest.mark.parametrize(
    ("twist", "message", "patience"),
    [
        # Was: the survivors were aborted by jax, and none of them said why.
        ("kill 0", "process 0 disconnected; it was at: device 0 at", 5),
        *thorough(
            ("kill 1", "process 1 disconnected; it was at: device 2 at", 5),
            ("stop 1", "no action ended within 8 s: device 0 at", 8 + 5),
            # While the processes meet.
            ("leave 2", "process 2 has not made the call within 8 s", 8 + 5),
        ),
    ],
)
def test_a_process_that_ends_or_hangs_ends_the_others_with_one_error(twist, message, patience):
    victim = twist[-1]
    address = f"localhost:{free_port()}"
    started = start(lambda n: [str(WORKER), twist, address, str(n), "3"], 3)
    with guarded(started):
        others = [process for n, process in enumerate(started) if n != int(victim)]
        told = [last_word(process, "error") for process in others]
        failed = last_word(started[int(victim)], "failed")["failed"]
    for word in told:
        assert re.match(f"RunError: {message}", word["error"])
        assert word["at"] - failed < patience
    # Without process 0 there is no store in which they could agree how far it was.
    assert twist == "kill 0" or told[0]["error"] == told[1]["error"]


def last_word(process, key):
    """The first JSON object with that key that a process prints."""
    for line in process.stdout:
        if line.startswith("{") and key in (found := json.loads(line)):
            return found
    raise AssertionError(f"it has ended: {process.stderr.read()}")


@pytest.mark.parametrize("count", [1, *thorough(2)])
def test_the_command_line_in_processes(count):
    port = free_port()
    options = [f"--devices={count}", "--microbatches=4", "--backend=jax", "--distributed", "--json"]
    statuses, outs, errors = processes(
        lambda n: ["-m", "pipelab", "run", "gpipe", *options],
        count,
        environment=lambda n: {
            "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
            "JAX_NUM_PROCESSES": str(count),
            "JAX_PROCESS_ID": str(n),
        },
    )
    assert statuses == [0] * count, errors
    reports = [
        [json.loads(line) for line in out.splitlines() if line.startswith("{")] for out in outs
    ]
    (report,), *others = reports  # the first process's alone
    assert report["check"]["passed"] is True and report["devices"] == count
    assert others == [[]] * (count - 1)


def test_arrays_come_as_they_were_sent():
    sent = {
        "keys": jax.random.split(jax.random.key(0), 3),
        "weak": jnp.asarray(0.37),  # was: of a strong type on the other side
        "half": jnp.ones((3, 2), jnp.bfloat16),
        "whole": jnp.arange(3),
        "empty": jnp.zeros((0, 3)),
    }
    skeleton, arrays = apart(sent, arrays_of)
    assert len(arrays) == 3  # by the servers, the words of keys among them
    found = whole(skeleton, arrays)
    words = jax.random.key_data
    assert (words(found.pop("keys")) == words(sent.pop("keys"))).all()
    for name, array in sent.items():
        assert found[name].aval == array.aval
        assert (found[name] == array).all()
