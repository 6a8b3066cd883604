"""Tables as text: a line that says how to read them, then a line of cells per device."""

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pipelab.table.action import (
    COMPUTE,
    LARGEST,
    MOST_DEVICES,
    Action,
    Kind,
    Reads,
    ScheduleError,
    check_counts,
    insert_updates,
    parse_cell,
)
from pipelab.table.placement import placement_of
from pipelab.table.versions import VersionedTable

# What a header says, and how it is read.
KEYS: dict[str, Callable[[str], Any]] = {
    "name": str,
    "devices": int,
    "microbatches": int,
    "batches": int,
    "per_update": int,
    "reads": Reads.__getitem__,
    "copies": int,
    "slices": lambda text: tuple(map(float, text.split())),
    "placement": lambda text: tuple(map(int, text.split())),
}


# ---- writing: a grid for people, CSV for files, torch's CSV for torch


def draw_grid(table: VersionedTable, mark: Iterable[int] = ()) -> str:
    """The table as text, one column per unit of time, `.` for idle.

    Actions at the flat indices in `mark` stand in > <.
    """
    start = table.unit_times().start  # 0 of what cannot run: it follows at once
    marked = set(mark)
    lines = []
    for d, row in enumerate(table.rows):
        cells: list[str] = []
        for i, a in enumerate(row, table.bounds[d]):
            cells += ["."] * (int(start[i]) - len(cells))
            cells.append(f">{a}<" if i in marked else str(a))
            if i in table.joined:
                cells[-2:] = ["+".join(cells[-2:])]
        lines.append(cells)
    length = max(map(len, lines))
    width = max((len(cell) for cells in lines for cell in cells), default=1)
    for cells in lines:
        cells += ["."] * (length - len(cells))
    return "\n".join(" ".join(c.ljust(width) for c in cells).rstrip() for cells in lines)


def write_grid(table: VersionedTable) -> str:
    """The header, then the grid."""
    return f"{_header(table)}\n{draw_grid(table)}"


def write_csv(table: VersionedTable) -> str:
    """One line that says how to read the table, then one line per device; `from_csv` reads it."""
    if table.versions_read is not None:
        raise ScheduleError(
            f"this part of {table.name} reads earlier weights, which the file cannot hold: write "
            "the whole table"
        )
    return f"{_header(table)}\n{_csv_rows(table)}"


def write_torch_csv(table: VersionedTable) -> str:
    """The CSV that torch.distributed.pipelining loads as "compute_only": one batch, no U."""
    if table.asynchronous:
        raise ScheduleError(
            f"{table.name} updates without a flush, but torch would train it with one: export a "
            "flush schedule"
        )
    if table.copies > 1:
        raise ScheduleError(
            f"{table.name} has {table.copies} copies of the model, but torch's tables have one: "
            "export a schedule with one"
        )
    if table.slices:
        raise ScheduleError(f"{table.name} slices sequences, which torch's tables cannot express")
    if Kind.OFFLOAD in table.kinds:
        raise ScheduleError(
            f"{table.name} offloads activations, which torch's tables cannot express: export the "
            "schedule it was made from"
        )
    if table.batches > 1:
        raise ScheduleError(
            f"torch's tables hold one batch, this one has {table.batches}: build it with batches=1"
        )
    rows = _csv_rows(table, COMPUTE - {Kind.U})
    return re.sub(r"(\w+)\+(\w+)", r"(\1;\2)OVERLAP_F_B", rows)


def _csv_rows(table: VersionedTable, kinds: Iterable[Kind] = Kind) -> str:
    lines = (
        "".join(f"{'+' if a in table.overlapped else ','}{a}" for a in row if a.kind in kinds)
        for row in table.rows
    )
    return "\n".join(line.removeprefix(",") for line in lines) + "\n"


def _header(table: VersionedTable) -> str:
    usual = {"copies": 1, "slices": ()}  # is not written
    values = {key: getattr(table, key) for key in KEYS}
    fields = {key: value for key, value in values.items() if value != usual.get(key)}
    fields["reads"] = table.reads.name
    for key in fields.keys() & {"placement", "slices"}:
        fields[key] = " ".join(map(str, fields[key]))
    return "# " + " ".join(f"{key}={value}" for key, value in fields.items())


# ---- reading


def parse_table(text: str, name: str, separator: str | None) -> dict[str, Any]:
    """The fields of `Table` for a table in text; `separator` splits cells; None means spaces.

    Without a header, there is one batch, and the cells give the placement. If no header names the
    devices, empty lines do not count, and a table without updates gets them after the last backward
    of every row. Raises ScheduleError with the row and the cell.
    """
    if separator and text.count(separator) + text.count("\n") > LARGEST:
        raise ScheduleError(f"more than {LARGEST:,} cells: use a smaller table")
    lines = text.splitlines()
    fields = _read_header(lines.pop(0)) if text.startswith("#") else {}
    devices = fields.pop("devices", None)
    if devices is None:
        lines = [line for line in lines if line.strip()]
    (count,) = check_counts(devices=max(len(lines), 1) if devices is None else devices)
    if count > MOST_DEVICES:
        raise ScheduleError(f"devices={count}: give at most {MOST_DEVICES:,}, a line each")
    if any(line.strip() for line in lines[count:]):
        raise ScheduleError(f"header: devices={devices}, but there are more rows")
    lines = (lines + [""] * count)[:count]
    overlapped: set[Action] = set()
    rows = [_read_row(r, line.split(separator), overlapped) for r, line in enumerate(lines)]
    cells = [a for row in rows for a in row]
    if not cells:
        raise ScheduleError("the table is empty: write one line of actions per device")
    seen = 1 + max((a.microbatch for a in cells if a.kind is not Kind.U), default=0)
    microbatches = fields.get("microbatches", seen)
    if devices is None and all(a.kind is not Kind.U for a in cells):
        rows = insert_updates(rows, fields.get("per_update", microbatches))
    if "placement" not in fields:
        fields["placement"] = placement_of(rows)
    found = {"rows": rows, "microbatches": microbatches, "overlapped": overlapped}
    return {"name": name} | fields | found


def _read_header(line: str) -> dict[str, Any]:
    fields = {}
    for key, value in re.findall(r"(\w+)=([^=]*)(?:\s|$)", line[1:]):
        if key not in KEYS:
            raise ScheduleError(f"header: unknown {key}=; use {', '.join(sorted(KEYS))}")
        try:
            fields[key] = KEYS[key](value.strip())
        except (KeyError, ValueError):
            raise ScheduleError(f"header: {key}={value} cannot be read") from None
    return fields


def _read_row(r: int, cells: Sequence[str], overlapped: set[Action]) -> list[Action]:
    row: list[Action] = []
    for c, cell in enumerate(map(str.strip, cells)):
        try:
            found = parse_cell(cell)
        except ScheduleError as error:
            raise ScheduleError(f"row {r}, cell {c}: {error}") from None
        # A backward of the forward beside it comes after it, as in torch's runtime.
        if len(found) == 2 and found[0] != found[1]._replace(kind=Kind.F):
            overlapped.add(found[1])
        row += found
    return row
