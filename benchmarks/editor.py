"""How fast the schedule editor answers a move: python benchmarks/editor.py."""

from __future__ import annotations

import time

import numpy as np

from jupyter_lab import chromium, round_trips
from measure import machine, main, page, paragraph, spread, table, timed
from pipelab.editor.puzzle import finish
from pipelab.widgets import Editor

CASES = (  # how the editor is made, and how it is helped
    ("'cap'", "legal"),
    ("'cap'", "coach"),
    ("'interleaved'", "coach"),
    ("'versions'", "coach"),
    ("devices=8, microbatches=16", "legal"),
    ("devices=8, microbatches=16", "ready"),
)

# Type a move, wait until it is on the screen, and take it back; milliseconds of each move.
ROUND_TRIPS = """async (repeats) => {
  const svg = document.querySelector(".pipelab-editor .picture svg");
  const lanes = svg.querySelector(".lanes"), times = [];
  const press = (key, ctrlKey = false) =>
    svg.dispatchEvent(new KeyboardEvent("keydown", { key, ctrlKey }));
  const answered = (keys) => {
    const answer = drawn(lanes);
    keys();
    return answer;
  };
  for (let turn = 0; turn < repeats; turn++) {
    const began = performance.now();
    await answered(() => (press("F"), press("Enter")));
    times.push(performance.now() - began);
    await answered(() => press("z", true));
  }
  return times;
}"""


def report(repeats: int = 15) -> str:
    """Times from a move to its picture, in Python alone and in JupyterLab, as a Markdown page.

    Without a Chromium JupyterLab is not measured.
    """
    in_python = [_in_python(*case, repeats) for case in CASES]
    in_lab = _in_lab(repeats) if chromium() else []
    rows = []
    for number, (made, help) in enumerate(CASES):
        editor = _editor(made, help)
        lab_time = spread(in_lab[number]) if in_lab else "not measured"
        made_of = f"`Editor({made})`", help, editor.draft.size
        slow = f"{1e3 * np.quantile(_game(made, help), 0.9):.2f}"
        rows.append((*made_of, spread(in_python[number]), slow, lab_time))
    return page(
        "# Response of the schedule editor",
        machine("numpy", "anywidget", "jupyterlab", "playwright"),
        paragraph(
            f"Medians of {repeats} moves (fastest to slowest in brackets): a forward placed in an "
            "empty table by two keys, and taken back, which is not counted. Python: is it legal, "
            "simulate, say why devices are idle; with a coach also look for the best way to go on. "
            "A game: of all its moves, as the coach would play it, nine in ten take no more CPU "
            "time. "
            "In JupyterLab: from the first key to the new picture on the screen, in headless "
            "Chromium on the same machine."
        ),
        table(
            ("editor", "help", "actions", "Python (ms)", "a game (ms)", "in JupyterLab (ms)"), rows
        ),
    )


def _editor(made: str, help: str) -> Editor:
    return eval(f"Editor({made}, help={help!r})", {"Editor": Editor})


def _in_python(made: str, help: str, repeats: int) -> list[float]:
    """Seconds of moves without a browser."""
    editor, times = _editor(made, help), []
    for _ in range(repeats + 1):
        times.append(timed(lambda: editor.place("0F0")))
        editor.undo()
    return times[1:]


def _game(made: str, help: str) -> list[float]:
    """CPU seconds of every move of a whole game."""
    editor, times = _editor(made, help), []
    best = finish(editor.draft)
    every = sorted((a for row in best.rows for a in row), key=lambda a: (best.spans[a], a.stage))
    for action in every:
        began = time.process_time()
        editor.place(str(action))
        times.append(time.process_time() - began)
    return times


def _in_lab(repeats: int) -> list[list[float]]:
    """Seconds of the round trips of every case."""
    sources = (
        f"from pipelab.widgets import Editor\nEditor({made}, help={help!r})" for made, help in CASES
    )
    return round_trips(sources, ".pipelab-editor .cursor rect", ROUND_TRIPS, repeats + 1)


if __name__ == "__main__":
    main(report, "editor.md", repeats=15)
