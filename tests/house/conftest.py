"""The site, built once however many files test it, served as plain files to a browser."""

import fcntl
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

import pytest

from jupyter_lab import FLAGS, browser, chromium

ROOT = Path(__file__).parents[2]
DESK = {"width": 1400, "height": 1000}


def made_of():
    """A word for what the site is made of: any byte changes it."""
    folders = ("docs", "notebooks", "pipelab", "benchmarks", "images")
    files = [*ROOT.glob("*.md"), *(f for folder in folders for f in (ROOT / folder).rglob("*"))]
    tools = sys.version, version("sphinx"), version("myst-nb"), bool(shutil.which("npm"))
    word = hashlib.sha256(repr(tools).encode())
    for file in sorted(files):
        if file.is_file() and "__pycache__" not in file.parts:
            word.update(f"{file.relative_to(ROOT)} {file.stat().st_size} ".encode())
            word.update(file.read_bytes())
    return word.hexdigest()[:16]


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the built site; a warning fails the build. It is kept for the next run."""
    folder, doctrees = ROOT / "build" / "tests", tmp_path_factory.mktemp("doctrees")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        built, making = folder / made_of(), folder / "making"
        if not built.is_dir():
            for old in folder.glob("*/"):
                shutil.rmtree(old)
            command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q"]
            command += ["-c", ROOT / "docs", "-d", doctrees, ROOT, making / "site"]
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
            making.rename(built)
    return built / "site"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *arguments):
        pass


@pytest.fixture(scope="module")
def address(site):
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def chrome():
    with browser() as chrome:
        yield chrome


@pytest.fixture(scope="module")
def keeping(chrome, tmp_path_factory):
    """A Chromium that keeps what it compiled: its second page with Python costs half the first."""
    launch, profile = chrome.browser_type.launch_persistent_context, tmp_path_factory.mktemp("keep")
    with launch(profile, executable_path=chromium(), args=FLAGS, color_scheme="light") as context:
        yield context


@pytest.fixture
def open_page(chrome, address):
    """Open pages that must neither complain nor ask for anything elsewhere."""
    complaints, opened = [], []

    def asked(request):
        if not request.url.startswith((address, "data:", "blob:")):
            complaints.append(f"asked for {request.url}")

    def failed(request):
        # The test has left the page meanwhile, or its scripts are off.
        if request.failure not in ("net::ERR_ABORTED", "csp"):
            complaints.append(f"{request.failure}: {request.url}")

    def said(message):
        if message.type == "error":
            complaints.append(f"{message.text} {message.location}")

    def open_one(size, colours="light", keeping=None, **more):
        """A page to which nothing is stored; `keeping` opens it in place of a new browser."""
        if keeping:
            page = keeping.new_page()
            page.set_viewport_size(size)
            origin = {"origin": address, "storageTypes": "cookies,local_storage,indexeddb"}
            keeping.new_cdp_session(page).send("Storage.clearDataForOrigin", origin)
        else:
            page = chrome.new_page(viewport=size, color_scheme=colours, **more)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", asked)
        page.on("requestfailed", failed)
        page.on("console", said)
        opened.append(page)
        return page

    yield open_one
    for page in opened:
        page.close()
    assert complaints == []


@pytest.fixture
def with_python(site):
    if not (site / "_static" / "play" / "pyodide").is_dir():
        pytest.skip("npm gave no Pyodide")


@pytest.fixture
def playing(open_page, address, keeping, with_python):
    """Open pages of a site that has Python in it; they share what the browser compiled of it."""

    def open_one(path, size=DESK):
        page = open_page(size, keeping=keeping)
        page.goto(f"{address}/{path}")
        return page

    return open_one
