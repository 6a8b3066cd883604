"""One file per schedule: a function of the file's name that returns a `Schedule`.

A new file is found by itself.

>>> sorted(SCHEDULES)[:4]
['gpipe', 'inter_layer', 'interleaved', 'pipedream']
>>> make("gpipe", devices=4, microbatches=8).peak_in_flight
[8, 8, 8, 8]
"""

import difflib
import inspect
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules

from pipelab.action import Reads, ScheduleError
from pipelab.schedule import Schedule

SCHEDULES: dict[str, Callable[..., Schedule]] = {}
for module in iter_modules(__path__):
    function = getattr(import_module(f"{__name__}.{module.name}"), module.name)
    # `from pipelab.schedules import gpipe` gives the function, not the module.
    SCHEDULES[module.name] = globals()[module.name] = function
ALSO_KNOWN_AS = {
    "1f1b": "pipedream_flush",
    "dapple": "pipedream_flush",
    "megatron": "interleaved",
    "naive": "inter_layer",
}


def with_chunks(name: str) -> bool:
    """Whether the named schedule places several chunks of the model on a device."""
    return "virtual" in inspect.signature(SCHEDULES[name]).parameters


def make(
    name: str,
    devices: int,
    microbatches: int,
    *,
    virtual: int = 1,
    batches: int = 1,
    reads: Reads | None = None,
) -> Schedule:
    """The named schedule: micro-batches per batch, `virtual` chunks a device.

    `reads` replaces the rule for weight versions (PipeDream with vertical sync is `pipedream` with
    `Reads.FIRST`). Raises ScheduleError for an unknown name, a size that makes no sense, or
    `virtual` on a schedule without chunks.
    """
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name.lower(), [*SCHEDULES, *ALSO_KNOWN_AS], 1, 0.4)
        hint = f"did you mean {ALSO_KNOWN_AS.get(near[0], near[0])}? " if near else ""
        raise ScheduleError(
            f"unknown schedule {name!r}: {hint}There are {', '.join(sorted(SCHEDULES))}"
        )
    function, sizes = SCHEDULES[name], {"batches": batches}
    if with_chunks(name):
        sizes["virtual"] = virtual
    elif virtual != 1:
        raise ScheduleError(f"virtual={virtual!r}: {name} has one stage a device; use interleaved")
    schedule = function(devices, microbatches, **sizes)
    return schedule if reads is None else replace(schedule, reads=reads)
