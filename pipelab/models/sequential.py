"""Cutting a list of layers into stages, and a plain MLP."""

from collections.abc import Sequence
from itertools import accumulate, pairwise

from torch import nn

from pipelab.models import GAIN
from pipelab.table.action import check_counts


def split(layers: Sequence[nn.Module], balance: Sequence[int] | int) -> list[nn.Sequential]:
    """Stages of balance[s] consecutive layers each (torchgpipe's word): the layers, not copies.

    A number instead of a balance: that many stages, as equal as they can be, the longer ones first.

    >>> [len(stage) for stage in split(mlp(layers=4), [1, 3])]
    [1, 3]
    >>> [len(stage) for stage in split(mlp(layers=8), 3)]
    [3, 3, 2]
    """
    if not isinstance(balance, Sequence):
        (stages,) = check_counts(stages=balance)
        if stages > len(layers):
            raise ValueError(f"stages={stages} for {len(layers)} layers: give at most as many")
        balance = [len(layers[s::stages]) for s in range(stages)]
    if sum(balance) != len(layers) or min(balance, default=0) < 1:
        raise ValueError(
            f"balance {list(balance)} for {len(layers)} layers: give every stage at least one, "
            f"{len(layers)} in all"
        )
    bounds = pairwise(accumulate(balance, initial=0))
    return [nn.Sequential(*layers[a:b]) for a, b in bounds]


def mlp(
    layers: int = 8, width: int = 64, inputs: int | None = None, outputs: int | None = None
) -> list[nn.Module]:
    """`layers` layers of Linear + ELU, the last one without ELU.

    (samples, inputs or width) -> (samples, outputs or width). Gradients keep their size over dozens
    of layers: see `pipelab.models.GAIN`.
    """
    sizes = [inputs or width, *[width] * (layers - 1), outputs or width]
    linears = [nn.Linear(a, b) for a, b in pairwise(sizes)]
    for linear in linears:
        nn.init.orthogonal_(linear.weight, GAIN)
        nn.init.zeros_(linear.bias)
    return [*(nn.Sequential(linear, nn.ELU()) for linear in linears[:-1]), linears[-1]]


def parameters(stages: Sequence[nn.Module]) -> list[int]:
    """The number of parameters of each stage."""
    return [sum(p.numel() for p in stage.parameters()) for stage in stages]
