"""Real executors: one worker loop (`worker`) between a transport (`transport`) and stages (`torch_stage`).

`run` is the way in: it looks at its `arguments`, makes a `job` for each device, has them done on `threads`, in `processes` or
by the `ranks` of a launcher (whose messages go over the `wire`), puts what was `measured` into a `result`, and has the
`verdict` from the `reference`, which follows the papers' `rules`.
"""

from pipelab.executors.result import Evaluation, Run
from pipelab.executors.run import evaluate, run
from pipelab.executors.worker import RunError

__all__ = ["Evaluation", "Run", "RunError", "evaluate", "run"]
