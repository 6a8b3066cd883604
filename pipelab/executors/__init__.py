"""Real executors: one worker loop (`worker`) between a transport (`transport`) and stages (`torch_stage`).

`run` is the way in; it builds the stages, starts the workers (`threads`), and checks the result against `reference`.
"""

from pipelab.executors.run import Run, run
from pipelab.executors.worker import RunError

__all__ = ["Run", "RunError", "run"]
