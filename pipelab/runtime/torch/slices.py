"""Slices of sequences have to compute what whole sequences do: checked before a run of them."""

from collections.abc import Callable, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pipelab.runtime.batches import length_of, mean_losses, samples_of, slices_of
from pipelab.runtime.torch.copies import copy_modules
from pipelab.runtime.torch.state import TREES

NEAR = 1e-6  # of float64 sums in another order, with room


def check_sliced(stages: Sequence[nn.Module]) -> None:
    """ValueError for a stage whose forward does not take the past of earlier slices."""
    for s, stage in enumerate(stages):
        try:
            signature(stage.forward).bind(None, ())
        except TypeError:
            raise ValueError(
                f"stage {s} is a {type(stage).__name__}, which takes whole sequences: give "
                "pipelab.models.sliced.Sliced(*layers), or a module with forward(x, past)"
            ) from None


def check_slices(
    stages: Sequence[nn.Module], piece: Any, shares: Sequence[float], loss: Callable[..., Any]
) -> None:
    """ValueError if slices give other outputs or another loss than whole sequences, in float64.

    piece   the first micro-batch: input and target
    shares  each slice's part of a sequence

    A stage that does not compute in float64 is left to the run.
    """
    (x, target), pairs = piece, []
    with torch.no_grad(), torch.random.fork_rng():
        for s, stage in enumerate(stages):
            try:
                whole, of_slices = _whole_and_slices(stage, x, shares)
            except Exception:
                return
            joined = TREES.joined(of_slices, len(of_slices))
            if not all(map(_near, pytree.tree_leaves(joined), pytree.tree_leaves(whole))):
                raise ValueError(
                    f"stage {s} computes something else of slices than of whole sequences, so it "
                    "looks at later positions, or at earlier ones outside take_slice: use causal "
                    "layers whose take_slice(x, past) keeps what later slices need, or a schedule "
                    "without slices"
                )
            x, pairs = whole, of_slices
        # The loss of the whole, and the mean over its slices.
        targets = slices_of(target, shares, TREES)
        means = [_mean_of(loss, y, t) for y, t in zip(pairs, targets, strict=True)]
        (mean,), (expected, _) = mean_losses(means, 1), _mean_of(loss, x, target)
        if abs(mean - expected) > NEAR * abs(expected):
            raise ValueError(
                f"the loss of whole sequences is {expected:.6g}, but the mean over their slices is "
                f"{mean:.6g}: shift targets in the data and not in the loss, let it return the "
                "mean over positions, or (mean, count), or use a schedule without slices"
            )


def _whole_and_slices(stage: nn.Module, x: Any, shares: Sequence[float]) -> tuple[Any, list[Any]]:
    """The outputs of whole sequences, and slice by slice."""
    (copied,) = copy_modules([stage])
    copied.double()
    device = next((p.device for p in copied.parameters()), None)
    x = pytree.tree_map_only(Tensor, lambda t: _wide(t.to(device)), x)
    whole, _ = copied(x, ())
    outputs, past = [], ()
    for part in slices_of(x, shares, TREES):
        y, past = copied(part, past)
        outputs.append(y)
    return whole, outputs


def _mean_of(loss: Callable[..., Any], y: Any, target: Any) -> tuple[float, float]:
    target = pytree.tree_map_only(Tensor, _wide, target)
    value = loss(y, target)
    count = samples_of(y, TREES) * length_of(y, TREES)
    mean, count = value if isinstance(value, tuple) else (value, count)
    return float(mean), float(count)


def _wide(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def _near(a: Any, b: Any) -> bool:
    if not isinstance(a, Tensor):
        return True
    if a.shape != b.shape:
        return False
    return bool(((a - b).abs() <= NEAR * b.abs().max()).all()) if a.numel() else True
