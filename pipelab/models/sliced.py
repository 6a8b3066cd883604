"""Stages that take a sequence slice by slice: a slice's keys and values stay for those after it."""

from typing import Any

from torch import nn


class Sliced(nn.Sequential):
    """Layers one after another, of which some look back at earlier positions of a sequence.

    Such a layer has a method `take_slice(x, past) -> (y, past)`: `past` is what it has left at the
    slice before, () at the first one, and what it leaves now. Other layers are just called. Without
    a past it is called with whole sequences, as any nn.Sequential.
    """

    def forward(self, x: Any, past: Any = None) -> Any:
        if past is None:
            return super().forward(x)
        left = []
        for layer, own in zip(self, past or [()] * len(self), strict=True):
            take_slice: Any = getattr(layer, "take_slice", None)
            x, kept = take_slice(x, own) if take_slice else (layer(x), ())
            left.append(kept)
        return x, tuple(left)
