"""Models in layers, ready to be cut into stages. Those of torch are loaded when they are first used: `flax_mlp` needs none."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelab.models.layers import mlp, parameters, split

__all__ = ["mlp", "parameters", "split"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("pipelab.models.layers"), name)
    raise AttributeError(f"module 'pipelab.models' has no attribute {name!r}")
