"""pipelab: one schedule object that is validated, simulated, drawn and run for real.

>>> import pipelab
>>> pipelab.simulate(pipelab.make("gpipe", devices=4, microbatches=8)).makespan
33.0

`pipelab.run` and `pipelab.plot` load torch and matplotlib when they are first used.
"""

from pipelab.interrupt import end_with_one_line

end_with_one_line()  # before anything else is imported

from importlib import import_module
from typing import Any

from pipelab.action import Action, Kind, Reads, ScheduleError
from pipelab.costs import CostError, Costs, Recompute
from pipelab.diagnose import Diagnosis, diagnose
from pipelab.explain import Explanation, explain
from pipelab.fit import fit
from pipelab.memory import Memory, memory, memory_used
from pipelab.schedule import Schedule
from pipelab.schedules import SCHEDULES, make, make_all, make_for
from pipelab.simulate import simulate
from pipelab.theory import THEORY
from pipelab.timeline import Timeline
from pipelab.validate import validate

__version__ = "0.1.0"
__all__ = [
    "SCHEDULES",
    "THEORY",
    "Action",
    "CostError",
    "Costs",
    "Diagnosis",
    "Evaluation",
    "Explanation",
    "Kind",
    "Memory",
    "Reads",
    "Recompute",
    "Run",
    "RunError",
    "Schedule",
    "ScheduleError",
    "Timeline",
    "diagnose",
    "evaluate",
    "explain",
    "fit",
    "make",
    "make_all",
    "make_for",
    "memory",
    "memory_used",
    "plot",
    "run",
    "simulate",
    "validate",
]

_OF_EXECUTORS = ("run", "evaluate", "Run", "Evaluation", "RunError")


def __getattr__(name: str) -> Any:
    if name in _OF_EXECUTORS:
        return getattr(import_module("pipelab.executors"), name)
    if name == "plot":
        return import_module("pipelab.plot")
    raise AttributeError(f"module 'pipelab' has no attribute {name!r}")
