"""torchgpipe on the same stages and batches gives the same losses and weights."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from pipelab import Recompute, make, run
from pipelab.peers.torchgpipe import run_torchgpipe
from tests.test_run import SGD, batches, stages


@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize("samples", [8, 10])
def test_torchgpipe_trains_the_same_weights(samples, recompute):
    modules, data = stages(3), batches(3, samples=samples)
    ours = run(make("gpipe", 3, 4, batches=3), modules, data, F.mse_loss, SGD, recompute=recompute)
    theirs = run_torchgpipe(modules, data, F.mse_loss, SGD, chunks=4, checkpoint=recompute.value)
    assert theirs.losses == pytest.approx(ours.losses, rel=1e-12)
    for mine, other in zip(ours.weights, theirs.weights, strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.allclose(mine[k], other[k], rtol=1e-10) for k in mine)
    assert len(theirs.seconds) == 3


def test_the_stages_are_left_alone():
    modules = stages(2)
    before = [p.clone() for s in modules for p in s.parameters()]
    run_torchgpipe(modules, batches(1), F.mse_loss, partial(torch.optim.Adam, lr=0.1), chunks=2)
    assert all(torch.equal(a, b) for a, b in zip(before, (p for s in modules for p in s.parameters()), strict=True))
