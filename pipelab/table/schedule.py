"""A schedule: a table of actions with everything that follows from it."""

from pipelab.table.text import draw_grid, parse_table, write_csv, write_grid, write_torch_csv
from pipelab.table.transform import (
    forward_only,
    offload,
    overlap,
    part,
    with_transfers,
    without_transfers,
)
from pipelab.table.versions import VersionedTable


class Schedule(VersionedTable):
    """A table of actions, one row per device: validated, simulated, drawn, exported and run.

    Schedule(name, rows, placement, microbatches, batches=1, per_update=microbatches,
    reads=Reads.LATEST): the fields of `pipelab.table.table.Table`. `pipelab.table.versions` defines
    its weight versions, `pipelab.table.transform` and `pipelab.table.text` its methods.

    >>> s = Schedule.from_grid("0F0 .   .   0B0 0U0\\n.   1F0 1B0 1U0 .")
    >>> s.devices, s.stages, s.microbatches
    (2, 2, 1)
    """

    # Other tables made of this one.
    part = part
    forward_only = forward_only
    offload = offload
    overlap = overlap
    with_transfers = with_transfers
    without_transfers = without_transfers

    # Text: a grid for people, CSV for files, torch's CSV for torch.
    grid = draw_grid
    to_csv = write_csv
    to_torch_csv = write_torch_csv
    __str__ = write_grid

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> "Schedule":
        """Read `to_csv`, or bare rows: an empty cell is idle; a table without updates gets them.

        torch's overlapped cells are read too.
        """
        return cls(**parse_table(text, name, ","))

    @classmethod
    def from_grid(cls, text: str, name: str = "grid") -> "Schedule":
        """Read `str(schedule)`, or a bare grid: spaces between cells, `.` for idle."""
        return cls(**parse_table(text, name, None))

    @classmethod
    def from_torch_csv(cls, text: str, name: str = "csv") -> "Schedule":
        """Read what torch dumps: `from_csv` without transfers.

        Wherever torch writes its transfers, they overlap with compute, as in a table without
        transfers. In a table that has them, SEND and RECV meet.
        """
        return cls.from_csv(text, name).without_transfers()
