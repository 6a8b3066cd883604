"""Real executors: one worker loop (`worker`) between a transport (`transport`, `wire`, `jax_wire`) and stages (`torch_stage`,
`jax_stage`).

`run` is the way in and hands over to `torch_run` or `jax_run`: a job for each device, done on `threads`, in `processes` or by
the `ranks` that a launcher started; what was `measured` goes into a `result`; a reference that follows the papers' `rules`
gives the verdict. `spmd` is JAX's other way, one program for all devices.
"""

from pipelab.executors.result import Evaluation, Run
from pipelab.executors.run import evaluate, run
from pipelab.executors.worker import RunError

__all__ = ["Evaluation", "Run", "RunError", "evaluate", "run"]
