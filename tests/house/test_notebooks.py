"""The stored lectures' hygiene."""

import re
from itertools import pairwise

import pytest

import draw
from tests.house.books import BOOKS, FOLDER, LECTURES, book, cells, text_of

PICTURE = re.compile(r"!\[([^\]]*)\]\(\.\./images/([^)]*)\)")
WIDGET = "application/vnd.jupyter.widget-view+json"
TAGS = {"nbval-ignore-output", "exercise"}
PARTS = ("After this you can", "Exercises", "Takeaways", "Quiz", "Further reading")
by_name = pytest.mark.parametrize("path", BOOKS, ids=lambda p: p.stem)


def test_there_are_lectures():
    assert [*LECTURES] == [f"{n:02}" for n in range(18)]
    assert [p.stem for p in BOOKS[18:]] == ["90_design_your_own"]


@by_name
def test_outputs_are_from_one_run_from_top_to_bottom_without_errors(path):
    code = cells(path, "code")
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1))
    outputs = [output for c in code for output in c.outputs]
    assert outputs and not any(o.output_type == "error" for o in outputs)
    assert not any(o.output_type == "stream" and o.name == "stderr" for o in outputs)
    shown = (o.get("data", {}).get("text/plain", "") + o.get("text", "") for o in outputs)
    assert "Check passed" in "".join(shown)


@by_name
def test_tags_kernel_and_size(path):
    assert book(path).metadata.kernelspec.name == "python3"
    assert "sanitize" not in book(path).metadata
    assert path.stat().st_size < 1_500_000
    for cell in cells(path, "code"):
        tags = set(cell.metadata.get("tags", []))
        assert tags <= TAGS
        assert "clear_output" not in cell.source
        lines = cell.source.splitlines()
        assert len(lines) <= 20
        assert max(map(len, lines)) <= 92
    assert len(PICTURE.sub("", text_of(path)).split()) <= 3000


@by_name
def test_a_widget_comes_after_a_static_figure_and_a_line_of_words(path):
    tasks = {b.id for a, b in pairwise(book(path).cells) if "in the editor.**" in a.source}
    for before, cell in pairwise([None, *cells(path, "code")]):
        if not has(cell, WIDGET):
            continue
        shown = cell.outputs[0].data["text/plain"]
        assert re.match("Derivation: |Explorer of|Editor of|<Steps: ", shown)
        if shown.startswith("Derivation"):  # brings its words and its figure
            assert has(cell, "image/png")
            continue
        if not (shown.startswith("Editor") and (has(before, WIDGET) or cell.id in tasks)):
            assert has(before, "image/png")
            assert any(o.output_type == "stream" for o in before.outputs)


def has(cell, mime):
    return any(mime in output.get("data", {}) for output in cell.outputs)


@by_name
def test_the_skeleton_and_the_links(path):
    text = text_of(path)
    for part in PARTS if path in LECTURES.values() else ():
        assert f"**{part}**" in text or f"## {part}" in text, part
    for link in re.findall(r"\]\(([^)]+\.ipynb)\)", text):
        assert (FOLDER / link).exists(), link


def test_every_picture_is_used_with_its_words():
    used = {name: alt for path in BOOKS for alt, name in PICTURE.findall(text_of(path))}
    assert used == {
        name: alt for name in draw.PICTURES if (alt := draw.alt(name)) and name != "overview.png"
    }
    assert "](images/overview.png)" in (FOLDER.parent / "README.md").read_text()


def test_nothing_but_notebooks_the_glossary_and_scripts_in_the_course():
    assert {p for p in FOLDER.iterdir() if p.is_file()} == {*BOOKS, FOLDER / "glossary.md"}
    scripts = FOLDER / "scripts"
    assert {p for p in scripts.iterdir() if p.is_file()} == {*scripts.glob("*.py")}
    lectures = "".join(map(text_of, BOOKS))
    for script in scripts.glob("*.py"):
        assert f"](scripts/{script.name})" in lectures, script
