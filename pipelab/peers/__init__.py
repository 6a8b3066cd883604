"""Other people's pipelines on the same stages and batches, to compare with: one file each."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class PeerRun:
    """Losses, one per batch; a state dict of weights per stage, named as in pipelab; seconds of
    each batch."""

    losses: list[float]
    weights: list[dict[str, Tensor]]
    seconds: list[float]
