"""The replay computes the run's own model: its draws, masks and epsilons."""

import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pipelab import make
from tests.support import passing, run_of


class Grow(torch.autograd.Function):
    """Its gradient is wrong in a worker's thread, which the reference is not in."""

    @staticmethod
    def forward(ctx, x, by):
        ctx.by = by if threading.current_thread() is not threading.main_thread() else 1.0
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return ctx.by * gradient, None


class Wrong(nn.Module):
    """A linear layer, what it is given, and a gradient that is right if `by` is 1."""

    def __init__(self, then, by):
        super().__init__()
        self.linear, self.then, self.by = nn.Linear(8, 8), then, by

    def forward(self, x):
        return Grow.apply(self.then(self.linear(x)), self.by)


def noise(x):
    return x * (1 + torch.randn_like(x))


def rrelu(x):
    return F.rrelu(x, training=True)


def drawn_into(x):
    return x + torch.randn(x.shape, out=torch.empty_like(x))


def masked(x):
    """Attention with a mask of truth values between the features of a sample."""
    q = x.unflatten(1, (1, 4, 2))
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).flatten(1)


def inner_gradient(x):
    twice = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(twice.tanh().sum(), twice, create_graph=True)
    return x * slope


class Normed(nn.Module):
    """With an epsilon of its own type's."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(8)

    def forward(self, x):
        return self.norm(1e-3 * x)


def checked(then, by, schedule):
    torch.manual_seed(0)
    data = [(torch.randn(16, 8), torch.randn(16, 8)) for _ in range(2)]
    modules = [Wrong(then, by), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 8))]
    seed = 3 if then in (noise, rrelu, drawn_into) else None
    return run_of(make(*schedule, batches=2), modules, data, seed=seed).check


@pytest.mark.parametrize("schedule", [("gpipe", 2, 4), ("pipedream", 2, 4)], ids=str)
@pytest.mark.parametrize(
    "then",
    [noise, rrelu, drawn_into, masked, inner_gradient, Normed()],
    ids=lambda then: getattr(then, "__name__", "normed"),
)
def test_right_runs_pass_and_wrong_ones_fail(then, schedule):
    assert checked(then, 1.0, schedule).passed
    assert not checked(then, 1.01, schedule).passed


def two_parts(output, target):
    """The mean over some of the samples, and the mean over all."""
    some = (target[:, :1] > 0).double()
    return ((output - target) ** 2 * some).sum() / some.sum().clamp(min=1) + F.mse_loss(
        output, target
    )


@pytest.mark.parametrize(
    ("loss", "right"),
    [(F.mse_loss, True), (lambda y, t: (F.mse_loss(y, t), len(y)), True), (two_parts, False),
     (lambda y, t: F.mse_loss(y, t, reduction="sum"), False)],
)  # fmt: skip
def test_a_loss_that_is_no_mean_fails_though_dropout_needs_micro_batches(loss, right):
    torch.manual_seed(0)
    stages = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2)), nn.Linear(8, 8)]
    data = [tuple(torch.randn(2, 12, 8)) for _ in range(2)]
    given = make("gpipe", 2, 4, batches=2), stages, data, loss
    check = run_of(*given, seed=1).check
    assert check.passed == right, check
    assert check.unjudged
    assert right or "The loss is not a mean over the samples." in str(check)
    passing(*given, seed=1, reference="microbatches")  # as the caller says


def test_writes_into_weights_that_begin_after_the_first_micro_batch():
    torch.manual_seed(0)
    table = nn.Embedding(10, 4, max_norm=1.0).double()
    table.weight.data[:3] *= 0.01  # these are left alone
    stages = [nn.Sequential(table), nn.Linear(4, 4).double()]
    rows = [torch.arange(8) % 3, torch.arange(8), torch.arange(2, 10)]
    data = [(x, torch.randn(8, 4, dtype=torch.float64)) for x in rows]
    given = {"data": data, "optimizer": partial(torch.optim.SGD, lr=0.5)}
    passing(make("gpipe", 2, 4, batches=3), stages, **given)
    wrong = [Grown(table), stages[1]]
    assert not run_of(make("gpipe", 2, 4, batches=3), wrong, **given).check.passed


class Grown(nn.Module):
    """A layer whose gradient is wrong in a worker's thread."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return Grow.apply(self.layer(x), 1.01)
