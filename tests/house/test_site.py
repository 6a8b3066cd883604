"""The site: built once, its pages read by a parser and opened in a browser."""

import ast
import functools
import html
import os
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urljoin, urlsplit

import nbformat
import pytest

from jupyter_lab import browser, chromium

ROOT = Path(__file__).parents[2]
PACKAGES = ("sphinx", "myst_nb", "sphinx_book_theme", "latex2mathml")
LECTURES = sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))
VOID = ("http:", "https:", "mailto:", "data:")
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1400, "height": 1000}

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, PACKAGES)), reason="needs pip install 'pipelab[site]'"
)
in_a_browser = pytest.mark.skipif(chromium() is None, reason="needs Chromium and Playwright")


class Page(HTMLParser):
    """What a page has: its anchors, links, what it loads, and its pictures."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.loads, self.pictures = set(), set(), set(), []
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and found.get("href"):
            self.links.add(found["href"])
        elif tag == "link" and "href" in found:
            self.loads.add(found["href"])
        elif found.get("src"):
            self.loads.add(found["src"])
        if tag == "img":
            self.pictures.append(found)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site; a warning fails the build."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", ROOT / "docs"]
    command += ["-d", folder / "doctrees", ROOT, folder / "html"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def pages(site):
    names = [path.relative_to(site).as_posix() for path in site.rglob("*.html")]
    return {name: Page(site / name) for name in names if not name.startswith("_static")}


def test_the_site_has_every_lecture_and_the_rest(pages):
    assert {f"notebooks/{name}.html" for name in LECTURES} <= set(pages)
    others = {"index.html", "docs/index.html", "README.html", "notebooks/glossary.html"}
    assert others <= set(pages)


def test_no_link_is_dead_and_nothing_is_loaded_from_elsewhere(site, pages):
    dead = []
    for name, page in pages.items():
        assert not [url for url in page.loads if url.startswith(("http", "//"))], name
        for link in page.links | page.loads:
            if link.startswith(VOID):
                continue
            target = urlsplit(urljoin(f"/{name}", link))
            path = unquote(target.path).lstrip("/")
            there = (site / path).is_file()
            if there and target.fragment and path in pages:
                there = unquote(target.fragment) in pages[path].anchors
            if not there:
                dead.append(f"{name}: {link}")
    assert not dead, "\n".join(dead)


def test_every_picture_says_what_it_shows(pages):
    assert sum(len(page.pictures) for page in pages.values()) > 3 * len(LECTURES)
    for name, page in pages.items():
        for picture in page.pictures:
            alt = picture.get("alt", "").removeprefix("Figure: ")
            assert len(alt.split()) >= 4, (name, picture["src"], alt)


def test_a_pictures_words_are_its_own_or_read_off_its_cell():
    from lectures import prepare

    picture = {"output_type": "display_data", "data": {"image/png": ""}}
    told = {"mystnb": {"image": {"alt": "Four boxes in a row."}}}
    cells = [("markdown", {}, "A line. The idle share *falls*:")]
    cells += [("code", {}, "ax = plot.losses({'ours': a})\nax.set(xlabel='m', ylabel='share')")]
    cells += [("code", told, "ax = plot.losses(a)")]
    notebook = {"metadata": {}, "cells": []}
    for kind, metadata, source in cells:
        cell = {"cell_type": kind, "metadata": metadata, "source": [source]}
        notebook["cells"].append(cell | ({"outputs": [picture]} if kind == "code" else {}))
    prepare(notebook)
    first, second = (c["metadata"]["mystnb"]["image"]["alt"] for c in notebook["cells"][1:])
    assert first == (
        "Figure: The loss of every batch; one line per name. ours. share over m. "
        "The idle share falls:"
    )
    assert second == "Four boxes in a row."


def test_formulas_with_brackets_of_a_given_size_and_unknown_ones():
    from mathml import to_mathml

    assert to_mathml(r"\Big\lfloor x \Big\rfloor", "inline").count("fence") == 2
    assert "<munder>" in to_mathml(r"\max_s t_s", "block")
    with pytest.raises(ValueError, match="cannot be shown"):
        to_mathml(r"\nosuchthing x", "inline")


def test_docstrings_columns_become_definitions():
    from reference import paragraph

    columns = ["stages   one `module` a_", "         stage", "loss     any"]
    assert list(paragraph(columns)) == [
        *("", "``stages``", "    one \\ ``module``\\  a\\_", "    stage"),
        *("", "``loss``", "    any"),
    ]
    assert list(paragraph(["0F0 .", "  1F0"])) == ["::", "", "    0F0 .", "      1F0"]


def test_outputs_are_the_stored_ones_and_widgets_say_that_they_need_a_kernel(site):
    for name in LECTURES:
        widgets = 0
        page = (site / "notebooks" / f"{name}.html").read_text()
        assert "jupyter-widgets" not in page
        text = html.unescape(re.sub(r"<[^>]*>", "", page))
        for cell in nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4).cells:
            for output in cell.get("outputs", []):
                widgets += "application/vnd.jupyter.widget-view+json" in output.get("data", {})
                for line in output.get("text", "").splitlines():
                    assert line.strip() in text, (name, line)
        assert page.count("This page has no kernel") == widgets, name


def test_formulas_are_mathml(site):
    text = (site / "notebooks" / "02_gpipe.html").read_text()
    assert "<mfrac>" in text
    for page in (site / "notebooks").glob("*.html"):
        assert not re.search(r"\$\$|\\frac|\\max\b", page.read_text()), page.name


def test_the_reference_has_every_public_name(pages):
    anchors = set().union(*(page.anchors for name, page in pages.items() if "docs/api" in name))
    optimize = ("optimize/cut", "optimize/plan")
    packages = ("", *optimize, "pipeshard", "pipeshard/auto", "plot", "widgets")
    for package in packages:
        source = (ROOT / "pipelab" / package / "__init__.py").read_text()
        (names,) = re.findall(r"^__all__ = (\[.*?\])", source, re.S | re.M)
        for name in set(ast.literal_eval(names)) - {"plot"}:
            assert [a for a in anchors if re.fullmatch(rf"pipelab[\w.]*\.{name}", a)], name


def test_buttons_for_binder_and_colab_need_one_line(pages):
    assert not [link for page in pages.values() for link in page.links if "colab" in link]
    source = (ROOT / "docs" / "conf.py").read_text()
    assert source.count('\nREPOSITORY = ""\n') == 1
    filled = source.replace('REPOSITORY = ""', 'REPOSITORY = "https://github.com/a/pipelab"')
    settings = {"__file__": str(ROOT / "docs" / "conf.py")}
    exec(compile(ast.parse(filled), "conf.py", "exec"), settings)
    assert set(settings["html_theme_options"]["launch_buttons"]) >= {"binderhub_url", "colab_url"}


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


@pytest.fixture
def open_page(chrome, address):
    """Open pages that must neither complain nor ask for anything elsewhere."""
    complaints, opened = [], []

    def asked(request):
        if not request.url.startswith((address, "data:")):
            complaints.append(f"asked for {request.url}")

    def failed(request):
        if request.failure != "net::ERR_ABORTED":  # the test has left the page meanwhile
            complaints.append(f"{request.failure}: {request.url}")

    def said(message):
        if message.type == "error":
            complaints.append(f"{message.text} {message.location}")

    def open_one(size, colours="light"):
        page = chrome.new_page(viewport=size, color_scheme=colours)
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


@in_a_browser
def test_pages_fit_a_phone(open_page, address, pages):
    page, wide = open_page(PHONE), {}
    for name in sorted(name for name in pages if not name.startswith(("_modules", "index"))):
        page.goto(f"{address}/{name}")
        width = page.evaluate(
            "document.fonts.ready.then(() => document.documentElement.scrollWidth)"
        )
        if width > PHONE["width"]:
            wide[name] = width
    assert wide == {}


@in_a_browser
def test_the_dark_colours_and_a_fold(open_page, address):
    page = open_page(DESK, "dark")
    page.goto(f"{address}/index.html")
    page.wait_for_url("**/docs/index.html")
    page.locator("article a", has_text="lecture 0").click()
    page.wait_for_url("**/00_start_here.html")
    page.wait_for_function(
        """() => {
          const colour = getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number);
          return colour.length === 3 && colour[0] + colour[1] + colour[2] < 200;
        }"""
    )
    fold = page.locator("article details").first
    closed = fold.bounding_box()["height"]
    fold.locator("summary").click()
    page.wait_for_function(
        "([fold, closed]) => fold.getBoundingClientRect().height > closed + 10",
        arg=[fold.element_handle(), closed],
    )


@in_a_browser
def test_search_finds_a_word_of_the_field(open_page, address):
    page = open_page(DESK)
    page.goto(f"{address}/search.html?q=1F1B")
    page.locator("#search-results li a[href*='03_pipedream_1f1b']").first.wait_for()
