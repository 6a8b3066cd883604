"""The table that grows from lecture 8 to lecture 11: ways to run one step of the transformer.

Each lecture adds its rows to the table that the lecture before has stored in its notebook.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

CELL = "growing-table"  # the id of the cell that prints it
HEAD = f"{'a step of stand-ins':28}   its time   a device holds   and sends"


def show(rows: Mapping[str, tuple[Iterable[float], float, float]], after: str = "") -> None:
    """Print the table of an earlier lecture, then further rows.

    rows   by name: seconds of several steps, of which the fastest counts (others were disturbed
           more); bytes that a device holds at most; bytes that it sends
    after  the lecture before, such as "08"
    """
    print(stored(after) if after else HEAD)
    for name, (seconds, held, sent) in rows.items():
        ms, mib, kib = 1e3 * min(seconds), held / 2**20, sent / 2**10
        print(f"{name:28} {ms:7.0f} ms {mib:12.2f} MiB {kib:7.0f} KiB")


def stored(lecture: str) -> str:
    """The table that a lecture's notebook has in its output; without one, its first line."""
    (path,) = Path(__file__).parents[1].glob(f"{lecture}_*.ipynb")
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell.get("id") == CELL and cell["outputs"]:
            text = "".join(line for output in cell["outputs"] for line in output["text"])
            return text[text.index(HEAD) :].strip()
    return HEAD
