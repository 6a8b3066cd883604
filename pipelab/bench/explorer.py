"""The explorer's response: `pipelab bench explorer`. Also a JupyterLab of its own, which the browser tests use."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipelab.bench.measure import machine, spread, table

CASES = (("gpipe", 4, 8), ("pipedream_flush", 8, 32), ("interleaved", 8, 32), ("pipedream_flush", 32, 256))
FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update")
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
        (name, p, m, f"{len(one.timeline.start):,}", spread(times), spread(seen) if seen else "not measured")
        for (name, p, m), one, times, seen in zip(CASES, shown, python, browser, strict=True)
    ]
    lines = [
        "# Response of the schedule explorer", "",
        machine("numpy", "anywidget", "jupyterlab", "playwright"), "",
        f"Medians of {repeats} changes of the forward's cost (fastest to slowest in brackets). Python: simulate, take the",
        "memory, pack what is drawn. In JupyterLab: from the change of the field to the new picture on the screen, in headless",
        "Chromium on the same machine: the kernel's work, the messages, the drawing and a frame of waiting.", "",
        *table(("schedule", "devices", "micro-batches", "actions", "Python (ms)", "in JupyterLab (ms)"), rows),
    ]  # fmt: skip
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
            times = page.evaluate(ROUND_TRIPS, ["forward", [str(FORWARDS[k % len(FORWARDS)]) for k in range(repeats + 1)]])
            found.append([ms / 1e3 for ms in times[1:]])
            page.close()
    return found


# ---- a JupyterLab and a browser


def chromium() -> str | None:
    """The path of a Chromium on this machine, if Playwright is there to drive it."""
    if not find_spec("playwright"):
        return None
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium under Playwright."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as player:
        chrome = player.chromium.launch(executable_path=chromium(), headless=True, args=list(FLAGS))
        try:
            yield chrome
        finally:
            chrome.close()


@contextmanager
def lab(folder: Path, timeout: float = 60.0) -> Iterator[Callable[[str], str]]:
    """A JupyterLab on a folder of notebooks; gives the function path -> address. It ends, kernels included, with the block.

    Settings, trust and logs of its own lie in the folder's `.jupyter`.
    """
    home, token = folder / ".jupyter", secrets.token_hex(16)
    set_theme(folder, "JupyterLab Light")
    write_settings(folder, "notification", {"fetchNews": "false", "checkForUpdates": False})
    places = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "JUPYTERLAB_WORKSPACES_DIR")
    inside = {name: str(home / name.lower()) for name in places} | {"JUPYTERLAB_SETTINGS_DIR": str(home / "settings")}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--port=0", f"--notebook-dir={folder}"]
    command += [f"--IdentityProvider.token={token}", "--ServerApp.ip=127.0.0.1"]
    with open(home / "log.txt", "w") as log:
        server = subprocess.Popen(
            command, env=os.environ | inside, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
    try:
        port = _port(server, home, timeout)
        yield lambda path: f"http://127.0.0.1:{port}/{path}?token={token}"
    finally:
        server.send_signal(signal.SIGTERM)  # the server ends its kernels
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _port(server: subprocess.Popen, home: Path, timeout: float) -> int:
    """The port that the server says it listens on."""
    runtime, until = home / "jupyter_runtime_dir", time.monotonic() + timeout
    while time.monotonic() < until and server.poll() is None:
        for file in runtime.glob(f"jpserver-{server.pid}.json"):
            try:
                return json.loads(file.read_text())["port"]
            except ValueError:
                pass  # half-written
        time.sleep(0.1)
    raise RuntimeError(f"JupyterLab did not start:\n{(home / 'log.txt').read_text()}")


def write_settings(folder: Path, plugin: str, settings: dict[str, Any]) -> None:
    """Settings of a part of JupyterLab's user interface, for a page opened later."""
    file = folder / ".jupyter" / "settings" / "@jupyterlab" / "apputils-extension" / f"{plugin}.jupyterlab-settings"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(settings))


def set_theme(folder: Path, name: str) -> None:
    """The colours of pages opened later: "JupyterLab Light" or "JupyterLab Dark"."""
    write_settings(folder, "themes", {"theme": name, "adaptive-theme": False})


def write_notebook(path: Path, sources: list[str]) -> None:
    """A notebook of code cells that did not run yet."""
    import nbformat.v4

    cells = [nbformat.v4.new_code_cell(source) for source in sources]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), path)


def open_notebook(page: Any, address: Callable[[str], str], name: str) -> None:
    """Open a notebook in JupyterLab, alone, and wait for its kernel."""
    with page.expect_websocket(lambda socket: "/api/kernels/" in socket.url, timeout=60_000):
        page.goto(address(f"doc/tree/{name}"))
    page.wait_for_selector(".jp-NotebookPanel-toolbar [data-status=idle]", timeout=60_000)


def run_cells(page: Any, count: int) -> None:
    """Run the first cells of the open notebook and wait for the explorer."""
    page.locator(".jp-CodeCell .jp-InputArea").first.click()
    for _ in range(count):
        page.keyboard.press("Shift+Enter")
    page.wait_for_selector(".pipelab-explorer path.boxes", state="attached", timeout=60_000)
