"""A table exported here runs in torch's own pipeline runtime, on two processes, equal gradients."""

import os
import subprocess
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from pipelab import make
from tests.support import PYTHON, batches, stages

TABLES = {
    name: make(name, 2, m, virtual=2 if name == "interleaved" else 1)
    for name, m in (
        ("gpipe", 4),
        ("pipedream_flush", 5),
        ("interleaved", 3),
        ("zb_h1", 5),
        ("dualpipe_v", 5),
    )
}


@pytest.fixture(scope="module")
def carried_out(tmp_path_factory):
    """Name of a table -> the stages, the batch and the gradients of torch's two ranks.

    They are started once and carry out one table after the other.
    """
    given, folder = {}, tmp_path_factory.mktemp("tables")
    for name, schedule in TABLES.items():
        m = schedule.microbatches
        job = {
            "stages": stages(schedule.stages),
            "batch": batches(1, samples=2 * m)[0],
            "microbatches": m,
            "placement": "v" if name == "dualpipe_v" else "loop",
        }
        given[name] = job["stages"], job["batch"]
        (folder / name).mkdir()
        (folder / name / "table.csv").write_text(schedule.to_torch_csv())
        torch.save(job, folder / name / "job.pt")
    worker = Path(__file__).parents[1] / "workers/torch_runtime.py"
    command = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += map(str, [worker, *(folder / name for name in TABLES)])
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        name: (*of, [torch.load(folder / name / f"gradients{rank}.pt") for rank in range(2)])
        for name, of in given.items()
    }


@pytest.mark.parametrize("name", TABLES)
def test_an_exported_table_runs_in_torchs_runtime(name, carried_out):
    modules, (x, y), (one, other) = carried_out[name]
    F.mse_loss(torch.nn.Sequential(*modules)(x), y).backward()
    ours = {
        f"{s}.{n}": p.grad for s, module in enumerate(modules) for n, p in module.named_parameters()
    }
    theirs = one | other
    assert theirs.keys() == ours.keys()
    for weight, gradient in ours.items():
        assert torch.allclose(theirs[weight], gradient, rtol=1e-12, atol=1e-15), weight
