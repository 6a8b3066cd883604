"""pipelab: one schedule object that is validated, simulated, drawn and run for real.

>>> import pipelab
>>> pipelab.simulate(pipelab.make("gpipe", devices=4, microbatches=8)).makespan
33.0

`pipelab.run` and `pipelab.plot` load torch and matplotlib when they are first used.
"""

from pipelab.show import interrupt  # isort: skip (the first one: see there)
from importlib import import_module
from typing import Any

from pipelab.measure.diagnose import Diagnosis, diagnose
from pipelab.measure.fit import fit
from pipelab.measure.prediction import Explanation, explain
from pipelab.optimize.bounds import gap
from pipelab.optimize.order.zb import zb, zb_v
from pipelab.predict.costs import CostError, Costs, Recompute
from pipelab.predict.memory import Memory, memory, memory_used
from pipelab.predict.simulate import simulate
from pipelab.predict.theory import THEORY
from pipelab.predict.timeline import Timeline
from pipelab.runtime.backends import BACKENDS
from pipelab.runtime.devices import PARTS
from pipelab.schedules import SCHEDULES, make, make_all, make_for
from pipelab.table.action import Action, Kind, Reads, ScheduleError
from pipelab.table.schedule import Schedule
from pipelab.table.validate import validate
from pipelab.widgets import SHARES, WIDGETS

__version__ = "0.1.0"
# What rooms above tell the small library, which does not know them.
SCHEDULES.update(zb=zb, zb_v=zb_v)
BACKENDS["jax"] = "pipelab.jax.backend", "JaxBackend"
PARTS[r"cuda:\d+/\d+(:\d+)?"] = "pipelab.gpu.parts"
WIDGETS["Editor"] = "pipelab.editor.editor"
SHARES["over the bound"] = (
    "the lower bound: a time that no order of one batch in this memory can beat",
    gap,
)
__all__ = [
    "SCHEDULES",
    "THEORY",
    "Action",
    "CostError",
    "Costs",
    "Diagnosis",
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
    "Trainer",
    "diagnose",
    "evaluate",
    "explain",
    "fit",
    "make",
    "make_all",
    "make_for",
    "memory",
    "memory_used",
    "parts",
    "plot",
    "run",
    "simulate",
    "validate",
]

_LAZY = {
    "run": "pipelab.runtime.run",
    "evaluate": "pipelab.runtime.run",
    "Run": "pipelab.runtime.result",
    "RunError": "pipelab.runtime.worker",
    "Trainer": "pipelab.training.trainer",
    "parts": "pipelab.gpu.parts",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY and name != "plot":
        raise AttributeError(f"module 'pipelab' has no attribute {name!r}")
    with interrupt.imports_whole():
        module = import_module(_LAZY.get(name, "pipelab.plot"))
    return module if name == "plot" else getattr(module, name)
