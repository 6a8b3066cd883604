"""The front page in a browser: a level that is played at once, without Python and with it."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from jupyter_lab import chromium
from pipelab.editor.puzzle import LEVELS, Draft, level_of, prove
from tests.house.test_play import DESK, NO_STORAGE, PACKAGES, PATIENCE, expect, press

ROOT = Path(__file__).parents[2]
SMALL = {"width": 360, "height": 640}  # a small phone
pytestmark = [
    pytest.mark.skipif(not all(map(find_spec, PACKAGES)), reason="needs 'pipelab[site]'"),
    pytest.mark.skipif(chromium() is None, reason="needs Chromium and Playwright"),
]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The page, and what it needs of the rest of the site."""
    import browser
    import front_page

    folder = tmp_path_factory.mktemp("front")
    play = folder / "_static" / "play"
    shutil.copytree(ROOT / "docs" / "static", folder / "_static")
    (folder / "index.html").write_text(front_page.page())
    (folder / "docs").mkdir()
    (folder / "docs" / "index.html").write_text("<title>course</title>")
    browser.library(play / "pipelab.zip")
    if found := browser.pyodide():
        shutil.copytree(found, play / "pyodide")
    return folder


def boxes(page):
    return page.locator("#board .box")


def said(page):
    return page.locator("#said")


PRESS = """(keys) => {
  for (const k of keys) {
    const key = document.querySelectorAll("#keys button")[k];
    key.scrollIntoView({ block: "nearest", behavior: "instant" });
    const { x, y, width, height } = key.getBoundingClientRect();
    const top = document.elementFromPoint(x + width / 2, y + height / 2);
    if (key.disabled || !key.contains(top)) throw new Error(`${key.textContent} is out of reach`);
    key.click();
  }
}"""


def solve(page, name):
    """Place all of a table of par, in the order of time, in one step of the page, by keys that a
    finger or a mouse reaches."""
    table = level_of(name).table()
    task, kinds = table.task, sorted({a.kind for a in table.task.needs})
    keys = []
    for a in sorted(table.placed, key=lambda a: (table.spans[a], a.stage)):
        chunk = task.device(a) * task.virtual + a.stage // task.devices
        keys.append(chunk * len(kinds) + kinds.index(a.kind))
    page.evaluate(PRESS, keys)
    return table


def test_the_first_screen_is_a_puzzle_and_loads_nothing(open_page, address):
    page, asked = open_page(SMALL, has_touch=True, is_mobile=True), []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{address}/index.html")
    words = page.locator("#text").inner_text().split()
    assert len(words) <= 40
    keys = page.locator("#keys button")
    expect(keys).to_have_count(9)
    for k in range(9):
        box = keys.nth(k).bounding_box()
        assert box["y"] + box["height"] <= SMALL["height"] and box["height"] >= 40
    keys.first.tap()
    expect(boxes(page)).to_have_count(1)
    icon = f"{address}/_static/icon.svg"
    assert set(asked) <= {f"{address}/index.html", icon}
    assert page.evaluate("document.documentElement.scrollWidth") <= SMALL["width"]


def test_a_refusal_is_said_where_three_lines_are_kept_and_the_focus_stays(open_page, address):
    page = open_page(SMALL)
    page.goto(f"{address}/index.html")
    keys = page.locator("#keys button")
    top = keys.first.bounding_box()["y"]
    keys.first.focus()
    press(page, "Enter", "Enter", "Enter")
    expect(said(page)).to_have_text(
        "GPU 0 is full: it holds 2 micro-batches. A W there makes room for the next."
    )
    expect(page.locator("#keys span").first).to_have_text("GPU 0\nholds 2 of 2")
    for key, words in (
        (1, "I0 on GPU 0 needs the gradient from GPU 1, which has not done I0 yet."),
        (2, "W0 uses what I0 finds: do I0 on GPU 0 first."),
        (6, "F0 on GPU 2 needs its input from GPU 1, which has not done F0 yet."),
        (7, "GPU 2 has not done F0 yet: forward comes before backward."),
    ):
        keys.nth(key).press("Enter")
        expect(said(page)).to_have_text(words)
        expect(said(page)).to_have_class("refused")
        assert keys.first.bounding_box()["y"] == top
        assert keys.nth(key).evaluate("(node) => node === document.activeElement")


def test_a_level_is_won_shared_kept_and_does_not_end_again(open_page, address, chrome):
    page = open_page(DESK)
    page.add_init_script("navigator.clipboard.writeText = async (text) => { window.copied = text }")
    page.goto(f"{address}/index.html")
    solve(page, "solver")
    expect(said(page)).to_have_text("23. Nobody can do better: a solver has proved it.")
    expect(page.locator("#board")).to_have_class("ending")
    assert page.evaluate("document.activeElement.id") == "ending"
    page.get_by_role("button", name="Share").click()
    title, *rows, link = page.evaluate("copied").split("\n")
    assert title == "pipelab, Beat the solver: 23, par 23"
    assert link == f"{address}/index.html#solver"
    assert [len(row) for row in rows] == [12] * 3 and set("".join(rows)) == set("🟩🟨⬜")
    page.reload()
    expect(boxes(page)).to_have_count(36)
    expect(page.locator("#ending")).to_be_visible()
    expect(page.locator("#board")).not_to_have_class("ending")
    expect(page.locator("#levels [aria-current]")).to_have_text("✓ Beat the solver")
    page.get_by_role("button", name="Next: First steps").click()
    page.wait_for_url("**/index.html#first")
    expect(boxes(page)).to_have_count(0)
    page.locator("#keys button").first.click()
    page.go_back()
    expect(boxes(page)).to_have_count(36)
    page.go_forward()
    expect(boxes(page)).to_have_count(1)


@pytest.mark.parametrize("name", LEVELS)
def test_every_level_can_be_won_with_its_buttons(open_page, address, name):
    page = open_page(SMALL)
    page.goto(f"{address}/index.html#{name}")
    table = solve(page, name)
    expect(boxes(page)).to_have_count(table.size)
    expect(said(page)).to_contain_text("Nobody can do better")


def test_a_table_that_takes_longer_says_how_much_less_is_possible(open_page, address):
    page, keys = open_page(DESK), []
    page.goto(f"{address}/index.html")
    done = Draft.of(level_of("solver").task)
    while not done.whole:  # what could start first does
        action = min(done.ready(), key=lambda a: (done.put(a).spans[a], a))
        done = done.place(action)
        keys.append(3 * action.stage + "FIW".index(action.kind.name))
    page.evaluate(PRESS, keys)
    assert done.timeline.makespan == 25
    expect(said(page)).to_have_text("25. Two less are possible.")
    expect(page.locator("#ending")).to_be_hidden()
    page.get_by_role("button", name="Undo").click()
    expect(boxes(page)).to_have_count(35)


def test_mid_row_by_keys_and_removal(open_page, address):
    page = open_page(DESK)
    page.goto(f"{address}/index.html#gpipe")
    keys, board = page.locator("#keys button"), page.locator("#board")
    for key in (0, 2, 4, 5):  # F0 through all three, and B0 back on the last
        keys.nth(key).click()
    board.focus()
    press(page, "ArrowDown", "ArrowLeft")  # there is nothing further left
    expect(said(page)).to_contain_text("GPU 1 is idle from 0 to 1.")
    keys.nth(0).click()  # another GPU's: at the end of its row
    expect(boxes(page)).to_have_count(5)
    board.focus()
    press(page, "ArrowDown", "ArrowLeft")
    keys.nth(2).click()
    expect(said(page)).to_have_text(
        "F1 comes too late for this gap: it waits for F1 on GPU 0, which ends at 2."
    )
    press(page, "Escape")
    board.focus()
    press(page, "ArrowRight")
    expect(said(page)).to_contain_text("F0 on GPU 0, from 0 to 1.")
    press(page, "Delete")
    expect(boxes(page)).to_have_count(1)
    expect(said(page)).to_have_text("F0 is gone, and 3 more that cannot be without it.")
    press(page, "Control+z")
    expect(boxes(page)).to_have_count(5)


def test_nothing_stored_and_an_unknown_level(open_page, address):
    page = open_page(SMALL)
    page.add_init_script(NO_STORAGE)
    page.goto(f"{address}/index.html#nonsense")
    expect(said(page)).to_have_text("There is no level “nonsense”: this is Beat the solver.")
    page.locator("#keys button").first.click()
    expect(boxes(page)).to_have_count(1)


def test_the_coach_earns_no_star_and_the_proof_is_pythons(playing):
    page = playing("index.html")
    page.locator("#keys button").first.click()
    page.get_by_role("button", name="Coach: one move").click()
    expect(said(page)).to_contain_text("Python is starting")
    expect(boxes(page)).to_have_count(2, timeout=2 * PATIENCE)
    expect(said(page)).to_contain_text("23 can still be reached")
    page.get_by_role("button", name="Finish it for me").click()
    expect(boxes(page)).to_have_count(36)
    expect(page.locator("#levels [aria-current]")).to_have_text("○ Beat the solver")
    page.get_by_role("button", name="Show me the proof").click()
    level = level_of("solver")
    expect(said(page)).to_have_text(prove(level.task, level.par).replace("Device", "GPU"))
    page.reload()
    page.get_by_role("button", name="Undo").wait_for()
    expect(said(page)).to_contain_text("The coach helped.")
