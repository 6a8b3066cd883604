"""Cutting a list of layers into stages, and a plain MLP."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn


def split(layers: Sequence[nn.Module], balance: Sequence[int]) -> list[nn.Sequential]:
    """Stages of balance[s] consecutive layers each (torchgpipe's word); the layers themselves, not copies.

    >>> [len(stage) for stage in split(mlp(layers=4), [1, 3])]
    [1, 3]
    """
    if sum(balance) != len(layers) or any(b < 1 for b in balance):
        raise ValueError(
            f"balance {list(balance)} for {len(layers)} layers: give every stage at least one, {len(layers)} in all"
        )
    ends = [sum(balance[: s + 1]) for s in range(len(balance))]
    return [
        nn.Sequential(*layers[end - count : end]) for end, count in zip(ends, balance, strict=True)
    ]


def mlp(
    layers: int = 8, width: int = 64, inputs: int | None = None, outputs: int | None = None
) -> list[nn.Module]:
    """`layers` layers of Linear + GELU, the last one without: (samples, inputs or width) -> (samples, outputs or width)."""
    sizes = [inputs or width, *[width] * (layers - 1), outputs or width]
    body: list[nn.Module] = [
        nn.Sequential(nn.Linear(a, b), nn.GELU()) for a, b in pairwise(sizes[:-1])
    ]
    return [*body, nn.Linear(sizes[-2], sizes[-1])]


def parameters(stages: Sequence[nn.Module]) -> list[int]:
    """How many parameters each stage has."""
    return [sum(p.numel() for p in stage.parameters()) for stage in stages]
