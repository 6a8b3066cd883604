"""One file per schedule: a function of the file's name that returns a `Schedule`.

A new file is found by itself; one whose name begins with `_` is what several share.

>>> sorted(SCHEDULES)[:4]
['dualpipe_v', 'eager_1f1b', 'gpipe', 'inter_layer']
>>> make("gpipe", devices=4, microbatches=8).peak_in_flight
[8, 8, 8, 8]
"""

import difflib
import inspect
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from pipelab.action import Kind, Reads, ScheduleError, check_counts, check_memory
from pipelab.costs import CostError, Costs
from pipelab.schedule import Schedule

SCHEDULES: dict[str, Callable[..., Schedule]] = {}
for module in iter_modules(__path__):
    if module.name.startswith("_"):
        continue
    function = getattr(import_module(f"{__name__}.{module.name}"), module.name)
    # `from pipelab.schedules import gpipe` gives the function, not the module.
    SCHEDULES[module.name] = globals()[module.name] = function
ALSO_KNOWN_AS = {
    "1f1b": "pipedream_flush",
    "dapple": "pipedream_flush",
    "megatron": "interleaved",
    "naive": "inter_layer",
}
LARGEST = 10_000_000  # actions that a table is made of
LARGEST_TRIED = 300_000  # the same where it is made for costs, action by action


def takes(name: str, option: str) -> bool:
    """Whether the named schedule has the option: `virtual`, `costs` or `memory`."""
    return option in inspect.signature(SCHEDULES[name]).parameters


def make(
    name: str,
    devices: int,
    microbatches: int,
    *,
    virtual: int = 1,
    batches: int = 1,
    reads: Reads | None = None,
    costs: Costs | None = None,
    memory: float | None = None,
) -> Schedule:
    """The named schedule: micro-batches per batch, `virtual` chunks a device.

    costs   of its stages, for a schedule that is made for them (default: unit costs); the others
            are the same whatever they cost
    memory  for a schedule that is made for a limit: micro-batches whose activations (of all of a
            device's stages) fit on a device
    reads   replaces the rule for weight versions (PipeDream with vertical sync is `pipedream` with
            `Reads.FIRST`)

    Raises ScheduleError for an unknown name, a size that makes no sense or would take minutes (from
    10,000,000 actions on, 300,000 where it is made for costs), or `virtual` or `memory` for a
    schedule without them.
    """
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name.lower(), [*SCHEDULES, *ALSO_KNOWN_AS], 1, 0.4)
        hint = f"did you mean {ALSO_KNOWN_AS.get(near[0], near[0])}? " if near else ""
        raise ScheduleError(
            f"unknown schedule {name!r}: {hint}There are {', '.join(sorted(SCHEDULES))}"
        )
    check_counts(devices=devices, microbatches=microbatches, virtual=virtual, batches=batches)
    options: dict[str, Any] = {"batches": batches}
    if takes(name, "virtual"):
        options["virtual"] = virtual
    elif virtual != 1:
        raise ScheduleError(
            f"virtual={virtual!r}: {name} has its own number of stages a device; leave it out, or "
            "use interleaved"
        )
    if takes(name, "costs") and costs:
        options["costs"] = costs
    if takes(name, "memory"):
        check_memory(memory)
        options["memory"] = memory
    elif memory is not None:
        raise ScheduleError(f"memory={memory!r}: {name} has no limit to choose; use zb or zb_v")
    _check_size(name, devices, microbatches, virtual, batches)
    schedule = SCHEDULES[name](devices, microbatches, **options)
    return schedule if reads is None else replace(schedule, reads=reads)


def _check_size(name: str, devices: int, microbatches: int, virtual: int, batches: int) -> None:
    """Refuse what would take minutes. Updates are not counted."""
    if 6 * virtual * devices * max(microbatches, 2 * devices) * batches <= LARGEST_TRIED:
        return  # no schedule has more
    smallest = SCHEDULES[name](1, 1, **({"virtual": 1} if takes(name, "virtual") else {}))
    passes = int((smallest.columns.kind != Kind.U).sum())  # of a micro-batch on a device
    of_each = passes * virtual * devices
    chunks = virtual * smallest.stages
    # With several chunks a device some are made for more micro-batches, and lose the absent ones.
    made_for = max(microbatches, 2 * devices) if chunks > 1 else microbatches
    limits = [(batches * made_for, LARGEST)]
    if takes(name, "costs"):  # of one batch, that is repeated
        limits.append((microbatches, LARGEST_TRIED))
    for made_for, most in limits:
        if of_each * made_for > most:
            sizes = {"microbatches": microbatches, "virtual": virtual, "batches": batches}
            given = "".join(f" {size}={value}" for size, value in sizes.items() if value > 1)
            raise ScheduleError(
                f"{name} devices={devices}{given}: made of more than {most:,} actions (for "
                f"{made_for:,} micro-batches); make a size smaller"
            )


def make_for(
    name: str, devices: int, microbatches: int, costs: Costs, *, virtual: int = 1, **options: Any
) -> tuple[Schedule, Costs]:
    """The named schedule for a model, and what its stages cost; `costs` are those of devices.

    Each device's share is divided evenly among its stages: `virtual` of them where the schedule
    takes that, else as many as it has. Other options as `make` has them.

    >>> schedule, costs = make_for("interleaved", 2, 4, Costs(), virtual=2)
    >>> schedule.stages, costs.forward
    (4, 0.5)
    """
    if takes(name, "virtual"):
        options["virtual"] = virtual
    if takes(name, "costs"):
        own = costs.over(make(name, devices, 1, **(options | {"memory": None})).placement)
        return make(name, devices, microbatches, costs=own, **options), own
    schedule = make(name, devices, microbatches, **options)
    return schedule, costs.over(schedule.placement)


def make_all(
    devices: int, microbatches: int, costs: Costs, *, memory: float | None = None, **options: Any
) -> tuple[dict[str, tuple[Schedule, Costs]], dict[str, str]]:
    """Every named schedule as `make_for` makes it, by name; and of the others why there are none.

    memory   of those that are made for a limit
    options  `virtual` and `batches`, as `make` has them

    >>> made, left_out = make_all(4, 2, Costs())
    >>> len(made) + len(left_out) == len(SCHEDULES), list(left_out)
    (True, ['pipedream_2bw'])
    """
    made, left_out = {}, {}
    for name in SCHEDULES:
        more = options | ({"memory": memory} if takes(name, "memory") else {})
        try:
            made[name] = make_for(name, devices, microbatches, costs, **more)
        except ScheduleError as error:
            left_out[name] = str(error)
        except CostError as error:
            left_out[name] = f"{name}: {error}"
    return made, left_out
