"""Real executors: one worker loop (`worker`) between a transport and the stages of a library.

`run` is the way in, and `train` what it does. A library's own part is a wing, `torch.run` or
`jax.run`, which makes a `job` for each device; a launcher (`threads`, `torch.processes`,
`torch.ranks`, `jax.distributed`) carries the jobs out. What the workers recorded becomes a
`result`, and `judge` compares it with a reference that follows the papers' `rules`. The two wings
mirror each other: `run stage device trainer`. `jax.spmd` is JAX's other way, one program for all
devices.
"""

from pipelab.executors.result import Evaluation, Run
from pipelab.executors.run import evaluate, run
from pipelab.executors.worker import RunError

__all__ = ["Evaluation", "Run", "RunError", "evaluate", "run"]
