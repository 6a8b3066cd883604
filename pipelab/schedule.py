"""A schedule: a table of actions with everything that follows from it."""

from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np

from pipelab.action import Action, Reads, check_counts, insert_updates
from pipelab.placement import loop_placement
from pipelab.table import Table
from pipelab.text import draw_grid, read_table, write_csv, write_grid, write_torch_csv
from pipelab.transform import forward_only, part, with_transfers
from pipelab.versions import (
    is_asynchronous,
    kept_versions,
    latest_versions,
    peak_in_flight,
    read_versions,
    version_lives,
)


class Schedule(Table):
    """A table of actions, one row per device: validated, simulated, drawn, exported and run.

    Schedule(name, rows, placement, microbatches, batches=1, per_update=microbatches,
    reads=Reads.LATEST): the fields of `Table`. What the properties and methods compute is described
    in `pipelab.versions`, `pipelab.transform` and `pipelab.text`.

    >>> s = Schedule.from_grid("0F0 .   .   0B0 0U0\\n.   1F0 1B0 1U0 .")
    >>> s.devices, s.stages, s.microbatches
    (2, 2, 1)
    """

    # Weight versions read and kept, and what is in flight.
    versions = cached_property(read_versions)
    latest = cached_property(latest_versions)
    lives = cached_property(version_lives)
    weight_versions = cached_property(kept_versions)
    peak_in_flight = cached_property(peak_in_flight)
    asynchronous = cached_property(is_asynchronous)

    # Other tables made of this one.
    part = part
    forward_only = forward_only
    with_transfers = with_transfers

    # Text: a grid for people, CSV for files, torch's CSV for torch.
    grid = draw_grid
    to_csv = write_csv
    to_torch_csv = write_torch_csv
    __str__ = write_grid

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> "Schedule":
        """Read `to_csv`, or bare rows: an empty cell is idle; a table without updates gets them."""
        return cls(**read_table(text, name, lambda line: line.split(",")))

    @classmethod
    def from_grid(cls, text: str, name: str = "grid") -> "Schedule":
        """Read `str(schedule)`, or a bare grid: cells apart by spaces, `.` for idle."""
        return cls(**read_table(text, name, str.split))

    from_torch_csv = from_csv


def one_stage_each(
    name: str,
    order: Callable[[int], Iterable[Action] | np.ndarray],
    devices: int,
    microbatches: int,
    batches: int,
    per_update: int = 0,
    reads: Reads = Reads.LATEST,
) -> Schedule:
    """A schedule with one stage on each device; `order(stage)` is its row, but for the updates.

    That is actions, or faster, the same as numbers (`pipelab.action.one_kind`).

    ScheduleError for a size that makes no sense.
    """
    check_counts(devices=devices, microbatches=microbatches, batches=batches)
    rows = insert_updates(map(order, range(devices)), per_update or microbatches)
    placement = loop_placement(devices)
    return Schedule(name, rows, placement, microbatches, batches, per_update, reads)
