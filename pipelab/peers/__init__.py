"""Other people's pipelines on the same stages and batches, to compare with: one file each, all of which give a PeerRun."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class PeerRun:
    """losses one per batch; weights a state dict per stage, named as in pipelab; seconds of each batch."""

    losses: list[float]
    weights: list[dict[str, Tensor]]
    seconds: list[float]
