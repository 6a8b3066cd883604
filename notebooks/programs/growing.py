"""The table that grows from lecture 8 to lecture 11: ways to run one step of the transformer.

Each lecture adds its rows to the table that the lecture before has stored in its notebook.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import jax

STEPS = 5  # that count in every row, after a first one that warms up
CELL = "growing-table"  # the id of the cell that prints it
HEAD = (
    f"{'a step of stand-ins':27}  devices  ideal ms  median ms (range)"
    f"{'holds':>11}{'sends':>9}  says who"
)
CAPTION = """\
One machine: {devices} {kind} devices on {cores} cores. A stage sleeps for its work (a stand-in),
and `ideal` is the sleep alone. What a device holds and sends: `program` is the compiled program's
account, temporary arrays included; `run` is what the run held between its actions, and what it
sends is our arithmetic. Rows of other lectures were measured when those ran.
"""


class Row(NamedTuple):
    """One way to run a step.

    devices  that share it
    ideal    ms that it takes if devices only sleep, and wait for what they need
    seconds  of several steps, of which the last `STEPS` count
    holds    bytes that the fullest device holds
    sends    bytes that the busiest device sends
    source   "program" if the compiled program says both, else "run"
    """

    devices: int
    ideal: float
    seconds: Sequence[float]
    holds: float
    sends: float
    source: str


def show(rows: Mapping[str, Row], after: str = "") -> None:
    """Print the table of an earlier lecture, then further rows by name.

    after  the lecture before, such as "08"
    """
    where = dict(devices=jax.device_count(), kind=jax.default_backend())
    print(CAPTION.format(**where, cores=os.cpu_count()))
    print(stored(after) if after else HEAD)
    for name, row in rows.items():
        ms = [1e3 * seconds for seconds in row.seconds[-STEPS:]]
        if len(ms) < STEPS:
            raise ValueError(f"{name} has {len(ms)} steps: measure {STEPS} after the first")
        times = f"{median(ms):.0f} ({min(ms):.0f}-{max(ms):.0f})"
        print(
            f"{name:27}{row.devices:9}{row.ideal:10.0f}  {times:>17}"
            f"{row.holds / 2**20:7.2f} MiB{row.sends / 2**10:5.0f} KiB  {row.source}"
        )


def stored(lecture: str) -> str:
    """The table that a lecture's notebook has in its output; without one, its first line."""
    (path,) = Path(__file__).parents[1].glob(f"{lecture}_*.ipynb")
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell.get("id") == CELL and cell["outputs"]:
            text = "".join(line for output in cell["outputs"] for line in output["text"])
            return text[text.index(HEAD) :].strip()
    return HEAD
