"""Which schedule, how many stages and replicas, which micro-batch: the best for a machine.

The model's times and bytes come from published formulas or a measured profile; the simulator judges
every plan, under the memory of a device.
"""

from pipelab.plan.answer import Answer, RunnerUp, plan
from pipelab.plan.judge import Plan, judge
from pipelab.plan.machine import MACHINES, Machine
from pipelab.plan.problem import ASYNCHRONOUS, FLUSH, Choice, Problem
from pipelab.plan.transformer import Transformer

__all__ = [
    "ASYNCHRONOUS",
    "FLUSH",
    "MACHINES",
    "Answer",
    "Choice",
    "Machine",
    "Plan",
    "Problem",
    "RunnerUp",
    "Transformer",
    "judge",
    "plan",
]
