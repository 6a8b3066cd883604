"""The explorer's response: `pipelab bench explorer`."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipelab.bench.jupyter import browser, chromium, lab, open_notebook, run_cells, write_notebook
from pipelab.bench.measure import machine, spread, table

CASES = (
    ("gpipe", 4, 8),
    ("pipedream_flush", 8, 32),
    ("interleaved", 8, 32),
    ("pipedream_flush", 32, 256),
)
FORWARDS = (2, 1.5, 1, 3)  # the forward's seconds, changed in turn

# Change a field, wait until the picture has other boxes and is on the screen; milliseconds for each value.
ROUND_TRIPS = """async ([name, values]) => {
  const root = document.querySelector(".pipelab-explorer"), field = root.querySelector(`[name=${name}]`), times = [];
  for (const value of values) {
    const drawn = new Promise((done) => {
      const watch = new MutationObserver(() => (watch.disconnect(), requestAnimationFrame(() => setTimeout(done))));
      watch.observe(root.querySelector(".lanes"), { childList: true });
    });
    const began = performance.now();
    field.value = value;
    field.dispatchEvent(new Event("change"));
    await drawn;
    times.push(performance.now() - began);
  }
  return times;
}"""


def report(explorer: Callable[..., Any], repeats: int = 5) -> str:
    """Times from a change to its picture, in Python alone and in JupyterLab where there is a Chromium, as a Markdown page.

    `explorer` is the widget's class.
    """
    shown = [explorer(name, p, m, virtual=_chunks(name)) for name, p, m in CASES]
    python = [_python(one, repeats) for one in shown]
    browser = _browser(repeats) if chromium() else [None] * len(CASES)
    rows = [
        (
            name,
            p,
            m,
            f"{len(one.timeline.start):,}",
            spread(times),
            spread(seen) if seen else "not measured",
        )
        for (name, p, m), one, times, seen in zip(CASES, shown, python, browser, strict=True)
    ]
    lines = [
        "# Response of the schedule explorer",
        "",
        machine("numpy", "anywidget", "jupyterlab", "playwright"),
        "",
        f"Medians of {repeats} changes of the forward's cost (fastest to slowest in brackets). Python: simulate, take the",
        "memory, pack what is drawn. In JupyterLab: from the change of the field to the new picture on the screen, in headless",
        "Chromium on the same machine: the kernel's work, the messages, the drawing and a frame of waiting.",
        "",
        *table(
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
    ]
    return "\n".join(lines) + "\n"


def _chunks(name: str) -> int:
    return 2 if name == "interleaved" else 1


def _python(explorer: Any, repeats: int) -> list[float]:
    """Seconds of the changes of one explorer without a browser."""
    times = []
    for turn in range(repeats + 1):
        began = time.perf_counter()
        explorer.set(forward=FORWARDS[turn % len(FORWARDS)])
        times.append(time.perf_counter() - began)
    return times[1:]


def _browser(repeats: int) -> list[list[float]]:
    """Seconds of the round trips of every case."""
    found = []
    with tempfile.TemporaryDirectory() as folder, lab(Path(folder)) as address, browser() as chrome:
        for name, p, m in CASES:
            source = f"from pipelab.widgets import Explorer\nExplorer({name!r}, {p}, {m}, virtual={_chunks(name)})"
            write_notebook(Path(folder) / "bench.ipynb", [source])
            page = chrome.new_page(viewport={"width": 1400, "height": 1000})
            open_notebook(page, address, "bench.ipynb")
            run_cells(page, 1)
            times = page.evaluate(
                ROUND_TRIPS,
                ["forward", [str(FORWARDS[k % len(FORWARDS)]) for k in range(repeats + 1)]],
            )
            found.append([ms / 1e3 for ms in times[1:]])
            page.close()
    return found
