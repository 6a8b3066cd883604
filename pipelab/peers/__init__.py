"""Other people's pipelines on the same stages and batches, for comparison: one file each.

`export` writes schedules for them. A loss is the mean over the samples. Each library draws random
numbers (dropout) its own way.
"""

from dataclasses import dataclass, field
from importlib.util import find_spec

from torch import Tensor

from pipelab.predict.timeline import Timeline


@dataclass
class PeerRun:
    """A peer's results.

    losses    one per batch
    weights   the trained weights, a state dict per stage, named as in pipelab
    seconds   of each batch
    timeline  measured by torch.profiler inside the peer's run (never by our simulator), and read by
              `pipelab.measure.trace.from_trace`; the profiler's own time is in it. None with
              trace=False
    """

    losses: list[float]
    weights: list[dict[str, Tensor]] = field(repr=False)
    seconds: list[float]
    timeline: Timeline | None = None


def need(library: str) -> None:
    """ImportError that says what to install if a peer's library is missing."""
    if find_spec(library) is None:
        raise ImportError(f"{library} is not installed: pip install 'pipelab[peers]'", name=library)
