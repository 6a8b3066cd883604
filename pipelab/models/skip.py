"""Skip connections across stages: one layer stashes, a later one pops, wherever the cuts are.

Layers pass on (x, {name: tensor}), so stashed tensors travel through the stages in between, and
their gradients back. Between processes they are sent from stage to stage.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn


class Stash(nn.Module):
    """Remembers its input under a name and passes it on (torchgpipe's word)."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class Pop(nn.Module):
    """join(its input, the tensor stashed under the name), which is then dropped."""

    def __init__(self, name: str, join: Callable[[Tensor, Tensor], Tensor] = Tensor.add) -> None:
        super().__init__()
        self.name, self.join = name, join


class _Carry(nn.Module):
    """A layer between others that stash and pop."""

    def __init__(self, layer: nn.Module, first: bool, last: bool) -> None:
        super().__init__()
        self.layer, self.first, self.last = layer, first, last

    def forward(self, carried: Any) -> Any:
        x, stashed = (carried, {}) if self.first else carried
        stashed = dict(stashed)  # its input stays as it is
        if isinstance(self.layer, Stash):
            stashed[self.layer.name] = x
        elif isinstance(self.layer, Pop):
            x = self.layer.join(x, stashed.pop(self.layer.name))
        else:
            x = self.layer(x)
        return x if self.last else (x, stashed)


def with_skips(layers: Sequence[nn.Module]) -> list[nn.Module]:
    """Layers with `Stash` and `Pop` among them, for `split`: the same number, to be cut anywhere.

    Raises ValueError for a name that is not stashed before it is popped, or never popped, or
    stashed twice.

    >>> from torch import nn
    >>> len(with_skips([Stash("a"), nn.Tanh(), Pop("a")]))
    3
    """
    open_names: set[str] = set()
    for i, layer in enumerate(layers):
        if isinstance(layer, Stash):
            if layer.name in open_names:
                raise ValueError(
                    f"layer {i} stashes {layer.name!r} again before it is popped: use another name"
                )
            open_names.add(layer.name)
        elif isinstance(layer, Pop):
            if layer.name not in open_names:
                raise ValueError(
                    f"layer {i} pops {layer.name!r}, which no layer before it has stashed"
                )
            open_names.remove(layer.name)
    if open_names:
        raise ValueError(f"stashed and never popped: {', '.join(sorted(open_names))}")
    return [_Carry(layer, i == 0, i == len(layers) - 1) for i, layer in enumerate(layers)]
