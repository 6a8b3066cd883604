"""The stored lectures' hygiene."""

import re
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest

import draw

FOLDER = Path(__file__).parents[2] / "notebooks"
BOOKS = sorted(FOLDER.glob("*.ipynb"))
PICTURE = re.compile(r"!\[([^\]]*)\]\(\.\./images/([^)]*)\)")
WIDGET = "application/vnd.jupyter.widget-view+json"
TAGS = {"nbval-ignore-output", "exercise"}
LECTURES = [p for p in BOOKS if p.stem < "90"]  # the others are to play with
by_name = pytest.mark.parametrize("path", BOOKS, ids=lambda p: p.stem)
by_lecture = pytest.mark.parametrize("path", LECTURES, ids=lambda p: p.stem)


def cells(path, kind):
    return [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == kind]


def tags(cell):
    return set(cell.metadata.get("tags", []))


PARTS = ("After this you can", "Exercises", "Takeaways", "Quiz", "Further reading")


def test_there_are_lectures():
    assert [p.stem for p in BOOKS] == [
        "00_start_here",
        "01_inter_layer",
        "02_gpipe",
        "03_pipedream_1f1b",
        "04_work_partitioning",
        "05_pipedream_2bw",
        "06_pipedream_flush",
        "07_interleaved",
        "08_jax_pipelines",
        "09_pipeshard_manual",
        "10_pipeshard_auto",
        "11_sharding_and_pmap",
        "12_zero_bubble",
        "13_how_good_can_it_be",
        "14_in_practice",
        "15_a_real_script",
        "16_after_zero_bubbles",
        "17_memory_in_a_v",
        "90_design_your_own",
    ]


@by_name
def test_outputs_are_from_one_run_from_top_to_bottom(path):
    code = cells(path, "code")
    assert [c.execution_count for c in code] == list(range(1, len(code) + 1))
    assert any(c.outputs for c in code)


@by_name
def test_no_cell_ends_in_an_error_or_writes_to_stderr(path):
    for cell in cells(path, "code"):
        assert not any(o.output_type == "error" for o in cell.outputs), cell.source
        assert not any(o.output_type == "stream" and o.name == "stderr" for o in cell.outputs), (
            cell.source
        )


@by_name
def test_tags_kernel_and_size(path):
    book = nbformat.read(path, as_version=4)
    assert book.metadata.kernelspec.name == "python3"
    assert path.stat().st_size < 1_500_000
    for cell in cells(path, "code"):
        assert tags(cell) <= TAGS
        assert "clear_output" not in cell.source
        lines = cell.source.splitlines()
        assert len(lines) <= 20
        assert max(map(len, lines)) <= 92
    prose = sum(len(PICTURE.sub("", c.source).split()) for c in cells(path, "markdown"))
    assert prose <= 3000
    assert "sanitize" not in book.metadata


@by_name
def test_a_widget_comes_after_a_static_figure_and_a_line_of_words(path):
    every = nbformat.read(path, as_version=4).cells
    tasks = {b.id for a, b in pairwise(every) if "in the editor.**" in a.source}
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


@by_lecture
def test_the_skeleton(path):
    text = "\n".join(c.source for c in cells(path, "markdown"))
    for part in PARTS:
        assert f"**{part}**" in text or f"## {part}" in text, part


@by_name
def test_the_links_and_a_verdict(path):
    text = "\n".join(c.source for c in cells(path, "markdown"))
    for link in re.findall(r"\]\(([^)]+\.ipynb)\)", text):
        assert (FOLDER / link).exists(), link
    shown = (
        o.get("data", {}).get("text/plain", "") + o.get("text", "")
        for c in cells(path, "code")
        for o in c.outputs
    )
    assert "Check passed" in "".join(shown)


def test_every_picture_is_used_with_its_words():
    pages = [c.source for path in BOOKS for c in cells(path, "markdown")]
    used = {name: alt for page in pages for alt, name in PICTURE.findall(page)}
    assert used == {
        name: alt for name in draw.PICTURES if (alt := draw.alt(name)) and name != "overview.png"
    }
    assert "](images/overview.png)" in (FOLDER.parent / "README.md").read_text()


def test_nothing_but_notebooks_the_glossary_and_scripts_in_the_course():
    assert {p for p in FOLDER.iterdir() if p.is_file()} == {*BOOKS, FOLDER / "glossary.md"}
    scripts = FOLDER / "scripts"
    assert {p for p in scripts.iterdir() if p.is_file()} == {*scripts.glob("*.py")}
    lectures = "".join(c.source for path in BOOKS for c in cells(path, "markdown"))
    for script in scripts.glob("*.py"):
        assert f"](scripts/{script.name})" in lectures, script
