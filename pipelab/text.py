"""Tables as text: a line that says how to read them, then a line of cells per device."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pipelab.action import COMPUTE, Action, Kind, Reads, ScheduleError, insert_updates
from pipelab.table import Table
from pipelab.versions import is_asynchronous

NUMBERS = ("devices", "microbatches", "batches", "per_update")
KEYS = ("name", *NUMBERS, "reads", "placement")


# ---- writing: a grid for people, CSV for files, torch's CSV for torch


def draw_grid(table: Table, mark: Iterable[int] = ()) -> str:
    """The table as text, one column per unit of time, `.` for idle.

    Actions at the flat indices in `mark` stand in > <.
    """
    start, _, heads = table.unit_times()
    marked = set(mark)
    lines = []
    for d, row in enumerate(table.rows):
        cells: list[str] = []
        for i, a in enumerate(row, table.bounds[d]):
            column = int(start[i]) if i < heads[d] else 0  # what cannot run follows at once
            cells += ["."] * (column - len(cells))
            cells.append(f">{a}<" if i in marked else str(a))
        lines.append(cells)
    length = max(map(len, lines))
    width = max((len(cell) for cells in lines for cell in cells), default=1)
    for cells in lines:
        cells += ["."] * (length - len(cells))
    return "\n".join(" ".join(c.ljust(width) for c in cells).rstrip() for cells in lines)


def write_grid(table: Table) -> str:
    """The header, then the grid."""
    return f"{_header(table)}\n{draw_grid(table)}"


def write_csv(table: Table) -> str:
    """One line that says how to read the table, then one line per device; `from_csv` reads it."""
    if table.versions_read is not None:
        raise ScheduleError(
            f"this part of {table.name} reads weights from before it: write the whole table"
        )
    return f"{_header(table)}\n{_csv_rows(table)}"


def write_torch_csv(table: Table) -> str:
    """What torch.distributed.pipelining loads with format="compute_only": one batch, no updates."""
    if is_asynchronous(table):
        raise ScheduleError(
            f"{table.name} updates without a flush; torch would train it as a flush: export a "
            "flush schedule"
        )
    if table.batches > 1:
        raise ScheduleError(
            f"torch's tables hold one batch, this one has {table.batches}: build it with batches=1"
        )
    return _csv_rows(table, COMPUTE - {Kind.U})


def _csv_rows(table: Table, kinds: Iterable[Kind] = Kind) -> str:
    lines = (",".join(str(a) for a in row if a.kind in kinds) for row in table.rows)
    return "\n".join(lines) + "\n"


def _header(table: Table) -> str:
    fields = {key: getattr(table, key) for key in KEYS}
    fields["reads"] = table.reads.name
    fields["placement"] = " ".join(map(str, table.placement))
    return "# " + " ".join(f"{key}={value}" for key, value in fields.items())


# ---- reading


def read_table(text: str, name: str, split: Callable[[str], list[str]]) -> dict[str, Any]:
    """The fields of `Table` for a table in text; `split` cuts a line into cells.

    What the header does not say is taken from the cells: one batch, the placement as it stands.
    Without a header that names the devices, updates are added after the last backward of every row
    if the table has no updates, and empty lines do not count. Raises ScheduleError with the row and
    the cell.
    """
    header, lines = _split_header(text.splitlines())
    fields: dict[str, Any] = {k: _number(k, header[k]) for k in NUMBERS if k in header}
    devices = fields.pop("devices", None)
    if devices is None:
        lines = [line for line in lines if line.strip()]
    else:
        if any(line.strip() for line in lines[devices:]):
            raise ScheduleError(f"header: devices={devices}, but there are more rows")
        lines = (lines + [""] * devices)[:devices]
    rows = [_read_row(r, split(line)) for r, line in enumerate(lines)]
    cells = [a for row in rows for a in row]
    if not cells:
        raise ScheduleError("the table is empty: write one line of actions per device")
    seen = 1 + max((a.microbatch for a in cells if a.kind is not Kind.U), default=0)
    microbatches = fields.setdefault("microbatches", seen)
    reads = header.get("reads", Reads.LATEST.name)
    if reads not in Reads.__members__:
        raise ScheduleError(f"header: reads={reads} is none of {', '.join(Reads.__members__)}")
    if "placement" in header:
        placement = [_number("placement", device) for device in header["placement"].split()]
    else:
        placement = _placement(rows)
    without_updates = devices is None and all(a.kind is not Kind.U for a in cells)
    per_update = fields.get("per_update", microbatches)
    return fields | {
        "name": header.get("name", name),
        "rows": insert_updates(rows, per_update) if without_updates else rows,
        "placement": placement,
        "reads": Reads[reads],
    }


def _split_header(lines: list[str]) -> tuple[dict[str, str], list[str]]:
    if not lines or not lines[0].startswith("#"):
        return {}, lines
    found = re.findall(r"(\w+)=([^=]*)(?:\s|$)", lines[0][1:])
    header = {key: value.strip() for key, value in found}
    if unknown := sorted(set(header) - set(KEYS)):
        raise ScheduleError(f"header: {unknown[0]}= is none of {', '.join(sorted(KEYS))}")
    return header, lines[1:]


def _read_row(r: int, cells: Sequence[str]) -> tuple[Action, ...]:
    row = []
    for c, cell in enumerate(map(str.strip, cells)):
        if cell not in ("", "."):
            try:
                row.append(Action.parse(cell))
            except ScheduleError as error:
                raise ScheduleError(f"row {r}, cell {c}: {error}") from None
    return tuple(row)


def _number(key: str, text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text):
        raise ScheduleError(f"header: {key}={text} is not a whole number below a billion")
    return int(text)


def _placement(rows: Sequence[Sequence[Action]]) -> list[int]:
    home = {a.stage: d for d, row in enumerate(rows) for a in row}
    if max(home) >= len(home):
        missing = next(s for s in range(len(home)) if s not in home)
        raise ScheduleError(
            f"stage {missing} has no action, though stage {max(home)} has: number stages from 0 "
            "without gaps"
        )
    return [home[s] for s in range(len(home))]
