"""A JupyterLab and a browser that drives it: for the widgets' benchmarks and the browser tests."""

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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
)


def chromium() -> str | None:
    """The path of a Chromium on this machine, if Playwright is installed to drive it."""
    if not find_spec("playwright"):
        return None
    return next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )


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
    """A JupyterLab on a folder of notebooks, as the function path -> address.

    It ends with the block, kernels included. It has settings, trust and logs of its own, in the
    folder's `.jupyter`.
    """
    home = folder / ".jupyter"
    token = secrets.token_hex(16)
    set_theme(folder, "JupyterLab Light")
    write_settings(folder, "notification", {"fetchNews": "false", "checkForUpdates": False})
    places = (
        "JUPYTER_CONFIG_DIR",
        "JUPYTER_DATA_DIR",
        "JUPYTER_RUNTIME_DIR",
        "IPYTHONDIR",
        "JUPYTERLAB_WORKSPACES_DIR",
    )
    settings = {name: str(home / name.lower()) for name in places}
    settings["JUPYTERLAB_SETTINGS_DIR"] = str(home / "settings")
    command = [
        sys.executable,
        "-m",
        "jupyterlab",
        "--no-browser",
        "--allow-root",
        "--port=0",
        f"--notebook-dir={folder}",
        f"--IdentityProvider.token={token}",
        "--ServerApp.ip=127.0.0.1",
    ]
    with open(home / "log.txt", "w") as log:
        server = subprocess.Popen(
            command,
            env=os.environ | settings,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
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
    runtime = home / "jupyter_runtime_dir"
    until = time.monotonic() + timeout
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
    place = folder / ".jupyter" / "settings" / "@jupyterlab" / "apputils-extension"
    place.mkdir(parents=True, exist_ok=True)
    (place / f"{plugin}.jupyterlab-settings").write_text(json.dumps(settings))


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


EXPLORER = ".pipelab-explorer path.boxes"


def run_cells(page: Any, count: int, wait: str = EXPLORER) -> None:
    """Run the first cells of the open notebook and wait for a widget (default: an explorer)."""
    page.locator(".jp-CodeCell .jp-InputArea").first.click()
    for _ in range(count):
        page.keyboard.press("Shift+Enter")
    page.wait_for_selector(wait, state="attached", timeout=60_000)


# As `drawn(lanes)` in `round_trips`: a promise, kept when the lanes have other boxes on the screen.
DRAWN = """window.drawn = (lanes) => new Promise((done) => {
  const watch = new MutationObserver(() => {
    watch.disconnect();
    requestAnimationFrame(() => setTimeout(done));
  });
  watch.observe(lanes, { childList: true });
})"""


def round_trips(sources: Iterable[str], wait: str, script: str, argument: Any) -> list[list[float]]:
    """Seconds, for each widget, of what the script measures in milliseconds; the first is left out.

    sources  a code cell for each widget, which it shows
    wait     what is on the page when the widget is there: a selector
    script   JavaScript, a function of the argument
    """
    found = []
    with tempfile.TemporaryDirectory() as folder, lab(Path(folder)) as address, browser() as chrome:
        for source in sources:
            write_notebook(Path(folder) / "bench.ipynb", [source])
            page = chrome.new_page(viewport={"width": 1400, "height": 1000})
            page.add_init_script(DRAWN)
            open_notebook(page, address, "bench.ipynb")
            run_cells(page, 1, wait)
            found.append([ms / 1e3 for ms in page.evaluate(script, argument)[1:]])
            page.close()
    return found
