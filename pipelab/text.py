"""Tables as text: a line that says how to read them, then a line of cells per device."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from pipelab.action import Action, Kind, Reads, ScheduleError, insert_updates

KEYS = {"name", "devices", "microbatches", "batches", "per_update", "reads", "placement"}


def header_line(fields: dict[str, Any]) -> str:
    """The first line of a table in text: `# name=gpipe microbatches=8 ...`."""
    return "# " + " ".join(f"{key}={value}" for key, value in fields.items())


def read_table(text: str, name: str, split: Callable[[str], list[str]]) -> dict[str, Any]:
    """The arguments of `Schedule` for a table in text; `split` cuts a line into cells.

    What the header does not say is taken from the cells: one batch, the placement as it stands. Without a header that names
    the devices, updates are added after the last backward of every row if there are none, and empty lines do not count.
    Raises ScheduleError with the row and the cell.
    """
    header, lines = _split_header(text.splitlines())
    if devices := _number(header, "devices"):
        lines += [""] * (devices - len(lines))
        if any(line.strip() for line in lines[devices:]):
            raise ScheduleError(f"header: devices={devices}, but there are more rows")
        lines = lines[:devices]
    else:
        lines = [line for line in lines if line.strip()]
    rows = [_read_row(r, split(line)) for r, line in enumerate(lines)]
    if not any(rows):
        raise ScheduleError("the table is empty: write one line of actions per device")
    cells = [a for row in rows for a in row]
    seen = 1 + max((a.microbatch for a in cells if a.kind is not Kind.U), default=0)
    if seen > len(cells):
        raise ScheduleError(
            f"micro-batch {seen - 1} in a table of {len(cells)} actions: number them from 0 without gaps"
        )
    microbatches = _number(header, "microbatches") or seen
    per_update = _number(header, "per_update") or microbatches
    reads = header.get("reads", "LATEST")
    if reads not in Reads.__members__:
        raise ScheduleError(f"header: reads={reads} is none of {', '.join(Reads.__members__)}")
    if not devices and not any(a.kind is Kind.U for a in cells):
        rows = [insert_updates(row, per_update) for row in rows]
    placement = (
        [_number({"placement": d}, "placement") for d in header["placement"].split()]
        if "placement" in header
        else None
    )
    return {
        "name": header.get("name", name),
        "rows": tuple(map(tuple, rows)),
        "microbatches": microbatches,
        "placement": tuple(_placement(rows) if placement is None else placement),
        "batches": _number(header, "batches") or 1,
        "per_update": per_update,
        "reads": Reads[reads],
    }


def _split_header(lines: list[str]) -> tuple[dict[str, str], list[str]]:
    if not lines or not lines[0].startswith("#"):
        return {}, lines
    header = {
        key: value.strip() for key, value in re.findall(r"(\w+)=([^=]*)(?:\s|$)", lines[0][1:])
    }
    if unknown := sorted(set(header) - KEYS):
        raise ScheduleError(f"header: {unknown[0]}= is none of {', '.join(sorted(KEYS))}")
    return header, lines[1:]


def _read_row(r: int, cells: Sequence[str]) -> list[Action]:
    row = []
    for c, cell in enumerate(cell.strip() for cell in cells):
        if cell not in ("", "."):
            try:
                row.append(Action.parse(cell))
            except ScheduleError as error:
                raise ScheduleError(f"row {r}, cell {c}: {error}") from None
    return row


def _number(header: dict[str, str], key: str) -> int:
    if not re.fullmatch(r"[0-9]{0,9}", value := header.get(key, "")):
        raise ScheduleError(f"header: {key}={value} is not a whole number below a billion")
    return int(value or 0)


def _placement(rows: Sequence[Sequence[Action]]) -> list[int]:
    home = {a.stage: d for d, row in enumerate(rows) for a in row}
    if max(home) >= len(home):
        missing = next(s for s in range(len(home)) if s not in home)
        raise ScheduleError(
            f"stage {missing} has no action, though stage {max(home)} has: number stages from 0 without gaps"
        )
    return [home[s] for s in sorted(home)]
