"""The site: built once, its pages read by a parser and opened in a browser."""

import ast
import html
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urljoin, urlsplit

import pytest

from jupyter_lab import chromium
from pipelab.editor.puzzle import LEVELS
from pipelab.widgets import WIDGETS
from tests.house.books import BOOKS, book

ROOT = Path(__file__).parents[2]
PACKAGES = ("sphinx", "myst_nb", "sphinx_book_theme", "latex2mathml")
LECTURES = [path.stem for path in BOOKS]
VOID = ("http:", "https:", "mailto:", "data:")
PHONE, DESK = {"width": 390, "height": 844}, {"width": 1400, "height": 1000}

pytestmark = pytest.mark.skipif(
    not all(map(find_spec, PACKAGES)), reason="needs pip install 'pipelab[site]'"
)
of_the_site = pytest.mark.thorough  # for `make test`: test_few_pages
in_a_browser = pytest.mark.skipif(chromium() is None, reason="needs Chromium and Playwright")


class Page(HTMLParser):
    """What a page has: its anchors, links, what it loads, and its pictures."""

    def __init__(self, path):
        super().__init__()
        self.anchors, self.links, self.loads, self.pictures = set(), set(), set(), []
        self.words = {}  # of its head
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}
        if tag == "a" and found.get("href"):
            self.links.add(found["href"])
        elif tag == "meta" and "content" in found:
            self.words[found.get("property", found.get("name"))] = found["content"]
        elif tag == "link" and "href" in found:
            self.loads.add(found["href"])
        elif found.get("src"):
            self.loads.add(found["src"])
        if tag == "img":
            self.pictures.append(found)


@pytest.fixture(scope="module")
def pages(site):
    names = [path.relative_to(site).as_posix() for path in site.rglob("*.html")]
    return {name: Page(site / name) for name in names if not name.startswith("_static")}


@of_the_site
def test_the_site_has_every_lecture_and_the_rest(pages):
    assert {f"notebooks/{name}.html" for name in LECTURES} <= set(pages)
    others = {"index.html", "docs/index.html", "README.html", "notebooks/glossary.html"}
    others |= {f"docs/{page.stem}.html" for page in (ROOT / "docs").glob("*.md")}
    assert others <= set(pages)


@of_the_site
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
            plays = path in ("index.html", "docs/play/editor.html")
            told = LEVELS if plays else ()  # what an address can set
            if there and target.fragment and path in pages and "schedule=" not in target.fragment:
                there = unquote(target.fragment) in {*pages[path].anchors, *told}
            if not there:
                dead.append(f"{name}: {link}")
    assert not dead, "\n".join(dead)


@of_the_site
def test_links_to_settings_are_of_tables_that_can_be_simulated(pages):
    from browser import explorer_state

    links = {link for page in pages.values() for link in page.links if "explorer.html#" in link}
    told = [dict(parse_qsl(urlsplit(link).fragment)) for link in links if "schedule=" in link]
    assert len(told) >= 10
    for settings in told:
        given = {key: int(x) if x.isdigit() else x for key, x in settings.items()}
        shown = explorer_state({"devices": 4, "microbatches": 8} | given)
        assert shown["settings"].items() >= given.items(), given


@of_the_site
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
    options = ["Args:", "    stages: one `module` a_", "        stage", "    loss: any"]
    assert list(paragraph(options)) == list(paragraph(columns))
    assert list(paragraph(["0F0 .", "  1F0"])) == ["::", "", "    0F0 .", "      1F0"]


@of_the_site
def test_outputs_are_the_stored_ones_and_widgets_are_there(site):
    for name in LECTURES:
        widgets = 0
        page = (site / "notebooks" / f"{name}.html").read_text()
        assert "jupyter-widgets" not in page
        text = html.unescape(re.sub(r"<[^>]*>", "", page))
        for cell in book(ROOT / "notebooks" / f"{name}.ipynb").cells:
            for output in cell.get("outputs", []):
                widgets += "application/vnd.jupyter.widget-view+json" in output.get("data", {})
                for line in output.get("text", "").splitlines():
                    assert line.strip() in text, (name, line)
        shown = page.count('class="pipelab-play"') + page.count("This page has no kernel")
        assert shown == widgets, name
        assert page.count("This page has no kernel") == (name == "04_work_partitioning"), name


@of_the_site
def test_formulas_are_mathml(site):
    text = (site / "notebooks" / "02_gpipe.html").read_text()
    assert "<mfrac>" in text
    for page in (site / "notebooks").glob("*.html"):
        assert not re.search(r"\$\$|\\frac|\\max\b", page.read_text()), page.name


@of_the_site
def test_the_reference_has_every_public_name(pages):
    anchors = set().union(*(page.anchors for name, page in pages.items() if "docs/api" in name))
    optimize = ("optimize/cut", "optimize/plan")
    packages = ("", *optimize, "pipeshard", "pipeshard/auto", "plot")
    public = {*WIDGETS}  # which rooms above add to
    assert public == {"Explorer", "Editor"}
    for package in packages:
        source = (ROOT / "pipelab" / package / "__init__.py").read_text()
        (names,) = re.findall(r"^__all__ = (\[.*?\])", source, re.S | re.M)
        public.update(ast.literal_eval(names))
    for name in public - {"plot"}:
        assert [a for a in anchors if re.fullmatch(rf"pipelab[\w.]*\.{name}", a)], name


@of_the_site
def test_no_page_has_buttons_without_a_repository(pages):
    assert (ROOT / "docs" / "conf.py").read_text().count('\nREPOSITORY = ""\n') == 1
    links = {link for page in pages.values() for link in page.links}
    assert not [link for link in links if "colab" in link or "binder" in link]


@of_the_site
def test_a_repository_gives_edit_binder_colab_and_download_buttons(tmp_path):
    """A site of two pages, with the one setting filled."""
    (tmp_path / "notebooks").mkdir()
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("[!s]*.md"))
    shutil.copytree(ROOT / "images", tmp_path / "images")
    shutil.copy(ROOT / "notebooks" / "06_pipedream_flush.ipynb", tmp_path / "notebooks")
    shutil.copytree(ROOT / "notebooks" / "widgets", tmp_path / "notebooks" / "widgets")
    (tmp_path / "docs" / "index.md").write_text("# pipelab\n\n[6](/notebooks/06_pipedream_flush)\n")
    conf = tmp_path / "docs" / "conf.py"
    filled = 'REPOSITORY = "https://github.com/somebody/pipelab"'
    conf.write_text(conf.read_text().replace('REPOSITORY = ""', filled))
    command = [sys.executable, "-m", "sphinx", "-q", "-c", tmp_path / "docs", "-b", "html"]
    command += ["-d", tmp_path / "doctrees", tmp_path, tmp_path / "html"]
    command += [
        "-D",
        "html_extra_path=",
        "-D",
        "suppress_warnings=myst,toc,image",
    ]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    page = Page(tmp_path / "html" / "notebooks" / "06_pipedream_flush.html")
    links = " ".join(page.links)
    for wanted in (
        "https://mybinder.org/v2/gh/somebody/pipelab/main?urlpath=lab/tree/notebooks/06",
        "https://colab.research.google.com/github/somebody/pipelab/blob/main/notebooks/06",
        "https://github.com/somebody/pipelab/edit/main/notebooks/06_pipedream_flush.ipynb",
        "_sources/notebooks/06_pipedream_flush.ipynb",
    ):
        assert wanted in links, (wanted, page.links)
    assert page.words["og:image"] == "https://somebody.github.io/pipelab/_static/overview.png"


@of_the_site
def test_a_link_to_a_page_has_words_and_a_picture(site, pages):
    told = {}
    for name, page in pages.items():
        if name.startswith(("notebooks/", "docs/", "README")) and "redirect" not in name:
            text = page.words["description"]
            assert 60 < len(text) <= 201 and text == page.words["og:description"], (name, text)
            assert page.words["og:title"], name
            picture = urljoin(f"/{name}", page.words["og:image"]).lstrip("/")
            assert (site / picture).is_file(), name
            told.setdefault(text, []).append(name)
    lectures = [names for names in told.values() if any("notebooks/" in name for name in names)]
    assert all(len(names) == 1 for names in lectures), "each lecture has its own words"


def test_a_lecture_has_one_name_everywhere():
    head = re.compile(r"# (\d+) ([^:?\n]*\??)")
    first = {path.name: book(path).cells[0].source for path in BOOKS}
    link = re.compile(r"\[(\d+) ([^\]\[]*)\]\((?:\.\./)?(?:notebooks/)?(\w+\.ipynb)\)")
    row = re.compile(r"\| (\d+) \| \[([^\]\[]*)\]\((?:notebooks/)?(\w+\.ipynb)\)")
    found = []
    for source in (*BOOKS, *(ROOT / "docs").glob("*.md"), ROOT / "README.md"):
        text = source.read_text()
        found += [(source.name, *parts) for parts in link.findall(text) + row.findall(text)]
    assert len(found) > 80
    assert not [parts for parts in found if parts[1:3] != head.match(first[parts[3]]).groups()]


def test_nearly_all_figures_are_described_by_hand():
    told = [cell.metadata for path in BOOKS for cell in book(path).cells]
    by_hand = [each["mystnb"]["image"]["alt"] for each in told if "mystnb" in each]
    assert len(set(by_hand)) >= 70
    assert all(20 <= len(text.split()) <= 70 for text in by_hand)


@in_a_browser
@of_the_site
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
@of_the_site
def test_the_dark_colours_and_a_fold(open_page, address):
    page = open_page(DESK, "dark")
    page.goto(f"{address}/docs/index.html")
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
@of_the_site
def test_search_finds_a_word_of_the_field(open_page, address):
    page = open_page(DESK)
    page.goto(f"{address}/search.html?q=1F1B")
    page.locator("#search-results li a[href*='03_pipedream_1f1b']").first.wait_for()
    snippet = page.locator("#search-results li:has(a[href*='03_pipedream_1f1b']) .context").first
    assert "1F1B" in snippet.inner_text() and "Light Dark" not in snippet.inner_text()


@in_a_browser
@of_the_site
def test_a_figure_is_enlarged_by_a_tap_and_by_a_key(open_page, address):
    page = open_page(PHONE)
    page.goto(f"{address}/notebooks/06_pipedream_flush.html")
    figure = page.locator(".cell_output img").first
    figure.click()
    large = page.locator("dialog.enlarged img")
    assert large.bounding_box()["width"] > 2 * figure.bounding_box()["width"]
    assert large.get_attribute("alt") == figure.get_attribute("alt")
    page.keyboard.press("Escape")
    large.wait_for(state="detached")
    figure.press("Enter")
    large.wait_for()
