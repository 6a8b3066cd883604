"""How fast the schedule explorer responds: python benchmarks/explorer.py."""

from __future__ import annotations

import time

from jupyter_lab import EXPLORER, chromium, round_trips
from measure import machine, main, page, paragraph, spread, table
from pipelab.widgets import Explorer

CASES = (
    ("gpipe", 4, 8),
    ("pipedream_flush", 8, 32),
    ("interleaved", 8, 32),
    ("pipedream_flush", 16, 64),
    ("pipedream_flush", 32, 256),
)
FORWARDS = (2, 1.5, 1, 3)  # the forward's seconds, changed in turn

# Change a field and wait until the picture has other boxes and is on the screen; milliseconds for
# each value.
ROUND_TRIPS = """async ([name, values]) => {
  const root = document.querySelector(".pipelab-explorer"), times = [];
  const field = root.querySelector(`[name=${name}]`), lanes = root.querySelector(".lanes");
  for (const value of values) {
    const answer = drawn(lanes), began = performance.now();
    field.value = value;
    field.dispatchEvent(new Event("change"));
    await answer;
    times.push(performance.now() - began);
  }
  return times;
}"""


def report(repeats: int = 9) -> str:
    """Times from a change to its picture, in Python alone and in JupyterLab, as a Markdown page.

    Without a Chromium JupyterLab is not measured.
    """
    explorers = [Explorer(name, p, m, virtual=_chunks(name)) for name, p, m in CASES]
    in_python = [spread(_in_python(explorer, repeats)) for explorer in explorers]
    in_lab = [spread(times) for times in _in_lab(repeats)] if chromium() else []
    rows = [
        (name, p, m, f"{len(explorer.timeline.start):,}", *times)
        for (name, p, m), explorer, *times in zip(
            CASES, explorers, in_python, in_lab or ["not measured"] * len(CASES), strict=True
        )
    ]
    return page(
        "# Response of the schedule explorer",
        machine("numpy", "anywidget", "jupyterlab", "playwright"),
        paragraph(
            f"Medians of {repeats} changes of the forward's cost (fastest to slowest in "
            "brackets). Python: simulate, take the memory, pack what is drawn. In JupyterLab: "
            "from the change of the field to the new picture on the screen, in headless "
            "Chromium on the same machine: the kernel's work, the messages, the drawing and a "
            "frame of waiting."
        ),
        table(
            (
                "schedule",
                "devices",
                "micro-batches",
                "actions",
                "Python (ms)",
                "in JupyterLab (ms)",
            ),
            rows,
        ),
    )


def _chunks(name: str) -> int:
    return 2 if name == "interleaved" else 1


def _in_python(explorer: Explorer, repeats: int) -> list[float]:
    """Seconds of the changes of one explorer without a browser."""
    times = []
    for turn in range(repeats + 1):
        began = time.perf_counter()
        explorer.set(forward=FORWARDS[turn % len(FORWARDS)])
        times.append(time.perf_counter() - began)
    return times[1:]


def _in_lab(repeats: int) -> list[list[float]]:
    """Seconds of the round trips of every case."""
    values = [str(FORWARDS[turn % len(FORWARDS)]) for turn in range(repeats + 1)]
    sources = (
        "from pipelab.widgets import Explorer\n"
        f"Explorer({name!r}, {p}, {m}, virtual={_chunks(name)})"
        for name, p, m in CASES
    )
    return round_trips(sources, EXPLORER, ROUND_TRIPS, ["forward", values])


if __name__ == "__main__":
    main(report, "explorer.md", repeats=9)
