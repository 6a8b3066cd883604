"""Real executors: one worker loop (`worker`) between a transport (`transport`) and stages (`torch_stage`).

`run` is the way in: it makes a `job` for each device, has them done on `threads` or in `processes` (whose messages go over
the `wire`), and checks the result against the `reference`.
"""

from pipelab.executors.run import Evaluation, Run, evaluate, run
from pipelab.executors.worker import RunError

__all__ = ["Evaluation", "Run", "RunError", "evaluate", "run"]
