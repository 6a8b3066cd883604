"""The explorer in JupyterLab in a real browser; skipped where there is no Chromium."""

import json
import re
import shutil
from contextlib import suppress
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
from pipelab import make
from pipelab.widgets import Editor, Explorer

expect = pytest.importorskip("playwright.sync_api").expect
PATIENCE = 60_000  # milliseconds: on a busy machine what is waited for may come late
expect.set_options(timeout=PATIENCE)

pytestmark = pytest.mark.skipif(chromium() is None, reason="needs Chromium and Playwright")

LECTURES = Path(__file__).parents[2] / "notebooks"
CELL = """from pipelab.widgets import Explorer
explorer = Explorer('gpipe', devices=4, microbatches=8)
explorer"""
DERIVATION = f"""import sys
sys.path.append({str(LECTURES)!r})
from widgets import derivations
derivations.bubble()"""
FIGURE = """%matplotlib inline
from pipelab import make, plot, simulate
ax = plot.timeline(simulate(make("gpipe", 2, 2)))"""
EXPLORER = ".pipelab-explorer:not(.pipelab-editor)"
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
  const drawn = ".frame text, .names text, .peaks text";
  const texts = `${forms}, td, th, dd, dt, p, .formula, .error, ${drawn}`;
  return [...document.querySelectorAll(`.pipelab-explorer :is(${texts})`)]
    .filter((node) => node.getClientRects().length && text(node))
    .map((node) => [text(node), contrast(node)]).filter(([, found]) => found < least);
}"""

# How many nodes stand out of the widget on the right.
OUTSIDE = """(root) => {
  const right = root.getBoundingClientRect().right;
  const scrolls = (node) => node.closest(".scroller svg"); // where it is narrow
  const outside = (node) => !scrolls(node) && node.getBoundingClientRect().right > right + 1;
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
        page.set_default_timeout(PATIENCE)
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


def shows(page, name, *values):
    """Wait until the table shows a number, of every schedule in it."""
    row = page.locator(
        f"{EXPLORER} .measures tr", has=page.locator("th", has_text=re.compile(f"^{name}$"))
    )
    expect(row.locator("td")).to_have_text(values)


def forwards(page):
    return page.locator("svg path.boxes").first.get_attribute("d")


def change(page, name, value):
    """Type into a field."""
    page.locator(f".pipelab-explorer [name={name}]").fill(value)
    page.keyboard.press("Tab")


def test_controls_by_keyboard_and_from_python(page, tmp_path):
    shows(page, "makespan", "33")
    assert forwards(page).count("M") == 4 * 8
    page.get_by_label("micro-batches m", exact=True).press("ArrowRight")
    shows(page, "makespan", "36")
    assert forwards(page).count("M") == 4 * 9
    expect(page.locator("[name=microbatches]")).to_have_value("9")
    page.get_by_label("devices p", exact=True).press("ArrowRight")
    shows(page, "makespan", "39")
    expect(page.locator("svg .devices text")).to_have_count(5)
    page.get_by_label("input gradient").press("ArrowUp")
    shows(page, "makespan", "42.25")

    picture, error = page.locator("svg .lanes").inner_html(), page.locator(".error")
    change(page, "devices", "0")
    expect(error).to_have_text("devices=0: give a whole number of at least 1")
    assert page.locator("svg .lanes").inner_html() == picture
    page.locator(".pipelab-explorer").screenshot(path=tmp_path / "error.png")
    change(page, "devices", "4")
    shows(page, "makespan", "39")
    expect(error).to_have_text("")

    # Where one chunk would be plain 1F1B.
    page.locator("[name=schedule]").select_option("interleaved")
    expect(page.locator(".legend")).to_contain_text("later chunk of 2")
    expect(page.locator("[name=virtual]")).to_have_value("2")
    page.locator("[name=compare]").select_option("gpipe")
    expect(page.locator("svg .heads text")).to_have_text(["interleaved", "gpipe"])
    expect(page.locator("svg .devices text")).to_have_count(8)
    shows(page, "ideal", "29.25", "29.25")

    # A limit where a schedule is made for one.
    memory = page.get_by_label("memory, in micro-batches")
    expect(memory).to_be_disabled()
    page.locator("[name=schedule]").select_option("zb")
    change(page, "memory", "0")
    expect(error).to_contain_text("memory=0.0: zb finds no order for 4 devices; give at least 1")
    change(page, "memory", "1")
    shows(page, "peak in flight", "1 everywhere", "9 everywhere")

    page.locator(".jp-CodeCell .jp-InputArea").nth(1).click()
    page.keyboard.press("Shift+Enter")  # explorer.set(microbatches=12)
    expect(page.locator("[name=microbatches]")).to_have_value("12")
    expect(page.get_by_label("micro-batches m", exact=True)).to_have_value("12")


@pytest.mark.thorough
def test_pointing_at_actions_by_mouse_and_keys(page, tmp_path):
    about, svg = page.locator(".about"), page.locator(".pipelab-explorer svg")
    chosen, others = about.locator("dt").first, svg.locator(".selection rect:not(.chosen)")
    first = svg.locator(".numbers text").first  # of 0F0
    x, y = (float(first.get_attribute(axis)) for axis in "xy")
    svg.hover(position={"x": x, "y": y})
    expect(chosen).to_have_text("0F0")
    expect(about).to_contain_text(
        "forward of micro-batch 0, stage 0, device 0: from 0 to 1, reads weight version 0"
    )
    expect(about).to_contain_text("nothing: it starts at once")
    expect(about).to_contain_text("1F0 and 0F1")
    svg.hover(position={"x": float(svg.get_attribute("width")) * 0.4, "y": y})
    expect(about).to_contain_text("device 0, from 8 to 17: 0B0 waits for 1B0.")

    for key in ("Home", "ArrowDown", "ArrowDown", "ArrowRight"):
        svg.press(key)
    expect(chosen).to_have_text("2F1")
    expect(about).to_contain_text(
        "its input from 1F1, here at 3; 2F0 before it in its row, done at 3. "
        "The last: 1F1 and 2F0, both"
    )
    expect(others).to_have_class(["needed", "needed", "needing", "needing"])
    page.locator(".pipelab-explorer").screenshot(path=tmp_path / "selected.png")
    svg.press("End")
    expect(chosen).to_have_text("2U0")
    expect(about).to_contain_text("makes weight version 1")
    svg.press("b")  # in command mode this would add a cell
    svg.press("Escape")
    expect(svg.locator(".selection > *")).to_have_count(0)
    expect(page.locator(".jp-CodeCell")).to_have_count(2)


# Stop the play when more than two actions run, in one step of the page: it goes on meanwhile.
STOP = """(stop) => {
  const svg = document.querySelector(".pipelab-explorer svg");
  if (svg.querySelectorAll(".running rect").length <= 2) return false;
  if (stop === "key") svg.dispatchEvent(new KeyboardEvent("keydown", { key: " " }));
  else document.querySelector(".play").click();
  return true;
}"""


@pytest.mark.thorough
def test_playing_lights_up_what_runs(page):
    svg, play, clock = (
        page.locator(f".pipelab-explorer {part}") for part in ("svg", ".play", ".clock")
    )
    play.click()
    page.wait_for_function(STOP, arg="key")
    expect(play).to_have_text("Play")
    expect(clock).to_have_text(re.compile(r"^t = [\d.]+$"))
    at, running = clock.text_content(), svg.locator(".running rect").count()
    assert 2 < running <= 4
    svg.press("Space")
    expect(clock).not_to_have_text(at)
    page.wait_for_function(STOP, arg="button")
    expect(play).to_have_text("Play")
    page.emulate_media(reduced_motion="reduce")
    svg.press("Space")
    expect(clock).to_have_text(re.compile(r"^t = \d+$"))  # a start


@pytest.mark.thorough
@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_text_is_legible_in_both_themes(theme, folder, address, new_page, tmp_path):
    set_theme(folder, theme)
    write_notebook(
        folder / "theme.ipynb", [CELL.replace("8)", "8, virtual=2, compare='interleaved')")]
    )
    page = new_page()
    open_notebook(page, address, "theme.ipynb")
    expect(page.locator("body")).to_have_attribute("data-jp-theme-name", theme)
    run_cells(page, 1)
    explorer = page.locator(".pipelab-explorer")
    change(page, "forward", "slow")
    expect(page.locator(".error")).to_contain_text("forward='slow'")
    for width in (1400, 820, 390):
        page.set_viewport_size({"width": width, "height": 1100})
        page.wait_for_function(
            """() => {
              const picture = document.querySelector(".picture");
              return picture.getBoundingClientRect().right <= innerWidth
                && (picture.clientWidth < 560 // where it scrolls
                  || picture.clientWidth === picture.querySelector("svg").clientWidth);
            }"""
        )
        page.locator(".pipelab-explorer svg").press("ArrowRight")
        explorer.screenshot(path=tmp_path / f"{width}.png")
        assert page.evaluate(PALE, READABLE) == []
        assert explorer.evaluate(OUTSIDE) == 0


FILTERS = {"JupyterLab Light": "none", "JupyterLab Dark": "invert(0.93) hue-rotate(180deg)"}


@pytest.mark.thorough  # for `make test`, on a page: test_few_pages
@pytest.mark.parametrize("theme", FILTERS)
def test_a_derivation_goes_on_by_keys_in_any_width(theme, folder, address, new_page, tmp_path):
    set_theme(folder, theme)
    write_notebook(folder / "derivation.ipynb", [DERIVATION, FIGURE])
    page = new_page()
    open_notebook(page, address, "derivation.ipynb")
    run_cells(page, 2, ".pipelab-derivation svg path.boxes")
    figure = page.locator(".jp-RenderedImage img")
    expect(figure).to_have_css("filter", FILTERS[theme])
    page.screenshot(path=tmp_path / "figure.png")
    page.emulate_media(reduced_motion="reduce")
    found = page.locator(".pipelab-derivation")
    slider, sentence = found.get_by_label("step", exact=True), found.locator("[aria-live]")
    for width in (1400, 390):
        page.set_viewport_size({"width": width, "height": 1100})
        slider.press("Home")
        expect(sentence).to_contain_text("Follow the last device")
        expect(found.locator(".read")).to_have_count(0)
        slider.press("ArrowRight")
        expect(sentence).to_contain_text("it waits 3")
        expect(found.locator(".read")).to_have_text("(p − 1) F")
        lit = found.locator("svg .lit.seen")
        expect(lit).to_have_css("opacity", "1")
        expect(lit.locator(".gaps text")).to_have_text("3")
        assert lit.locator("path.boxes").get_attribute("d").count("M") == 3
        found.get_by_label("forward", exact=True).press("End")  # a button has the keys, too
        expect(sentence).to_contain_text("27% of all device time")
        found.get_by_label("back", exact=True).click()
        expect(slider).to_have_value("5")
        assert found.evaluate(OUTSIDE) == 0
        assert page.evaluate(PALE, READABLE) == []
        found.screenshot(path=tmp_path / f"{width}.png")
    found.locator("[data-term=drain]").click()
    expect(slider).to_have_value("3")


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


@pytest.mark.thorough
def test_a_saved_explorer_shows_without_running(folder, address, new_page, tmp_path):
    notebook = executed(CELL)
    nbformat.write(notebook, folder / "saved.ipynb")
    page = new_page()
    page.goto(address("doc/tree/saved.ipynb"))  # nobody has trusted it: words
    page.get_by_text(
        "Explorer of gpipe, p=4, m=8: makespan 33; run this cell to change it"
    ).wait_for()
    trust(notebook, folder)
    page.goto(address("doc/tree/saved.ipynb"))
    shows(page, "makespan", "33")
    assert forwards(page).count("M") == 32
    expect(page.locator(".saved")).to_be_visible()
    expect(page.locator(".pipelab-explorer form")).to_be_hidden()
    page.locator(".pipelab-explorer svg").press("ArrowRight")
    expect(page.locator(".about dt").first).to_have_text("0F0")
    page.locator(".pipelab-explorer").screenshot(path=tmp_path / "saved.png")


@pytest.mark.thorough
def test_a_saved_derivation_is_a_picture_or_goes_on_without_running(folder, address, new_page):
    notebook = executed(DERIVATION)
    nbformat.write(notebook, folder / "derived.ipynb")
    page = new_page()
    page.goto(address("doc/tree/derived.ipynb"))  # nobody has trusted it
    expect(page.locator(".jp-OutputArea img")).to_be_visible()
    trust(notebook, folder)
    page.goto(address("doc/tree/derived.ipynb"))
    slider = page.locator(".pipelab-derivation").get_by_label("step", exact=True)
    slider.press("ArrowRight")
    expect(page.locator(".pipelab-derivation .read")).to_have_text("(p − 1) F")


# Scroll to a widget until it is drawn: not before it is seen, and cells above it grow meanwhile.
DRAWN = """(widget) => {
  const found = document.querySelector(widget);
  found?.scrollIntoView();
  return found?.querySelector("path.boxes");
}"""

# Whether as many pictures are there, and all are loaded.
LOADED = """(count) => {
  const pictures = [...document.querySelectorAll(".jp-MarkdownOutput img")];
  const loaded = (picture) => picture.complete && picture.naturalWidth > 0;
  return count > 0 && pictures.length === count && pictures.every(loaded);
}"""


@pytest.mark.thorough
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
    page.wait_for_function(DRAWN, arg=EXPLORER)
    shows(page, "makespan", "33")
    page.wait_for_function(LOADED, arg=str(notebook.cells).count("](../images/"))


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
    expect(page.locator(".said")).to_have_text(text)


def boxes(page, picture=".picture"):
    return page.locator(f".pipelab-editor {picture} svg .lanes g.action")


@pytest.mark.thorough
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
    expect(boxes(page)).to_have_count(8)
    # The idle cell of device 0 says why; typing into it is refused with the time.
    press(page, "Home", "ArrowRight", "ArrowRight")
    expect(page.locator(".about-cell")).to_have_text(
        "device 0 is idle from 2 to 4: 0B0 waits for 1B0, which runs until 4."
    )
    page.locator(".pipelab-editor").screenshot(path=tmp_path / "solved.png")

    for _ in range(20):
        if "Run it" in page.evaluate("document.activeElement.textContent"):
            break
        press(page, "Tab")
    press(page, "Enter")
    expect(page.locator(".verdict")).to_contain_text("Check passed; paced")
    # Planned and measured, with updates.
    expect(boxes(page, ".trial").nth(2 * 8)).to_be_attached()
    page.locator(".pipelab-editor").screenshot(path=tmp_path / "run.png")
    press(page, "Tab", "Tab", "Space", "Tab", "Space")
    expect(page.locator(".heads text")).to_have_text("par: 9")
    expect(page.locator("[name=critical]")).to_be_checked()
    expect(boxes(page)).to_have_count(2 * 8)
    for width in (1400, 700):
        page.set_viewport_size({"width": width, "height": 1100})
        page.wait_for_function(FITS)
        assert page.evaluate(PALE, READABLE) == []
    page.locator(".pipelab-editor").screenshot(path=tmp_path / "narrow.png")

    # The next level, by its button; with a mouse, chips do what keys do.
    page.get_by_role("button", name="Next level").press("Enter")
    expect(page.locator(".text")).to_contain_text("Three devices, four micro-batches")
    says(page, "")
    page.locator(".tray .chip", has_text="F2").click()
    expect(boxes(page)).to_have_text(["F2"])
    page.locator("summary", has_text="Link or file").click()
    expect(page.locator("[name=link]")).to_have_value(
        re.compile("#pipelab=level=gpipe&table=0F2~~$")
    )
    # The link in the address of a page opens the table in its editor.
    page.evaluate("location.hash = 'pipelab=level=first&table=0F0~1F0'")
    run_cells(page, 1, ".pipelab-editor .cursor rect")
    expect(boxes(page)).to_have_count(2)


@pytest.mark.thorough
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
    editor = page.locator(".pipelab-editor")
    # JupyterLab may draw outputs before it has the stored state: then it takes another look.
    page.goto(address("doc/tree/design.ipynb"))
    with suppress(AssertionError):
        expect(editor.locator(".saved")).to_be_visible(timeout=30_000)
    if not editor.locator(".saved").is_visible():
        page.reload()
    expect(editor.locator(".saved")).to_be_visible()
    expect(editor.locator(".tray")).to_be_hidden()
    editor.locator("svg").first.press("ArrowDown")
    expect(editor.locator(".about-cell")).to_contain_text("device 1 is free from 0 on")


# ---- under a finger: a front end and the state that Python gave it, without a notebook

STILL = """<meta name="viewport" content="width=device-width"><style>%s</style>
<div id="here"></div><script type="module">%s
const state = %s, model = {
  get: (key) => state[key], set() {}, on() {}, off() {}, save_changes() {},
  send: (content) => (window.sent ??= []).push(content),
};
render({ model, el: document.getElementById("here") });
</script>"""
PHONE = {"width": 380, "height": 800}
FINGER = 40  # pixels that are easy to hit

# What is to be touched and is less wide or high than that.
SMALL = """(least) => [...document.querySelectorAll("button, select, input, summary, label.mark")]
  .filter((node) => node.getClientRects().length && node.type !== "checkbox")
  .filter((node) => Math.min(node.offsetHeight, node.offsetWidth) < least)
  .map((node) => `${node.tagName} ${node.name || node.textContent}`)"""


@pytest.fixture
def touched(chrome):
    """Open widgets in a phone's browser."""
    context = chrome.new_context(viewport=PHONE, has_touch=True, is_mobile=True)

    def open_one(widget, names):
        page = context.new_page()
        state = json.dumps({name: getattr(widget, name) for name in names.split()})
        page.set_content(STILL % (widget._css, widget._esm, state))
        page.wait_for_selector(".pipelab-explorer svg .frame path", state="attached")
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        assert page.evaluate(SMALL, FINGER) == []
        return page

    yield open_one
    context.close()


def explored(touched, *arguments, **more):
    return touched(Explorer(*arguments, **more), "choices settings drawing error")


def tap(page, node):
    node.scroll_into_view_if_needed()
    box = node.bounding_box()
    page.touchscreen.tap(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    return box


def stands_beside(page, note, box):
    """Whether a note is close to a box, and in the window."""
    found = note.bounding_box()
    above = box["y"] - found["y"] - found["height"]
    below = found["y"] - box["y"] - box["height"]
    sides = 0 <= found["x"] and found["x"] + found["width"] <= PHONE["width"]
    return sides and 0 <= max(above, below) < 30 and found["y"] + found["height"] <= 800


def test_a_tap_selects_an_action_and_a_tap_elsewhere_lets_go(touched, tmp_path):
    page = explored(touched, "gpipe", devices=4, microbatches=8)
    about, numbers = page.locator(".about"), page.locator("svg .numbers text")
    for i, name in ((2, "0F2"), (16 + 1, "1F1"), (48 + 3, "3F3")):
        box = tap(page, numbers.nth(i))
        expect(about.locator("dt").first).to_have_text(name)
        page.screenshot(path=tmp_path / f"{name}.png")
        assert stands_beside(page, about, box)
    tap(page, page.locator(".clock"))
    expect(about).to_be_hidden()
    tap(page, numbers.nth(1))
    tap(page, page.locator("svg .times text").first)  # in the picture, beside the rows
    expect(about).to_be_hidden()


def test_numbers_are_legible_on_a_phone(touched, tmp_path):
    page = explored(touched, "interleaved", devices=4, microbatches=8, virtual=2, compare="gpipe")
    expect(page.locator("svg .numbers text")).to_have_count(2 * 4 * 8 * 3)
    size = "(nodes) => Math.min(...nodes.map((node) => parseFloat(node.style.fontSize)))"
    assert page.locator("svg .numbers text").evaluate_all(size) >= 9
    scroller = page.locator(".scroller")
    scroller.evaluate("(node) => (node.scrollLeft = 300)")
    expect(page.locator(".names")).to_have_attribute("transform", "translate(300)")
    for key in ("Home", "End"):  # keys bring what they select into sight
        page.locator("svg").press(key)
    expect(page.locator(".about dt").first).to_have_text("4U0")
    chosen = page.locator(".chosen").bounding_box()
    assert 0 < chosen["x"] < PHONE["width"]
    assert stands_beside(page, page.locator(".about"), chosen)
    page.screenshot(path=tmp_path / "phone.png", full_page=True)


def test_the_bound_is_explained_beside_its_number(touched):
    page = explored(touched, "gpipe")
    bound = page.locator(".measures th", has_text="over the bound")
    said = bound.evaluate("(node) => getComputedStyle(node, '::after').content")
    assert "no order of one batch in this memory can beat" in said


def test_what_a_tapped_cell_is_stands_beside_it(touched, tmp_path):
    editor = Editor("cap")
    editor.finish()
    page = touched(editor, "view")
    cells = page.locator(".picture svg g.action rect")
    for i in (0, 1, 12):
        box = tap(page, cells.nth(i))
        expect(page.locator(".about-cell.near")).to_contain_text("on device")
        page.screenshot(path=tmp_path / f"{i}.png")
        assert stands_beside(page, page.locator(".about-cell"), box)
    page.locator("svg").first.press("End")
    expect(page.locator(".about-cell.near")).to_have_count(0)


def test_a_finished_table_over_its_cap_keeps_its_colours(touched, tmp_path):
    editor = Editor("cap", help="free")
    for row in make("gpipe", 4, 6).rows:
        for action in row[:-1]:
            editor.place(str(action))
    page = touched(editor, "view")
    page.screenshot(path=tmp_path / "full.png", full_page=True)
    expect(page.locator(".picture svg g.action")).to_have_count(48)
    expect(page.locator(".picture svg g.over")).to_have_count(8)
    expect(page.locator(".picture svg g.stuck")).to_have_count(0)
