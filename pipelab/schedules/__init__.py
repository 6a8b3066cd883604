"""One file per schedule: a function of the file's name that returns a `Schedule`.

A new one is imported here and listed in SCHEDULES. `rows` makes schedules of what such a
function yields.

>>> sorted(SCHEDULES)[:4]
['chimera', 'dualpipe', 'dualpipe_v', 'eager_1f1b']
>>> make("gpipe", devices=4, microbatches=8).peak_in_flight
[8, 8, 8, 8]
"""

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pipelab.schedules.chimera import chimera
from pipelab.schedules.dualpipe import dualpipe
from pipelab.schedules.dualpipe_v import dualpipe_v
from pipelab.schedules.eager_1f1b import eager_1f1b
from pipelab.schedules.gpipe import gpipe
from pipelab.schedules.inter_layer import inter_layer
from pipelab.schedules.interleaved import interleaved
from pipelab.schedules.looped_bfs import looped_bfs
from pipelab.schedules.names import other_name
from pipelab.schedules.overlapped_1f1b import overlapped_1f1b
from pipelab.schedules.pipedream import pipedream
from pipelab.schedules.pipedream_2bw import pipedream_2bw
from pipelab.schedules.pipedream_flush import pipedream_flush
from pipelab.schedules.pipeoffload import pipeoffload
from pipelab.schedules.seq1f1b import seq1f1b
from pipelab.schedules.terapipe import terapipe
from pipelab.schedules.v_half import v_half
from pipelab.schedules.v_min import v_min
from pipelab.schedules.zb_h1 import zb_h1
from pipelab.schedules.zb_h2 import zb_h2
from pipelab.schedules.zb_interleaved import zb_interleaved
from pipelab.table.action import LARGEST, Reads, ScheduleError, check_counts
from pipelab.table.schedule import Schedule

SCHEDULES: dict[str, Callable[..., Schedule]] = {
    function.__name__: function
    for function in (
        chimera,
        dualpipe,
        dualpipe_v,
        eager_1f1b,
        gpipe,
        inter_layer,
        interleaved,
        looped_bfs,
        overlapped_1f1b,
        pipedream,
        pipedream_2bw,
        pipedream_flush,
        pipeoffload,
        seq1f1b,
        terapipe,
        v_half,
        v_min,
        zb_h1,
        zb_h2,
        zb_interleaved,
    )
}


# Why an option is not for a schedule.
NOT_TAKEN = {
    "virtual": "fixes its number of stages per device; leave it out, or use interleaved",
    "memory": "has no memory limit; use zb or zb_v",
    "longest": "has no rounds; use interleaved",
    "slices": "leaves sequences whole; use seq1f1b",
}


def takes(name: str, option: str) -> bool:
    """Whether the named schedule has the option: `virtual`, `costs` or `memory`.

    ScheduleError for an unknown name.
    """
    if name not in SCHEDULES:
        raise ScheduleError(
            f"unknown schedule {name!r}: {other_name(str(name), SCHEDULES)}There are "
            f"{', '.join(sorted(SCHEDULES))}"
        )
    return option in inspect.signature(SCHEDULES[name]).parameters


def make(
    name: str,
    devices: int,
    microbatches: int,
    *,
    virtual: int = 1,
    batches: int = 1,
    reads: Reads | None = None,
    costs: Any = None,
    memory: float | None = None,
    longest: int = 1,
    slices: int | None = None,
) -> Schedule:
    """The named schedule: micro-batches per batch, `virtual` chunks a device.

    costs   of its stages, for a schedule that depends on them (default: unit costs)
    memory  for a schedule with a memory limit: how many micro-batches' activations (of all its
            stages) fit on a device
    slices  per sequence, for a schedule that slices them (default: 2)
    longest the most micro-batches in a round of `interleaved`, to allow more than p
    reads   replaces the rule for weight versions (PipeDream with vertical sync is `pipedream` with
            `Reads.FIRST`)

    Raises ScheduleError for an unknown name, an invalid size, one that would take minutes, or an
    option that the schedule does not have.
    """
    takes(name, "")  # there is such a schedule
    devices, microbatches, virtual, batches, longest, each = check_counts(
        devices=devices,
        microbatches=microbatches,
        virtual=virtual,
        batches=batches,
        longest=longest,
        slices=1 if slices is None else slices,
    )
    options: dict[str, Any] = {"batches": batches}
    if costs is not None and takes(name, "costs"):
        options["costs"] = costs
    given = {"virtual": virtual, "memory": memory, "longest": longest, "slices": slices and each}
    for option, value in given.items():
        if not takes(name, option):
            if value not in (None, 1):
                raise ScheduleError(f"{option}={value!r}: {name} {NOT_TAKEN[option]}")
        elif value is not None:
            options[option] = value
    if 2 * each * devices * virtual * max(microbatches, devices) * batches > LARGEST:
        raise ScheduleError(
            f"{name} devices={devices} microbatches={microbatches} virtual={virtual} "
            f"batches={batches}: more than {LARGEST:,} actions; use smaller sizes"
        )
    schedule = SCHEDULES[name](devices, microbatches, **options)
    return schedule if reads is None else replace(schedule, reads=reads)


def make_for(
    name: str, devices: int, microbatches: int, costs: Any, *, virtual: int = 1, **options: Any
) -> tuple[Schedule, Any]:
    """The named schedule for a model, and its stages' costs; `costs` are per device.

    Each device's cost is divided evenly among its stages: `virtual` of them if the schedule takes
    that, else its own number. Other options as for `make`.

    >>> from pipelab import Costs
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
    return schedule, costs.over(schedule.placement[: schedule.model_stages])


def make_all(
    devices: int, microbatches: int, costs: Any, *, memory: float | None = None, **options: Any
) -> tuple[dict[str, tuple[Schedule, Any]], dict[str, str]]:
    """Every named schedule that `make_for` can make, by name; and why it cannot make the others.

    memory   for schedules with a memory limit
    options  `virtual` and `batches`, as for `make`

    >>> from pipelab import Costs
    >>> made, left_out = make_all(4, 2, Costs())
    >>> len(made) + len(left_out) == len(SCHEDULES), list(left_out)
    (True, ['pipedream_2bw'])
    """
    check_counts(devices=devices, microbatches=microbatches, **options)
    made, left_out = {}, {}
    for name in SCHEDULES:
        more = options | ({"memory": memory} if takes(name, "memory") else {})
        try:
            made[name] = make_for(name, devices, microbatches, costs, **more)
        except ValueError as error:  # of the schedule, or of costs that do not fit it
            left_out[name] = str(error) if isinstance(error, ScheduleError) else f"{name}: {error}"
    return made, left_out
