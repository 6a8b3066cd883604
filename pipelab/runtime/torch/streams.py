"""The streams of workers on GPUs, the same in every run.

torch keeps freed memory per stream, and cuBLAS a workspace: with new streams, every run would take
more of both, and be slow until it has them.
"""

from collections.abc import Hashable
from functools import cache

import torch

from pipelab.runtime.devices import parts_called


@cache
def stream_of(name: str, worker: int, stage: int | None = None) -> torch.cuda.Stream:
    """The stream of a worker, or of its stage, on a GPU or a part of one."""
    module = parts_called(name)
    return module.stream_of(name) if module else torch.cuda.Stream(torch.device(name))


@cache
def copy_stream(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """The stream of copies to and from the host, beside one that computes."""
    return torch.cuda.Stream(stream.device)


@cache
def receiving_on(gpu: torch.device, owner: Hashable) -> torch.cuda.Stream:
    """A GPU's stream for what a worker, by its computing stream or device, gets from elsewhere."""
    return torch.cuda.Stream(gpu)
