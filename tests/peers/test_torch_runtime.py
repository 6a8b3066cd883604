"""A table exported here runs in torch's own pipeline runtime, on two processes, equal gradients."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from pipelab import make
from tests.runtime.test_run import batches, stages


@pytest.mark.parametrize(
    ("name", "m"),
    [("gpipe", 4), ("pipedream_flush", 5), ("interleaved", 3), ("zb_h1", 5), ("dualpipe_v", 5)],
)
def test_an_exported_table_runs_in_torchs_runtime(name, m, tmp_path):
    schedule = make(name, 2, m, virtual=2 if name == "interleaved" else 1)
    modules, data = stages(schedule.stages), batches(1, samples=2 * m)
    (tmp_path / "table.csv").write_text(schedule.to_torch_csv())
    torch.save(modules, tmp_path / "stages.pt")
    torch.save(data[0], tmp_path / "batch.pt")
    worker = Path(__file__).parents[1] / "workers/torch_runtime.py"
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        worker,
        tmp_path,
        str(m),
        "v" if name == "dualpipe_v" else "loop",
    ]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, timeout=120, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    theirs = {
        k: g for rank in range(2) for k, g in torch.load(tmp_path / f"gradients{rank}.pt").items()
    }
    x, y = data[0]
    F.mse_loss(torch.nn.Sequential(*modules)(x), y).backward()
    ours = {
        f"{s}.{n}": p.grad for s, module in enumerate(modules) for n, p in module.named_parameters()
    }
    assert theirs.keys() == ours.keys()
    for name, gradient in ours.items():
        assert torch.allclose(theirs[name], gradient, rtol=1e-12, atol=1e-15), name
