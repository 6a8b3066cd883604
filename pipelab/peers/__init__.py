"""Other people's pipelines on the same stages and batches, to compare with: one file each.

A loss is the mean over the samples. What forwards draw (dropout), each library draws its own way.
"""

from dataclasses import dataclass, field
from importlib.util import find_spec

from torch import Tensor

from pipelab.memory import Memory
from pipelab.timeline import Timeline


@dataclass
class PeerRun:
    """What a peer's run gives back.

    losses     one per batch
    weights    the trained weights, a state dict per stage, named as in pipelab
    seconds    of each batch
    timeline   measured spans, by hooks inside the peer's run (never by our simulator): the rows are
               its actions in the order in which they ran. None with watch=False
    memory     measured bytes over time: weights, gradients, optimizer state, and what autograd
               saves, without the caller's data, which `pipelab.run` copies and counts; not what
               the library buffers besides. None with watch=False
    gradients  of the last update, per stage by name; empty with watch=False
    """

    losses: list[float]
    weights: list[dict[str, Tensor]] = field(repr=False)
    seconds: list[float]
    timeline: Timeline | None = None
    memory: Memory | None = field(default=None, repr=False)
    gradients: list[dict[str, Tensor]] = field(default_factory=list, repr=False)


def need(library: str) -> None:
    """ImportError that says what to install, where a peer's library is missing."""
    if find_spec(library) is None:
        raise ImportError(f"{library} is not installed: pip install 'pipelab[peers]'", name=library)
