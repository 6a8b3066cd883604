"""Other pipelines on the same stages and batches give the same losses and weights."""

from functools import partial

import pytest
import torch
from torch.nn import functional as F

from pipelab import Recompute, make, run
from pipelab.peers.torch_pipelining import run_torch_pipelining
from pipelab.peers.torchgpipe import run_torchgpipe
from tests.test_run import SGD, batches, stages

Adam = partial(torch.optim.Adam, lr=0.01)


def agree(ours, theirs):
    assert theirs.losses == pytest.approx(ours.losses, rel=1e-12)
    for mine, other in zip(ours.weights, theirs.weights, strict=True):
        assert mine.keys() == other.keys()
        assert all(torch.allclose(mine[k], other[k], rtol=1e-10) for k in mine)
    assert len(theirs.seconds) == len(ours.losses)
    assert min(theirs.seconds) > 0


@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize("samples", [8, 10])
def test_torchgpipe_trains_the_same_weights(samples, recompute):
    modules, data = stages(3), batches(3, samples=samples)
    ours = run(make("gpipe", 3, 4, batches=3), modules, data, F.mse_loss, SGD, recompute=recompute)
    agree(
        ours, run_torchgpipe(modules, data, F.mse_loss, SGD, chunks=4, checkpoint=recompute.value)
    )


@pytest.mark.parametrize("optimizer", [SGD, Adam])
@pytest.mark.parametrize(
    ("name", "v", "m"), [("gpipe", 1, 3), ("pipedream_flush", 1, 5), ("interleaved", 2, 4)]
)
def test_torch_pipelining_trains_the_same_weights(name, v, m, optimizer):
    modules, data = stages(2 * v), batches(3, samples=2 * m)
    ours = run(make(name, 2, m, virtual=v, batches=3), modules, data, F.mse_loss, optimizer)
    agree(
        ours,
        run_torch_pipelining(name, modules, data, F.mse_loss, optimizer, devices=2, microbatches=m),
    )


def test_torch_pipelining_says_what_it_does_not_take():
    go = partial(
        run_torch_pipelining,
        stages=stages(2),
        batches=batches(1, 7),
        loss=F.mse_loss,
        optimizer=SGD,
        devices=2,
    )
    with pytest.raises(
        ValueError, match="batch 0: 7 samples do not make 2 micro-batches of one size"
    ):
        go("gpipe", microbatches=2)
    with pytest.raises(
        ValueError,
        match="no schedule for 'pipedream': use one of gpipe, pipedream_flush, interleaved",
    ):
        go("pipedream", microbatches=7)


@pytest.mark.parametrize(
    "train",
    [
        partial(run_torchgpipe, chunks=2),
        lambda *a: run_torch_pipelining("gpipe", *a, devices=2, microbatches=2),
    ],
    ids=["torchgpipe", "torch"],
)
def test_the_stages_are_left_alone(train):
    modules = stages(2)
    before = [p.clone() for s in modules for p in s.parameters()]
    train(modules, batches(1), F.mse_loss, partial(torch.optim.Adam, lr=0.1))
    after = [p for s in modules for p in s.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in after)
