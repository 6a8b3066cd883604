"""Ranks of a launcher and processes of a notebook: every type, and no limit but an action's."""

import json
import subprocess
import sys
import time

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from pipelab import RunError, make
from pipelab.runtime.torch.ranks import MOST, Ranks
from tests.support import (
    ENVIRONMENT,
    GUARD,
    PYTHON,
    WORKERS,
    Layer,
    free_port,
    passing,
    run_of,
    same,
    stages,
)
from tests.workers import defects as defects_worker


def on_two_ranks(folder, *names):
    """What rank 0 of two, as torchrun starts them, said of each run; and the errors of both."""
    where = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [PYTHON, str(WORKERS / "defects.py"), str(folder), str(rank), *names],
            env=ENVIRONMENT | where | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=GUARD) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    results = [json.loads(line) for line in said[0][0].splitlines()]
    return {result["name"]: result for result in results}, "\n".join(error for _, error in said)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    runs = "autocast", "between", "waiting", "checking", "unchecked", "hanging"
    return on_two_ranks(tmp_path_factory.mktemp("ranks"), *runs)


def test_autocast_around_a_run_on_ranks(ranks):
    # Was: the rank's stages ran inside the caller's autocast, whose cache kept the first weights'
    # casts: it trained with those; and so did the reference, so that the check passed.
    results, errors = ranks
    assert "autocast" in results, errors
    expected = defects_worker.autocast(autocast=torch.bfloat16)
    assert expected.check.passed
    assert results["autocast"]["losses"] == expected.losses
    assert results["autocast"]["passed"]


def test_a_rank_without_data_of_its_own_checks(ranks):
    # Was: NOT CHECKED, by a division by zero.
    results, errors = ranks
    assert "between" in results and results["between"]["passed"], errors


def test_a_rank_may_wait_while_others_work(ranks):
    # Was: no message in `timeout` seconds was an error, though an action of another rank ended
    # every third of a second.
    results, errors = ranks
    assert "waiting" in results, errors


def test_a_check_may_take_longer_than_an_action(ranks):
    # Was: the other ranks waited `timeout` seconds for the verdict, and then ended a run whose
    # training was done.
    results, errors = ranks
    assert "checking" in results, errors
    assert results["checking"]["passed"]


def test_all_ranks_say_where_one_hangs(ranks):
    results, errors = ranks
    assert "hanging" not in results
    text = "RunError: no action ended within 3 s: device 0 at 0B0; device 1 at 1F0\n"
    assert errors.count(text) == 2, errors


def test_all_ranks_hear_that_the_check_failed(ranks):
    # Was: the run, which was complete, ended in the reference's error on all ranks.
    results, errors = ranks
    assert results["unchecked"]["passed"] is False
    assert errors.count("itself failed, because ZeroDivisionError: by design") == 2, errors


def test_a_notebooks_types_cross_processes():
    # Was: "PicklingError: Can't pickle <class '__main__.Pair'>", since only the job went by
    # cloudpickle; and that a dataclass was no pytree, as which the notebook had registered it.
    done = subprocess.run(
        [PYTHON, str(WORKERS / "notebook.py")],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
        timeout=GUARD,
    )
    assert done.returncode == 0, done.stderr
    threads, processes = json.loads(done.stdout)
    assert processes == threads
    assert processes[1]


ENDLESS = """
import itertools, torch, pipelab
stages = [torch.nn.Linear(6, 6) for _ in range(2)]
given = pipelab.make("gpipe", 2, 2), stages, torch.nn.functional.mse_loss, torch.optim.SGD
with pipelab.Trainer(*given, backend="processes", check=False) as trainer:
    for batch in trainer.fit(itertools.repeat((torch.ones(8, 6), torch.ones(8, 6)))):
        print(batch.number, flush=True)
"""


def test_a_caller_that_is_killed_leaves_no_file(short_path):
    # Was: the folder with the fork server's address.
    where = ENVIRONMENT | {"TMPDIR": str(short_path)}
    command = [sys.executable, "-c", ENDLESS]
    caller = subprocess.Popen(command, env=where, stdout=subprocess.PIPE, text=True)
    try:
        assert caller.stdout.readline() == "1\n"
        assert any(short_path.glob("pymp-*")) and any(short_path.glob("pipelab-*"))
    finally:
        caller.kill()
        caller.wait()
    deadline = time.monotonic() + GUARD
    while left := {*short_path.iterdir()} - {*short_path.glob("torchinductor_*")}:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.parametrize("name", ["gpipe", "pipedream"])
def test_parametrized_layers_cross_processes(name):
    # Was: "Serialization of parametrized modules is only supported through state_dict()".
    norm = parametrizations.weight_norm(Layer())
    turn = parametrizations.orthogonal(Layer())
    modules = [nn.Sequential(*stages(1), norm), nn.Sequential(turn, *stages(1))]
    table = make(name, 2, 2, batches=2)
    result, threads = passing(table, modules, backend="processes"), run_of(table, modules)
    assert result.losses == threads.losses and same(result, threads)


def test_a_large_value_is_whole_and_leaves_nothing_in_the_store():
    ranks = Ranks.__new__(Ranks)
    ranks.store, ranks._long = torch.distributed.HashStore(), set()
    value = bytes(range(256)) * (MOST // 100)
    ranks.give("value", value)
    assert ranks.take(["value"], 1.0) == [value]
    ranks.give("value", None)  # withdrawn
    assert ranks.take(["value"], 1.0) == [None]
    ranks.give("value", value[::-1])
    assert ranks.take(["value"], 1.0) == [value[::-1]]
    ranks.drop("value")
    assert not ranks.store.check(["value"]) and not ranks.store.check(["value/rest"])


@pytest.mark.timed
def test_ranks_of_a_launcher_that_was_killed_end_in_time(monkeypatch):
    # Was: torch tried for up to three times as long.
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    for name, value in (where | {"RANK": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    began = time.monotonic()
    with pytest.raises(RunError, match=r"process 1 cannot find the others: .*127\.0\.0\.1"):
        run_of(make("gpipe", 2, 2), timeout=3.0)
    assert time.monotonic() - began < 3 + 5
