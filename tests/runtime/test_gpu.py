"""The GPU: what needs one (marker gpu), and what can be shown of that without one."""

import re
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from gpu import measured, ranks
from gpu import report as gpu
from gpu.cases import CASES
from gpu.measured import Model, Place, Sizes
from gpu.memory import peak_together, peaks
from pipelab import Costs, simulate
from pipelab.predict.memory import Memory, MemoryStep
from pipelab.runtime.torch import device, groups

GPU = torch.device("cuda:0")
CPU = torch.device("cpu")


# ---- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_runs_on_a_gpu_equal_their_reference(name):
    result = CASES[name].run(GPU)
    assert result.check.passed, result.check
    assert all(span.end >= span.start for span in result.timeline.spans)


@pytest.mark.gpu
def test_workers_keep_their_streams():
    streams = [device.torch_device(GPU, worker).stream for worker in (0, 1, 0)]
    assert streams[0] == streams[2] != streams[1]


@pytest.mark.gpu
def test_memory_is_torchs_own_count():
    model = Model(Place(GPU, Sizes(2048, 1024, 1.0), 60))
    ours, torchs, _ = peaks(lambda: model.run(model.table("gpipe", 1), [GPU]), torch.device(GPU))
    assert ours == pytest.approx(torchs, rel=0.05)


@pytest.mark.gpu
def test_the_makespan_is_within_the_hosts_clock():
    began = time.perf_counter()
    result = CASES["1F1B on four streams, AdamW"].run(GPU)
    assert 0 < result.timeline.makespan < time.perf_counter() - began


# ---- without one


def test_ranks_meet_in_an_order_that_ends(monkeypatch):
    """As NCCL: a rank's first call of a group ends when the other rank has called it too."""
    pairs = [(0, 1), (0, 2), (1, 2)]
    meetings = {ends: threading.Barrier(2) for pair in pairs for ends in (pair, pair[::-1])}

    def call(tensor, other, group):
        meetings[group].wait(timeout=10)  # BrokenBarrierError where they wait for each other

    monkeypatch.setattr(groups.dist, "new_group", lambda ranks, **options: tuple(ranks))
    monkeypatch.setattr(groups.dist, "send", call)
    monkeypatch.setattr(groups.dist, "recv", call)
    with ThreadPoolExecutor(3) as pool:
        ends = [pool.submit(groups.groups_of, pairs, me, CPU) for me in range(3)]
        assert [[*end.result(timeout=20)] for end in ends] == [[*meetings]] * 3


# ---- make gpu, rehearsed


def test_the_peak_of_rows_that_share_a_device():
    """The largest sum over time, which is at most that of the rows' own peaks."""
    steps = [
        MemoryStep(0, 0.0, 0, "activations", 5.0),
        MemoryStep(0, 1.0, 0, "activations", -5.0),
        MemoryStep(1, 2.0, 0, "activations", 3.0),
        MemoryStep(0, 2.5, 0, "activations", 4.0),
    ]
    memory = Memory(2, steps, "measured")
    assert (memory.peak(), peak_together(memory)) == ([5.0, 3.0], 7.0)


@pytest.mark.parametrize(
    ("rank", "gpus", "wire", "given"),
    [
        (1, 1, "NCCL", {"CUDA_VISIBLE_DEVICES": "0", "NCCL_HOSTID": "1"}),
        (1, 1, "gloo", {"CUDA_VISIBLE_DEVICES": "0"}),
        (3, 2, "NCCL", {"CUDA_VISIBLE_DEVICES": "1", "NCCL_HOSTID": "1"}),
        (1, 2, "NCCL", {"CUDA_VISIBLE_DEVICES": "1", "NCCL_HOSTID": "0"}),
        (1, 0, "gloo", {}),
    ],
)
def test_ranks_share_gpus(rank, gpus, wire, given, monkeypatch):
    """To NCCL no two ranks on a GPU are of the same host."""
    shell = {"LOCAL_RANK": str(rank)}
    monkeypatch.setattr(ranks.os, "environ", shell)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    ranks.share_gpus(wire)
    assert shell == {"LOCAL_RANK": str(rank)} | given


ROUGH = Sizes(16, 32, 0.0, microbatches=4, repeats=2, pairs=2)
HERE = Place(CPU, ROUGH, 60)
LONG = (
    "What the check costs",
    "Lectures",
    "Beside a compiled loop",
    "Checked runs",
    "Processes",
    "Faults",
    "JAX in two processes",
    "Pipeshard",
    "The suite's GPU tests",
)


@pytest.mark.thorough
@pytest.mark.parametrize("title", [title for title in gpu.SECTIONS if title not in LONG])
def test_what_a_gpu_shows_rehearsed(title):
    outcome = gpu.attempt(title, HERE)
    assert outcome.state == ("skipped" if title == "Memory" else "passed"), outcome.parts
    for part in outcome.parts:
        assert not re.search(r"nan|inf|FAILED", part)
        assert all(len(line) <= 100 or line.startswith("|") for line in part.splitlines())


def test_a_prediction_of_the_run_that_was_fitted(monkeypatch):
    """The pairing of `predictions`, without noise: simulated runs are predicted exactly."""

    def simulated(self, table, devices):
        costs = Costs(3, 2, 1).split(table.stages // table.devices)
        return SimpleNamespace(timeline=simulate(table, costs))

    monkeypatch.setattr(Model, "run", simulated)
    rows = gpu.predictions(HERE)[1].splitlines()[2:]
    assert len(rows) == 8
    assert all(row.count(" +0.0 (+0.0 to +0.0) %") == 2 for row in rows)


def test_what_a_section_raises_is_its_outcome(monkeypatch, capsys):
    def raising(error):
        def section(place):
            raise error

        return section

    for error, state, said in (
        (gpu.Skip("one GPU here"), "skipped", "Skipped: one GPU here."),
        (ModuleNotFoundError("x", name="flax"), "skipped", "it needs flax, which is not installed"),
        (ModuleNotFoundError("x", name="pipelab.no"), "FAILED", "ModuleNotFoundError: x"),
        (RuntimeError("CUDA error\nmore"), "FAILED", "Failed: `RuntimeError: CUDA error`"),
        (gpu.Failed(["a table"]), "FAILED", "a table"),
    ):
        monkeypatch.setitem(gpu.SECTIONS, "Memory", raising(error))
        outcome = gpu.attempt("Memory", HERE)
        assert outcome.state == state
        assert said in outcome.parts[0]


def test_the_page_says_what_became_of_every_section(capsys):
    def run(title, device, seconds):
        assert 0 < seconds <= 100
        return gpu.Outcome("FAILED" if title == "JAX" else "passed", [f"of {title}"])

    text, passed = gpu.report("cpu", 100, run)
    assert not passed
    assert all(f"## {title}\n\nof {title}\n" in text for title in gpu.SECTIONS)
    assert "| JAX | FAILED | 0 |" in text
    kept = []
    text, passed = gpu.report("cpu", 100, run, begin="JAX", keep=kept.append)
    assert "## Lectures" not in text and "of Pipeshard" in text
    assert len(kept) == len(gpu.SECTIONS) - [*gpu.SECTIONS].index("JAX") and kept[-1] == text
    text, passed = gpu.report("cpu", 0, run)
    assert passed and text.count("Skipped: the 0 seconds were over.") == len(gpu.SECTIONS)


def test_a_section_that_is_cut_off_keeps_its_rows(capsys):
    for cells in (("1F1B", 64), ("GPipe", 65)):
        measured.row_of(*cells)
    print("and a warning")
    parts = gpu.rows_until_then(capsys.readouterr().out)
    assert parts == ["The rows until then:", "```\n| 1F1B | 64 |\n| GPipe | 65 |\n```"]
    assert gpu.rows_until_then("no row") == []


def test_a_section_has_a_process_which_is_ended_in_time(capsys):
    assert gpu.in_a_process("Memory", "cpu", 60).state == "skipped"
    assert gpu.in_a_process("Memory", "cpu", 0.1).parts == ["Failed: `no end within 0 s`"]


def test_what_torchrun_has_started_ends_with_a_section():
    # Was: its workers, which have sessions of their own, went on when it was killed.
    worker = "setsid sh -c 'echo up; exec sleep 60'"
    script = f"trap 'kill $worker; exit' TERM; {worker} & worker=$!; wait"
    with subprocess.Popen(
        ["sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        process.stdout.readline()
        gpu.end(process)
        assert process.stdout.read() == ""  # which a worker would keep open


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "0"], "seconds=0: give a whole number of at least 1"),
        (["--device", "cpu", "--markdown", "nowhere/page.md"], "there is no folder nowhere"),
        pytest.param(
            [],
            "no CUDA device here: make gpu DEVICE=cpu rehearses it",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU"),
        ),
    ],
)
def test_make_gpu_refuses_in_one_line(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        gpu.main(arguments)
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
