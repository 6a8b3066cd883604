"""Sums of gradients in half precision: kept in float32, and rounded once."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipelab import make
from tests.conftest import thorough
from tests.support import passing, run_of

HALVES = torch.bfloat16, torch.float16
SGD = partial(torch.optim.SGD, lr=0.5)


def mean(y, target):
    return (y - target).mean()


class Times(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones((), dtype=torch.bfloat16))

    def forward(self, x):
        return x * self.w


def of_ones(table, stages=None, **options):
    """The weights after an update by the mean of 320 ones, which the type cannot count."""
    x = torch.ones(320, 1, dtype=torch.bfloat16)
    stages = stages or [Times() for _ in range(table.model_stages)]
    found = passing(table, stages, [(x, x - x)], mean, SGD, **options)
    return [float(w) for of in found.weights for w in of.values()]


@pytest.mark.parametrize("name", ["gpipe", *thorough("zb_h1", "dualpipe", "interleaved")])
def test_320_micro_batches_of_ones(name):
    table = make(name, 2, 320, virtual=2 if name == "interleaved" else 1)
    assert {*of_ones(table)} == {0.5}


def test_sums_over_ties_replicas_and_a_clipped_norm():
    tied = Times()
    assert of_ones(make("gpipe", 2, 320), [tied, tied]) == [0.0, 0.0]
    assert of_ones(make("gpipe", 2, 80), replicas=4) == [0.5, 0.5]
    clipped = of_ones(make("gpipe", 2, 320), clip=2**-0.5)
    assert clipped == [0.75, 0.75]  # the norm of two ones is the root of 2


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("m", [16, *thorough(64), 256])
def test_the_gradient_is_as_near_as_that_of_the_undivided_batch(m, dtype):
    torch.manual_seed(0)
    layers = (nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
    model = nn.Sequential(*layers).to(dtype)
    x, y = torch.randn(2, 4 * m, 6).to(dtype)
    given = []

    class Told(torch.optim.SGD):
        def step(self):
            given.extend(p.grad for p in self.param_groups[0]["params"])

    run_of(make("gpipe", 1, m), [model], [(x, y)], optimizer=Told, check=False)
    assert {gradient.dtype for gradient in given} == {dtype}

    def whole(dtype):
        undivided = copy.deepcopy(model).to(dtype)
        F.mse_loss(undivided(x.to(dtype)), y.to(dtype)).backward()
        return [p.grad for p in undivided.parameters()]

    def off(gradients):
        pairs = zip(gradients, whole(torch.float64), strict=True)
        return sum(float((a.double() - b).square().sum()) for a, b in pairs)

    assert off(given) < 1.5 * off(whole(dtype))


def test_rows_that_come_several_times_in_a_sparse_gradient():
    table = nn.Embedding(4, 2, sparse=True, dtype=torch.bfloat16)
    table.weight.data.fill_(1)
    rows = torch.zeros(320, 1, dtype=torch.long)
    data = rows, torch.zeros(320, 1, 2, dtype=torch.bfloat16)
    result = run_of(make("gpipe", 2, 320), [table, Times()], [data], mean, SGD, check=False)
    assert result.weights[0]["weight"].tolist() == [[0.75] * 2] + [[1.0] * 2] * 3
