"""How fast the schedule explorer responds: python benchmarks/explorer.py."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from jupyter_lab import browser, chromium, lab, open_notebook, run_cells, write_notebook
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
    const drawn = new Promise((done) => {
      const watch = new MutationObserver(() => {
        watch.disconnect();
        requestAnimationFrame(() => setTimeout(done));
      });
      watch.observe(lanes, { childList: true });
    });
    const began = performance.now();
    field.value = value;
    field.dispatchEvent(new Event("change"));
    await drawn;
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
    found = []
    values = [str(FORWARDS[turn % len(FORWARDS)]) for turn in range(repeats + 1)]
    with tempfile.TemporaryDirectory() as folder, lab(Path(folder)) as address, browser() as chrome:
        for name, p, m in CASES:
            source = (
                "from pipelab.widgets import Explorer\n"
                f"Explorer({name!r}, {p}, {m}, virtual={_chunks(name)})"
            )
            write_notebook(Path(folder) / "bench.ipynb", [source])
            page = chrome.new_page(viewport={"width": 1400, "height": 1000})
            open_notebook(page, address, "bench.ipynb")
            run_cells(page, 1)
            milliseconds = page.evaluate(ROUND_TRIPS, ["forward", values])
            found.append([ms / 1e3 for ms in milliseconds[1:]])
            page.close()
    return found


if __name__ == "__main__":
    main(report, "explorer.md", repeats=9)
