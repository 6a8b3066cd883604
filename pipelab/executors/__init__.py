"""Real executors: one worker loop (`worker`) between a transport and the stages of a library.

`run` is the way in. It hands over to `torch.run` or `jax.run`: a `job` for each device, carried out
by a launcher (`threads`, `torch.processes`, `torch.ranks`, `jax.distributed`). What the workers
recorded becomes a `result`, and `check` compares it with a reference that follows the papers'
`rules`. The two wings mirror each other: `run stage device trainer`. `jax.spmd` is JAX's other way,
one program for all devices.
"""

from pipelab.executors.result import Evaluation, Run
from pipelab.executors.run import evaluate, run
from pipelab.executors.worker import RunError

__all__ = ["Evaluation", "Run", "RunError", "evaluate", "run"]
