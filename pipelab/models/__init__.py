"""Models in layers, ready to be cut into stages.

Torch models are loaded when first used: `flax_mlp` does not need torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipelab.models.layers import layers_of, load
    from pipelab.models.sequential import mlp, parameters, split

__all__ = ["GAIN", "layers_of", "load", "mlp", "parameters", "split"]

# Of the MLPs' weights. Orthogonal weights keep the length of what passes through them, forward and
# backward; ELU has slope 1 at 0 and less below, which this makes up for: measured over 64 layers,
# all gradients stay within a factor of about 2 of each other.
GAIN = 1.2


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = "layers" if name in ("layers_of", "load") else "sequential"
        return getattr(import_module(f"pipelab.models.{module}"), name)
    raise AttributeError(f"module 'pipelab.models' has no attribute {name!r}")
