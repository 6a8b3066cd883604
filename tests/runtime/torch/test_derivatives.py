"""Derivatives that a stage's own forward takes."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jvp, vmap
from torch.nn import functional as F

from pipelab import RunError, make
from tests.conftest import pairs
from tests.support import SGD, passing, run_of


def dual(layer, x):
    with forward_ad.dual_level():
        given = forward_ad.make_dual(x, torch.ones_like(x))
        return forward_ad.unpack_dual(layer(given).tanh()).tangent


def by_autograd(layer, x):
    with torch.enable_grad():  # also where it runs again before its backward
        x = x if x.requires_grad else x.detach().requires_grad_()
        (found,) = torch.autograd.grad(layer(x).tanh().sum(), x, create_graph=True)
    return found


DERIVATIVES = {
    "dual": dual,
    "autograd": by_autograd,
    "jvp": lambda layer, x: jvp(lambda v: layer(v).tanh(), (x,), (torch.ones_like(x),))[1],
    "jacfwd": lambda layer, x: vmap(jacfwd(lambda v: layer(v).tanh()))(x).sum(-1),
    "functional": lambda layer, x: functional_call(layer, dict(layer.named_parameters()), x),
}


class Derivative(nn.Module):
    def __init__(self, of):
        super().__init__()
        self.layer, self.of = nn.Linear(4, 4).double(), of

    def forward(self, x):
        return self.of(self.layer, x)


@pytest.mark.parametrize(
    ("name", "recompute", "of"), pairs(["gpipe", "zb_h1"], ["never", "always"], [*DERIVATIVES])
)
def test_a_forward_may_differentiate(name, recompute, of):
    # Was: forward-mode differentiation of what another stage sent made zeros without memory, whose
    # address was asked for.
    modules = [nn.Linear(4, 4).double(), Derivative(DERIVATIVES[of])]
    x, y = torch.randn(2, 8, 4).double()
    result = passing(make(name, 2, 4), modules, [(x, y)], recompute=recompute)
    model = copy.deepcopy(nn.Sequential(*modules))
    F.mse_loss(model(x), y).backward()
    SGD(model.parameters()).step()
    for of_stage, part in zip(result.weights, model, strict=True):
        for weight, expected in zip(of_stage.values(), part.parameters(), strict=True):
            assert torch.allclose(weight, expected, rtol=1e-9)


def energy(layer, x):
    return grad(lambda v: layer(v).tanh().sum())(x)


def nested(layer, x):
    with forward_ad.dual_level():  # as a thread has it that finds another one's
        return dual(layer, x)


@pytest.mark.parametrize(
    ("of", "remedy"), [(energy, r"use torch.autograd.grad\("), (nested, "say backend='processes'")]
)
def test_what_torch_cannot_do_there_is_refused_with_what_works(of, remedy):
    x, y = torch.randn(2, 8, 4).double()
    modules = [nn.Linear(4, 4).double(), Derivative(of)]
    with pytest.raises(RunError, match=remedy):
        run_of(make("gpipe", 2, 4), modules, [(x, y)])
