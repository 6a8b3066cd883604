"""Stages that take a sequence slice by slice: its keys and values stay for later slices."""

from typing import Any

from torch import nn


class Sliced(nn.Sequential):
    """Layers in sequence, some of which look back at earlier positions of a sequence.

    Such a layer has a method `take_slice(x, past) -> (y, past)`: it gets the `past` that it
    returned for the slice before, () for the first one. Other layers are just called. Without a
    past, it takes whole sequences, as any nn.Sequential.
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
