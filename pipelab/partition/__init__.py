"""How many layers each stage gets, and how many devices.

`profile` needs torch and is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from pipelab.partition.layers import Layer, Profile
from pipelab.partition.pipedream import Level, pipedream
from pipelab.partition.splits import METHODS, split_layers
from pipelab.partition.stages import Partition, Stage
from pipelab.partition.uniform import uniform

if TYPE_CHECKING:
    from pipelab.partition.measure import profile

__all__ = [
    "METHODS",
    "Layer",
    "Level",
    "Partition",
    "Profile",
    "Stage",
    "pipedream",
    "profile",
    "split_layers",
    "uniform",
]


def __getattr__(name: str) -> Any:
    if name == "profile":
        return getattr(import_module("pipelab.partition.measure"), name)
    raise AttributeError(f"module 'pipelab.partition' has no attribute {name!r}")
