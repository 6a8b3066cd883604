"""torchgpipe 0.0.7 (Kim et al. 2020, arXiv 2004.09910) behind a call like `pipelab.run`.

What it asks for: an nn.Sequential whose layers take and return tensors or tuples, one process,
GPipe only, `chunks` micro-batches. It was last released in 2020 and still runs.
"""

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torchgpipe import GPipe

from pipelab.executors.torch.stage import Loss, OptimizerFactory
from pipelab.peers import PeerRun


def run_torchgpipe(
    stages: Sequence[nn.Sequential],
    batches: Sequence[tuple[Any, Any]],
    loss: Loss,
    optimizer: OptimizerFactory,
    *,
    chunks: int,
    devices: Sequence[str] | None = None,
    checkpoint: str = "never",
) -> PeerRun:
    """Train copies of `stages` with torchgpipe; `checkpoint`: never, except_last or always."""
    stages = [copy.deepcopy(stage) for stage in stages]
    model = GPipe(
        nn.Sequential(*(layer for stage in stages for layer in stage)),
        balance=[len(stage) for stage in stages],
        devices=list(devices or ["cpu"] * len(stages)),
        chunks=chunks,
        checkpoint=checkpoint,
    )
    step, losses, seconds = optimizer(model.parameters()), [], []
    for x, y in batches:
        began = time.perf_counter()
        step.zero_grad()
        value = loss(model(x.to(model.devices[0])), y.to(model.devices[-1]))
        value.backward()
        step.step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        losses.append(float(value.detach()))
        seconds.append(time.perf_counter() - began)
    weights = []
    for partition in model.partitions:
        layers = nn.Sequential(*partition)  # numbered from 0, as in a stage
        weights.append({name: t.detach().cpu() for name, t in layers.state_dict().items()})
    return PeerRun(losses, weights, seconds)
