"""How many layers each stage gets."""

from pipelab.partition.uniform import uniform

__all__ = ["uniform"]
