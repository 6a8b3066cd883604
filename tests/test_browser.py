"""The explorer in JupyterLab in a real browser; skipped where there is no Chromium."""

import re
import shutil
from pathlib import Path

import nbformat
import pytest

from jupyter_lab import (
    browser,
    chromium,
    lab,
    open_notebook,
    run_cells,
    set_theme,
    write_notebook,
)

pytestmark = pytest.mark.skipif(chromium() is None, reason="needs Chromium and Playwright")

LECTURES = Path(__file__).parent.parent / "notebooks"
CELL = """from pipelab.widgets import Explorer
explorer = Explorer('gpipe', devices=4, microbatches=8)
explorer"""
READABLE = 4.5  # contrast of small text, after the Web Content Accessibility Guidelines

# Text of the widget whose contrast with what is behind it is below the least; its colour may let
# the background through.
PALE = """(least) => {
  const parse = (text) => {
    const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number);
    return [r, g, b, a];
  };
  const linear = (x) => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4;
  const luminance = ([r, g, b]) =>
    0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const colour = parse(getComputedStyle(node).backgroundColor);
      if (colour[3] === 1) return colour;
    }
    return [255, 255, 255, 1];
  };
  const contrast = (node) => {
    const style = getComputedStyle(node), paper = behind(node);
    const ink = parse(node instanceof SVGElement ? style.fill : style.color);
    const seen = paper.map((p, k) => ink[k] * ink[3] + p * (1 - ink[3]));
    const [low, high] = [luminance(seen), luminance(paper)].sort((a, b) => a - b);
    return (high + 0.05) / (low + 0.05);
  };
  const text = (node) => node.closest("label:has(:disabled)") ? "" : node.textContent || node.value;
  const forms = "span, select, input, button, summary, legend";
  const texts = `${forms}, td, th, dd, dt, .error, .frame text, .peaks text`;
  return [...document.querySelectorAll(`.pipelab-explorer :is(${texts})`)]
    .filter((node) => node.getClientRects().length && text(node))
    .map((node) => [text(node), contrast(node)]).filter(([, found]) => found < least);
}"""

# How many nodes stand out of the widget on the right.
OUTSIDE = """(root) => {
  const right = root.getBoundingClientRect().right;
  const outside = (node) => node.getBoundingClientRect().right > right + 1;
  return [...root.querySelectorAll("*")].filter(outside).length;
}"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lab")


@pytest.fixture(scope="module")
def address(folder):
    with lab(folder) as address:
        yield address


@pytest.fixture(scope="module")
def chrome():
    with browser() as chrome:
        yield chrome


@pytest.fixture
def new_page(chrome):
    """Open pages that must not complain; they close with the test."""
    complaints, pages = [], []

    def open_page():
        page = chrome.new_page(viewport={"width": 1400, "height": 1100})
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "console",
            lambda message: complaints.append(message.text) if message.type == "error" else None,
        )
        pages.append(page)
        return page

    yield open_page
    for page in pages:
        page.close()
    assert complaints == []


@pytest.fixture
def page(folder, address, new_page):
    """A notebook whose explorer has run."""
    write_notebook(folder / "explorer.ipynb", [CELL, "explorer.set(microbatches=12)"])
    page = new_page()
    open_notebook(page, address, "explorer.ipynb")
    run_cells(page, 1)
    return page


def measure(page, name):
    """A number of the table."""
    return (
        page.locator(".measures tr", has=page.locator("th", has_text=re.compile(f"^{name}$")))
        .locator("td")
        .first.inner_text()
    )


def shows(page, name, value):
    """Wait until the table shows a number."""
    page.wait_for_function(
        """([name, value]) => [...document.querySelectorAll(".measures tr")].some(
             ({ cells }) => cells[0].textContent === name && cells[1].textContent === value)""",
        arg=[name, value],
        timeout=10_000,
    )


def forwards(page):
    return page.locator("svg path.boxes").first.get_attribute("d")


def change(page, name, value):
    """Type into a field."""
    page.locator(f".pipelab-explorer [name={name}]").fill(value)
    page.keyboard.press("Tab")


def test_controls_by_keyboard_and_from_python(page, tmp_path):
    boxes = forwards(page)
    assert boxes.count("M") == 4 * 8 and measure(page, "makespan") == "33"
    page.get_by_label("micro-batches m", exact=True).focus()
    page.keyboard.press("ArrowRight")
    shows(page, "makespan", "36")
    assert (
        forwards(page).count("M") == 4 * 9
        and page.locator("[name=microbatches]").input_value() == "9"
    )
    page.get_by_label("devices p", exact=True).focus()
    page.keyboard.press("ArrowRight")
    shows(page, "makespan", "39")
    assert page.locator("svg .devices text").count() == 5
    page.get_by_label("input gradient").focus()
    page.keyboard.press("ArrowUp")
    shows(page, "makespan", "42.25")

    picture = page.locator("svg .lanes").inner_html()
    change(page, "devices", "0")
    page.locator(".error", has_text="devices=0: give a whole number of at least 1").wait_for()
    assert page.locator("svg .lanes").inner_html() == picture
    page.locator(".pipelab-explorer").screenshot(path=tmp_path / "error.png")
    change(page, "devices", "4")
    shows(page, "makespan", "39")
    assert page.locator(".error").inner_text() == ""

    page.locator("[name=schedule]").select_option(
        "interleaved"
    )  # where one chunk would be plain 1F1B
    page.wait_for_function(
        "document.querySelector('.legend').textContent.includes('later of 2 chunks')"
    )
    assert page.locator("[name=virtual]").input_value() == "2"
    page.locator("[name=compare]").select_option("gpipe")
    page.locator("svg .heads text", has_text="gpipe").wait_for()
    assert page.locator("svg .devices text").count() == 8
    assert (
        measure(page, "ideal")
        == page.locator(".measures td", has_text=re.compile("^29.25$")).last.inner_text()
        == "29.25"
    )

    page.locator(".jp-CodeCell .jp-InputArea").nth(1).click()
    page.keyboard.press("Shift+Enter")  # explorer.set(microbatches=12)
    page.wait_for_function("document.querySelector('[name=microbatches]').value === '12'")
    assert page.get_by_label("micro-batches m", exact=True).input_value() == "12"


def test_pointing_at_actions_by_mouse_and_keys(page, tmp_path):
    about, svg = page.locator(".about"), page.locator(".pipelab-explorer svg")
    area = svg.bounding_box()
    first = page.locator("svg .numbers text").first.bounding_box()  # 0F0
    page.mouse.move(first["x"] + 3, first["y"] + 5)
    about.locator("dt", has_text="0F0").wait_for()
    text = about.inner_text()
    assert (
        "forward of micro-batch 0, stage 0, device 0: from 0 to 1, reads weight version 0" in text
    )
    assert "nothing: it starts at once" in text and "1F0 and 0F1" in text
    page.mouse.move(area["x"] + area["width"] * 0.4, first["y"] + 5)
    about.get_by_text("device 0, from 8 to 17: 0B0 waits for 1B0.").wait_for()

    svg.focus()
    page.keyboard.press("Home")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    assert about.locator("dt").first.inner_text() == "2F1"
    assert (
        "its input from 1F1, here at 3; 2F0 before it in its row, done at 3. "
        "The last: 1F1 and 2F0, both"
    ) in about.inner_text()
    assert (
        page.locator("svg .selection rect.needed").count()
        == page.locator("svg .selection rect.needing").count()
        == 2
    )
    page.locator(".pipelab-explorer").screenshot(path=tmp_path / "selected.png")
    page.keyboard.press("End")
    assert about.locator("dt").first.inner_text() == "2U0"
    assert "makes weight version 1" in about.inner_text()
    page.keyboard.press("b")  # in command mode this would add a cell
    assert page.locator(".jp-CodeCell").count() == 2
    page.keyboard.press("Escape")
    assert page.locator("svg .selection > *").count() == 0


def test_playing_lights_up_what_runs(page):
    svg, play, running = (
        page.locator(".pipelab-explorer svg"),
        page.locator(".play"),
        page.locator("svg .running rect"),
    )
    play.click()
    page.wait_for_function("document.querySelectorAll('svg .running rect').length > 2")
    assert play.inner_text() == "Pause" and running.count() <= 4
    play.click()
    assert play.inner_text() == "Play"
    at = page.locator(".clock").inner_text()
    assert re.fullmatch(r"t = [\d.]+", at)
    svg.focus()
    page.keyboard.press("Space")
    page.wait_for_function("(at) => document.querySelector('.clock').textContent !== at", arg=at)
    page.keyboard.press("Space")
    assert play.inner_text() == "Play"
    page.emulate_media(reduced_motion="reduce")
    page.keyboard.press("Space")
    page.wait_for_function(
        "Number.isInteger(Number(document.querySelector('.clock').textContent.slice(4)))"
    )  # a start
    page.keyboard.press("Space")


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_text_is_legible_in_both_themes(theme, folder, address, new_page, tmp_path):
    set_theme(folder, theme)
    write_notebook(
        folder / "theme.ipynb", [CELL.replace("8)", "8, virtual=2, compare='interleaved')")]
    )
    page = new_page()
    open_notebook(page, address, "theme.ipynb")
    run_cells(page, 1)
    explorer = page.locator(".pipelab-explorer")
    change(page, "forward", "slow")
    page.locator(".error", has_text="forward='slow'").wait_for()
    for width in (1400, 820):
        page.set_viewport_size({"width": width, "height": 1100})
        page.wait_for_function(
            """() => {
              const picture = document.querySelector(".picture");
              return picture.clientWidth == picture.querySelector("svg").clientWidth;
            }"""
        )
        page.locator(".pipelab-explorer svg").focus()
        page.keyboard.press("ArrowRight")
        explorer.screenshot(path=tmp_path / f"{width}.png")
        assert page.evaluate(PALE, READABLE) == []
        assert explorer.evaluate(OUTSIDE) == 0


def trust(notebook, folder):
    """Sign a notebook for the Lab of the folder, as its reader would with `jupyter trust`."""
    from nbformat.sign import NotebookNotary

    notary = NotebookNotary(data_dir=str(folder / ".jupyter" / "jupyter_data_dir"))
    notary.sign(notebook)
    notary.store.close()


def executed(source):
    """A notebook of one cell, executed without a browser."""
    from nbclient import NotebookClient

    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)], metadata=kernel)
    NotebookClient(notebook, store_widget_state=True).execute()
    return notebook


def test_a_saved_explorer_shows_without_running(folder, address, new_page, tmp_path):
    notebook = executed(CELL)
    nbformat.write(notebook, folder / "saved.ipynb")
    page = new_page()
    page.goto(address("doc/tree/saved.ipynb"))  # nobody has trusted it: words
    page.get_by_text(
        "Explorer of gpipe, p=4, m=8: makespan 33; run this cell to change it"
    ).wait_for(timeout=30_000)
    trust(notebook, folder)
    page.goto(address("doc/tree/saved.ipynb"))
    page.wait_for_selector(".pipelab-explorer path.boxes", timeout=30_000)
    assert measure(page, "makespan") == "33" and forwards(page).count("M") == 32
    assert (
        page.locator(".saved").is_visible()
        and not page.locator(".pipelab-explorer form").is_visible()
    )
    page.locator(".pipelab-explorer svg").focus()
    page.keyboard.press("ArrowRight")
    assert page.locator(".about dt").first.inner_text() == "0F0"
    page.locator(".pipelab-explorer").screenshot(path=tmp_path / "saved.png")


def test_the_stored_lecture_shows_its_explorer_without_running(folder, address, new_page):
    notebook = nbformat.read(LECTURES / "02_gpipe.ipynb", as_version=4)
    assert "pipelab.widgets.explorer.Explorer" in str(notebook.metadata.widgets), (
        "run make notebooks"
    )
    trust(notebook, folder)
    (folder / "notebooks").mkdir()
    nbformat.write(notebook, folder / "notebooks" / "lecture.ipynb")
    shutil.copytree(LECTURES.parent / "images", folder / "images")
    page = new_page()
    page.goto(address("doc/tree/notebooks/lecture.ipynb"))
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=30_000)
    for _ in range(60):
        if page.locator(".pipelab-explorer path.boxes").count():
            break
        page.mouse.move(600, 500)
        page.mouse.wheel(0, 800)
        page.wait_for_timeout(100)
    assert measure(page, "makespan") == "33"
    loaded = "(picture) => picture.complete && picture.naturalWidth > 0"
    pictures = page.locator(".jp-MarkdownOutput img").all()
    assert pictures and all(picture.evaluate(loaded) for picture in pictures)


# The picture has been drawn in the width that it has.
FITS = """() => {
  const scroller = document.querySelector(".pipelab-editor .scroller");
  const svg = scroller.querySelector("svg"), wide = +svg.getAttribute("width");
  return wide >= scroller.clientWidth - 1 && document.querySelector(".pipelab-editor")
    .getBoundingClientRect().right <= innerWidth + 1;
}"""


def press(page, *keys):
    for key in keys:
        page.keyboard.press(key)


def says(page, text):
    page.locator(".said", has_text=text).wait_for(timeout=10_000)


def boxes(page, picture=".picture"):
    return page.locator(f".pipelab-editor {picture} svg .lanes g.action")


def test_a_level_is_solved_run_and_measured_by_keyboard_alone(folder, address, new_page, tmp_path):
    set_theme(folder, "JupyterLab Dark")
    source = "from pipelab.widgets import Editor\nEditor('first')"
    write_notebook(folder / "editor.ipynb", [source])
    page = new_page()
    open_notebook(page, address, "editor.ipynb")
    run_cells(page, 1, ".pipelab-editor .cursor rect")
    page.locator("[name=help]").focus()
    press(page, "Tab")  # to the table
    press(page, "f", "0", "F", "1", "ArrowDown", "B", "0")
    says(page, "1B0 needs 1F0 first, which is not placed yet")
    press(page, "F", "0", "B", "0", "ArrowUp", "Backspace", "F", "Enter")
    press(page, "B", "Enter", "ArrowDown", "f", "1", "b", "1", "ArrowUp", "b", "1")
    says(page, "Par: 9. This is 1F1B (PipeDream-Flush) or eager 1F1B.")
    assert boxes(page).count() == 8
    # The idle cell of device 0 says why; typing into it is refused with the time.
    press(page, "Home", "ArrowRight", "ArrowRight")
    about = page.locator(".about-cell")
    assert about.inner_text() == (
        "device 0 is idle from 2 to 4: 0B0 waits for 1B0, which runs until 4."
    )
    page.locator(".pipelab-editor").screenshot(path=tmp_path / "solved.png")

    while "Run it" not in page.evaluate("document.activeElement.textContent"):
        press(page, "Tab")
    press(page, "Enter")
    page.locator(".verdict", has_text="Check passed; paced").wait_for(timeout=30_000)
    assert boxes(page, ".trial").count() > 2 * 8  # planned and measured; with updates
    page.locator(".pipelab-editor").screenshot(path=tmp_path / "run.png")
    press(page, "Tab", "Tab", "Space", "Tab", "Space")
    page.locator(".heads text", has_text="par: 9").wait_for()
    assert page.locator("[name=critical]").is_checked() and boxes(page).count() == 2 * 8
    for width in (1400, 700):
        page.set_viewport_size({"width": width, "height": 1100})
        page.wait_for_function(FITS)
        assert page.evaluate(PALE, READABLE) == []
    page.locator(".pipelab-editor").screenshot(path=tmp_path / "narrow.png")

    # The next level, by its button; with a mouse, chips do what keys do.
    page.get_by_role("button", name="Next level").press("Enter")
    says(page, "")
    page.locator(".text", has_text="Three devices, four micro-batches").wait_for()
    page.locator(".tray .chip", has_text="F2").click()
    page.wait_for_function("document.querySelectorAll('.picture .lanes g.action').length === 1")
    assert boxes(page).text_content() == "F2"
    page.locator("summary", has_text="Link or file").click()
    assert page.locator("[name=link]").input_value().endswith("#pipelab=level=gpipe&table=0F2~~")
    # The link in the address of a page opens the table in its editor.
    page.evaluate("location.hash = 'pipelab=level=first&table=0F0~1F0'")
    run_cells(page, 1, ".pipelab-editor .cursor rect")
    page.wait_for_function("document.querySelectorAll('.picture .lanes g.action').length === 2")


def test_the_stored_editor_shows_without_running(folder, address, new_page):
    set_theme(folder, "JupyterLab Light")
    notebook = nbformat.read(LECTURES / "90_design_your_own.ipynb", as_version=4)
    shown = "application/vnd.jupyter.widget-view+json"
    notebook.cells = [
        cell
        for cell in notebook.cells
        if any(shown in o.get("data", {}) for o in cell.get("outputs", []))
    ][:1]
    trust(notebook, folder)
    nbformat.write(notebook, folder / "design.ipynb")
    page = new_page()
    page.goto(address("doc/tree/design.ipynb"))
    editor = page.locator(".pipelab-editor")
    editor.locator(".saved").wait_for(timeout=30_000)
    assert not editor.locator(".tray").is_visible()
    editor.locator("svg").first.focus()
    press(page, "ArrowDown")
    assert "device 1 is free from 0 on" in editor.locator(".about-cell").inner_text()
