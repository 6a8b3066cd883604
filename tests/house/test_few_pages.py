"""A few of the site's pages, built and used in a browser; `make test-all` does it with all."""

import io
import os
import re
import subprocess
import sys
import tarfile
from importlib.util import find_spec
from pathlib import Path

import pytest

from jupyter_lab import chromium
from pipelab import Costs, make, simulate
from tests.conftest import thorough
from tests.house.test_play import DESK, PACKAGES, PHONE, changed, expect, placed, press, shows
from tests.widgets.test_browser import OUTSIDE, PALE, READABLE

ROOT = Path(__file__).parents[2]
PAGES = "docs/index.md", "docs/play/*.md", "notebooks/06_pipedream_flush.ipynb"
pytestmark = pytest.mark.skipif(
    not all(map(find_spec, PACKAGES)), reason="needs pip install 'pipelab[site]'"
)
in_a_browser = pytest.mark.skipif(chromium() is None, reason="needs Chromium and Playwright")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The pages in place of the whole site; what others would be linked to is missing."""
    folder = tmp_path_factory.mktemp("pages")
    command = [sys.executable, "-m", "sphinx", "-q", "-c", ROOT / "docs", "-d", folder / "doctrees"]
    command += ["-D", f"include_patterns={','.join(PAGES)}", "-D", "suppress_warnings=myst,toc"]
    command += [ROOT, folder / "site"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "site"


def test_a_lectures_page_has_its_formulas_pictures_and_outputs(site):
    page = (site / "notebooks" / "06_pipedream_flush.html").read_text()
    assert "<mfrac>" in page and "$$" not in page
    assert 'class="pipelab-play"' in page and "Check passed" in page
    pictures = re.findall(r'<img [^>]*alt="([^"]*)"', page)
    assert pictures and all(len(words.split()) >= 4 for words in pictures)


NO_PYTHON = "document.documentElement.dataset.python === undefined"
CHOOSE = "(node, level) => { node.value = level; node.dispatchEvent(new Event('change')) }"


@in_a_browser
def test_links_show_their_own_picture_before_there_is_python(open_page, address):
    page = open_page(DESK)
    page.goto(f"{address}/docs/play/explorer.html")
    expect(page.locator(".devices text")).to_have_count(8)
    link = page.get_by_role("link", name="1F1B beside GPipe")
    link.click()
    expect(page.locator(".heads text").first).to_have_text("pipedream_flush")
    page.go_back()
    expect(page.locator(".heads text").first).to_have_text("interleaved")
    page.goto(f"{address}/docs/play/editor.html#cap")
    expect(page.locator("[name=level]")).to_have_value("cap")
    expect(page.locator(".tray .chip")).to_have_count(12)
    page.locator("[name=level]").evaluate(CHOOSE, "split")
    page.wait_for_url("**#split")
    expect(page.locator(".tray .chip")).to_have_count(12)
    page.go_back()
    expect(page.locator("[name=level]")).to_have_value("cap")


@in_a_browser
def test_back_while_a_levels_picture_is_on_its_way(open_page, address):
    # Was: the picture came, and with it its level once more.
    page, held = open_page(DESK), []
    level = page.locator("[name=level]")
    page.goto(f"{address}/docs/play/editor.html#cap")
    expect(level).to_have_value("cap")
    page.route("**/first.json", lambda route: held.append(route))
    level.evaluate(CHOOSE, "split")
    page.wait_for_url("**#split")
    page.go_back()
    while len(held) < 2:
        page.wait_for_timeout(10)
    for route in reversed(held):  # that of the level before comes first
        with page.expect_response("**/first.json") as answer:
            route.continue_()
        answer.value.finished()
    page.evaluate("new Promise((done) => setTimeout(done, 50))")
    assert page.url.endswith("#cap")
    expect(level).to_have_value("cap")


@in_a_browser
def test_what_was_not_drawn_is_announced_and_a_wrong_field_is_marked(playing):
    page = playing("docs/play/explorer.html#schedule=gpipe&devices=3&microbatches=5")
    expect(page.locator(".play-note")).to_contain_text("gpipe on 3 devices comes")
    expect(page.locator(".pipelab-explorer .body")).to_be_hidden()
    shows(page, "makespan", "21")
    field, body = page.locator("[name=forward]"), page.locator(".pipelab-explorer .body")
    field.fill("slow")
    field.press("Enter")
    expect(field).to_have_attribute("aria-invalid", "true")
    expect(body).to_have_class("body old")
    shows(page, "makespan", "21")
    field.fill("2")
    field.press("Enter")
    shows(page, "makespan", "28")
    expect(body).to_have_class("body")
    page.locator("[name=schedule]").select_option("inter_layer")
    makespan = f"{simulate(make('inter_layer', 3, 5), Costs(2)).makespan:g}"
    shows(page, "makespan", makespan)
    page.reload()
    expect(page.locator("[name=schedule]")).to_have_value("inter_layer")
    shows(page, "makespan", makespan)
    assert page.evaluate(NO_PYTHON)


@in_a_browser
def test_every_level_keeps_its_board(playing):
    page = playing("docs/play/editor.html#cap")
    page.locator("[name=help]").focus()
    press(page, "Tab", "F", "0")
    expect(placed(page)).to_have_count(1)
    page.reload()
    expect(placed(page)).to_have_count(1)
    assert page.evaluate(NO_PYTHON)
    page.locator("[name=level]").select_option("gpipe")
    expect(placed(page)).to_have_count(0)
    page.goto(f"{page.url.partition('/docs')[0]}/index.html#cap")
    expect(page.locator("#board .box")).to_have_count(1)
    page.locator("#keys button").first.click()
    expect(page.locator("#board .box")).to_have_count(2)
    page.goto(f"{page.url.partition('/index')[0]}/docs/play/editor.html#cap")
    expect(page.locator(".play-note")).to_contain_text("The level The cap that forces 1F1B comes")
    expect(placed(page)).to_have_count(2)


@in_a_browser
@pytest.mark.parametrize("size", [PHONE, *thorough(DESK)], ids=["phone", "desk"])
def test_derivations_go_on_by_keys_without_python(open_page, address, size):
    page = open_page(size, "dark")
    page.emulate_media(reduced_motion="reduce")
    for path, count in (("docs/index.html", 4), ("notebooks/06_pipedream_flush.html", 6)):
        page.goto(f"{address}/{path}")
        found = page.locator(".pipelab-derivation").last
        slider, sentence = found.get_by_label("step", exact=True), found.locator("[aria-live]")
        told = [sentence.text_content()]
        for k in range(1, count):
            slider.press("ArrowRight")
            expect(slider).to_have_value(str(k))
            expect(found.locator(".read")).not_to_have_count(0)
            told.append(sentence.text_content())
        assert len({*told}) == count
        found.get_by_label("back", exact=True).click()
        expect(slider).to_have_value(str(count - 2))
        found.get_by_label("forward", exact=True).press("Home")  # a button has the keys, too
        expect(slider).to_have_value("0")
        found.locator("[data-term]").last.click()
        expect(slider).not_to_have_value("0")
        assert page.evaluate(PALE, READABLE) == []
        assert found.evaluate(OUTSIDE) == 0
        assert page.evaluate("document.documentElement.scrollWidth") <= size["width"]
    assert page.evaluate("document.documentElement.dataset.python") is None
    expect(page.locator("[data-kind=derivation] .play-note")).to_have_count(0)


@in_a_browser
def test_taps_made_while_python_starts_are_kept(open_page, address, with_python, tmp_path):
    page = open_page({"width": 380, "height": 800}, has_touch=True, is_mobile=True)
    page.goto(f"{address}/docs/play/editor.html#first")
    chips = page.locator(".tray .chip")
    expect(chips).to_have_count(4)
    # The chips are where a note at the window's end would be.
    chips.first.evaluate("(node) => node.scrollIntoView({ block: 'end' })")
    for k in (0, 1):
        box = chips.nth(k).bounding_box()
        page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
        expect(page.locator(".play-note")).to_contain_text("Python is starting")
    page.screenshot(path=tmp_path / "starting.png")
    expect(placed(page)).to_have_text(["F0", "F1"])


@in_a_browser
def test_an_answer_without_an_end_is_not_called_starting(open_page, address, with_python, tmp_path):
    page = open_page({"width": 380, "height": 800}, has_touch=True, is_mobile=True)
    changed(page, "play.js", "LONG = 5000", "LONG = 500")
    page.goto(f"{address}/notebooks/06_pipedream_flush.html")
    cell, other = (page.locator(f".cell:has([data-name='{name}'])") for name in ("06-2", "06-a"))
    cell.locator("textarea").fill("while True:\n    pass\nNone")
    cell.locator(".check").tap()
    expect(cell.locator(".said")).to_contain_text("Python is starting")
    expect(cell.locator(".said")).to_contain_text(
        "This still runs. If a loop has no end, press Stop"
    )
    other.locator(".check").tap()
    expect(other.locator(".said")).to_contain_text("something else on this page, which still runs")
    page.screenshot(path=tmp_path / "endless.png")
    cell.get_by_role("button", name="Stop").tap()
    for one in (cell, other):
        expect(one.locator(".said")).to_have_text("Stopped.")

    # Another Python answers.
    for guess, said in ((20, "You said 20, it is 21"), (21, "Right: 21.")):
        other.locator("textarea").fill(f'my_guess = {guess}\nteach.guess("06-a", my_guess)')
        other.locator("textarea").press("Control+Enter")
        expect(other.locator(".said")).to_contain_text(said)

    # A table in what a check says stays whole: it scrolls.
    table = ">0F0< " + " ".join(f"0F{k}" for k in range(1, 30))
    cell.locator("textarea").fill(
        f"class No:\n    passed = False\n    def __repr__(self):"
        f"\n        return 'deadlock: wait\\n{table}\\n1F0 .'\nNo()"
    )
    cell.locator(".check").tap()
    found = cell.locator(".said .unwrapped")
    expect(found).to_have_text(re.compile("^>0F0< .*29\\n1F0 .$"))
    assert found.evaluate("(node) => node.scrollWidth > node.clientWidth && node.clientHeight < 60")
    page.screenshot(path=tmp_path / "table.png")


@in_a_browser
def test_a_page_without_scripts_has_a_picture_and_a_sentence(open_page, address):
    page = open_page(DESK, java_script_enabled=False)
    page.goto(f"{address}/notebooks/06_pipedream_flush.html")
    expect(page.locator(".pipelab-play img").first).to_be_visible()
    expect(page.locator(".pipelab-play p").first).to_contain_text("With JavaScript")
    explorer = page.locator("[data-kind=explorer] img")
    assert "pipedream_flush, simulated: 4 devices" in explorer.get_attribute("alt")


def test_pyodide_is_the_pinned_one(tmp_path, monkeypatch):
    import browser

    def packed(command, **_):
        place = Path(command[-1]) / f"pyodide-{browser.VERSION}.tgz"
        with tarfile.open(place, "w:gz") as archive:
            for name in browser.FILES:
                archive.addfile(tarfile.TarInfo(f"package/{name}"), io.BytesIO())
        return browser.subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(browser, "ROOT", tmp_path)
    monkeypatch.setattr(browser.shutil, "which", lambda name: name)
    monkeypatch.setattr(browser.subprocess, "run", packed)
    with pytest.raises(ValueError, match="has the integrity"):
        browser.pyodide.__wrapped__()
    monkeypatch.setattr(browser.shutil, "which", lambda name: None)
    assert browser.pyodide.__wrapped__() is None
