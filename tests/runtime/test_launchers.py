"""Ranks that torchrun or deepspeed started: the same run, on one machine or several."""

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from shutil import which

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import pipelab
from pipelab.runtime import clock
from pipelab.runtime.torch.ranks import Ranks
from tests.conftest import thorough
from tests.support import ENVIRONMENT, GUARD, PYTHON, ROOT, WORKERS, free_port
from tests.workers.launched import shown, uneven


def launched(ranks, *command, nodes=1, hosts=None):
    """(statuses, standard outputs, standard errors) of one agent of torchrun's per node.

    All are on loopback, or each on its host: (what starts a command there, its address).
    """
    meeting = f"{hosts[0][1] if hosts else '127.0.0.1'}:{free_port()}"
    agents = []
    for number, (started, address) in enumerate(hosts or [([], None)] * nodes):
        python = sys.executable if started else PYTHON  # a fork is not on that host
        at = ("--local-addr", address, "--rdzv-conf", f"is_host={int(not number)}")
        agents.append(
            subprocess.Popen(
                [
                    *started,
                    *(python, "-m", "torch.distributed.run"),
                    *("--nproc-per-node", str(ranks), "--nnodes", str(len(hosts or nodes * [0]))),
                    *("--rdzv-backend", "c10d", "--rdzv-endpoint", meeting, "--rdzv-id", "test"),
                    *(at if address else ()),
                    *command,
                ],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=ENVIRONMENT,
                cwd=ROOT,
            )
        )
    try:
        results = [agent.communicate(timeout=GUARD) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    return [a.returncode for a in agents], [out for out, _ in results], [err for _, err in results]


def worker(twist, folder, ranks=2, **where):
    return launched(ranks, str(WORKERS / "launched.py"), twist, str(folder), **where)


def only(outputs):
    """What rank 0 said, on whichever node it is."""
    return json.loads("".join(outputs))


@pytest.fixture(scope="module")
def expected():
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.2)).double() for _ in range(2)]
    data = []
    for b in range(4):
        generator = torch.Generator().manual_seed(b)
        data.append(
            tuple(torch.randn(8, 6, dtype=torch.float64, generator=generator) for _ in range(2))
        )
    return pipelab.run(
        pipelab.make("pipedream", 2, 2, batches=4), stages, data, F.mse_loss, torch.optim.AdamW
    )


def test_two_agents_run_what_threads_run(expected, two):
    _, _, (result, *_) = two
    assert result["passed"] is True
    assert result["losses"] == expected.losses
    assert result["late"] >= 0  # one clock
    assert [len(names) for names in result["weights"]] == [2, 2]  # rank 0 has all for the check


OTHERS = {  # a thing that differs in rank 1 -> what the error says
    "shuffled": "batch 0 differs between process 0 and process 1",
    "unseeded": "of stage 1 differs between process 0 and process 1",
    "unseeded replicas": "of stage 0 differs between process 0 and process 1",
    "raise": "device 1, action 1F0: ZeroDivisionError: by design",
}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder in which the ranks of two agents have trained, failed, then trained, stopped and
    resumed, then trained again; and what they said of it: the errors of both by twist, and rank
    0's results.
    """
    folder = tmp_path_factory.mktemp("two")
    twists = ",".join(["plain", *OTHERS, "resume", "uneven"])
    statuses, outs, errors = worker(twists, folder, ranks=1, nodes=2)
    assert statuses == [0, 0], errors
    said, failed = [json.loads(line) for line in "".join(outs).splitlines()], defaultdict(list)
    for one in said:
        if "error" in one:
            failed[one["twist"]].append(one["error"])
    return folder, failed, [one for one in said if "error" not in one]


def test_messages_of_changing_sizes_on_ranks(two):
    _, _, (*_, result) = two
    assert result["passed"] is True
    on_threads = shown(uneven(check=False))
    assert (result["losses"], result["sums"]) == (on_threads["losses"], on_threads["sums"])


@pytest.mark.thorough
@pytest.mark.skipif(not which("ip"), reason="needs ip")
def test_two_hosts_with_a_cable_run_what_threads_run(expected, two_hosts, tmp_path):
    statuses, outs, errors = worker("plain", tmp_path, ranks=1, hosts=two_hosts)
    assert statuses == [0, 0], errors
    result = only(outs)
    assert result["passed"] is True
    assert result["losses"] == expected.losses


@pytest.mark.parametrize("twist", OTHERS)
def test_all_ranks_raise_the_same_error_and_the_next_run_works(twist, two):
    _, failed, _ = two
    one, other = failed[twist]
    assert one == other and OTHERS[twist] in one


def test_a_resumed_run_on_ranks_is_the_run_on_threads(expected, two):
    folder, _, (_, result, _) = two
    assert result["losses"] == expected.losses[2:]
    assert result["passed"] is True
    files = sorted(p.name for p in (folder / "checkpoint").iterdir())
    assert files == ["checkpoint.json", "stage_000.pt", "stage_001.pt"]


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    """A folder in which four ranks have trained three times, and what rank 0 said of each run."""
    folder = tmp_path_factory.mktemp("four")
    statuses, outs, errors = worker("unchecked,skewed,replicas", folder, ranks=4)
    assert statuses == [0], errors
    return folder, [json.loads(line) for line in outs[0].splitlines()]


def test_clocks_of_several_hosts_are_aligned(four):
    _, (_, result, _) = four
    assert result["passed"] is True
    assert (
        result["late"] > -0.05
    )  # right but for half a round trip, where the clocks are an hour apart
    assert result["makespan"] < GUARD


def test_only_end_stages_read_the_data(four):
    readers = {file.name: file.read_text() for file in four[0].glob("unchecked_read_by_*")}
    assert set(readers) == {"unchecked_read_by_0", "unchecked_read_by_3"}
    assert readers["unchecked_read_by_0"].split() == ["0", "1", "2", "3"]  # each once


def test_replicas_on_ranks(four):
    _, (*_, result) = four
    assert (result["passed"], result["replicas"]) == (True, 2)


@pytest.mark.parametrize(
    ("twist", "message"),
    [
        *thorough(("raise", OTHERS["raise"])),
        ("kill", "Signal 9 (SIGKILL)"),
    ],  # one that hangs: tests/runtime/test_ranks.py
)
def test_a_rank_that_fails_ends_all(twist, message, tmp_path):
    began = time.monotonic()
    statuses, outs, errors = worker(twist, tmp_path)
    assert statuses != [0]
    assert "".join(outs) == ""
    assert message in errors[0]
    assert time.monotonic() - began < GUARD


CATCHES = """
import torch, pipelab
from torch.nn import functional as F

class Raises(torch.nn.Linear):
    def forward(self, x):
        raise ValueError("no")

torch.manual_seed(0)
stages = [torch.nn.Linear(6, 6) for _ in range(RANKS)]
stages[WHICH] = Raises(6, 6)
data = [(torch.ones(8, 6), torch.ones(8, 6))]
schedule = pipelab.make("gpipe", RANKS, 4)
for _ in range(2):
    try:
        pipelab.run(schedule, stages, data, F.mse_loss, torch.optim.SGD)
    except RuntimeError as error:
        print(error)
"""


# In make test: two ranks catch the errors of OTHERS, go on and end well.
@pytest.mark.thorough
@pytest.mark.parametrize(("ranks", "which"), [(2, 0), (3, 1)])
def test_ranks_that_catch_an_error_go_on_and_end_as_any_script(ranks, which, tmp_path):
    # Was: those of which a thread still waited inside gloo were ended by SIGABRT.
    script = tmp_path / "catches.py"
    script.write_text(CATCHES.replace("RANKS", str(ranks)).replace("WHICH", str(which)))
    statuses, (out,), _ = launched(ranks, str(script))
    assert statuses == [0]
    assert out.count(f"device {which}, action {which}F0: ValueError: no") == 2 * ranks


def test_another_number_of_ranks_than_devices():
    ranks = Ranks.__new__(Ranks)
    ranks.me, ranks.count = 0, 3
    with pytest.raises(ValueError, match="need 2 ranks, but 3 were started: start 2"):
        ranks.ranks(2)


@pytest.mark.thorough
def test_the_launcher_shows_the_error():
    statuses, _, errors = launched(
        3, "-m", "pipelab", "run", "gpipe", "--devices", "2", "--microbatches", "2"
    )
    assert statuses != [0]
    assert "need 2 ranks, but 3 were started: start 2 (torchrun" in errors[0]


@pytest.mark.thorough
def test_the_command_line_on_two_agents():
    sizes = ["--devices", "2", "--microbatches", "4", "--batches", "2"]
    statuses, outs, errors = launched(
        1, "-m", "pipelab", "run", "pipedream_flush", *sizes, "--json", nodes=2
    )
    assert statuses == [0, 0], errors
    result = only(outs)
    assert result["check"]["passed"] is True
    assert result["measured"]["makespan"] > 0
    assert len(result["losses"]) == 2


@pytest.mark.thorough  # its ranks are torchrun's; in make test lecture 15 starts it
@pytest.mark.skipif(
    not (Path(sys.executable).parent / "deepspeed").exists(), reason="needs deepspeed"
)
def test_deepspeeds_launcher():
    shell = ENVIRONMENT | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    launch = f"deepspeed --num_gpus 2 --master_port {free_port()} --module pipelab"
    line = f"{launch} run gpipe --devices 2 --microbatches 4".split()
    done = subprocess.run(line, capture_output=True, text=True, env=shell, timeout=GUARD, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "Check passed" in done.stdout


@pytest.mark.parametrize("skew", [0.0, 100.0, -7.5])
def test_offsets_are_found_by_asking(skew):
    found = clock.behind(lambda: time.perf_counter() + skew)
    assert abs(found - skew) < 0.05
