"""How many layers each stage gets, and how many devices.

`profile` needs torch and is loaded when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipelab.optimize.cut.profiles import Layer, Profile
from pipelab.optimize.cut.replicated import pipedream
from pipelab.optimize.cut.splits import METHODS, split_layers
from pipelab.optimize.cut.stages import CutStage, Partition
from pipelab.optimize.cut.uniform import uniform

if TYPE_CHECKING:
    from pipelab.optimize.cut.profiler import profile

__all__ = [
    "METHODS",
    "CutStage",
    "Layer",
    "Partition",
    "Profile",
    "pipedream",
    "profile",
    "split_layers",
    "uniform",
]


def __getattr__(name: str) -> Any:
    if name == "profile":
        return getattr(import_module("pipelab.optimize.cut.profiler"), name)
    raise AttributeError(f"module 'pipelab.optimize.cut' has no attribute {name!r}")
