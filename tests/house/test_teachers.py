"""What docs/teachers.md says of the lectures, and what a class is handed."""

import re
import subprocess
import sys
from pathlib import Path

import teach
from pipelab import make
from pipelab.editor.puzzle import LEVELS
from tests.house.books import BOOKS, FOLDER, cells, text_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "teachers.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("|") and ".ipynb" in line]


def named(row):
    """The texts of the lectures that a row of a table links."""
    return [text_of(FOLDER / name) for name in re.findall(r"notebooks/(\w+\.ipynb)", row)]


def test_minutes_are_those_of_the_lectures_heads():
    told = [(row, re.match(r"\| \d+ (?:of|\|) (\d+) \|", row)) for row in ROWS]
    assert sum(found is not None for _, found in told) == 5 + 15  # a day's, and a term's
    for row, minutes in told:
        heads = (re.search(r"^\*(\d+) minutes", text, re.M) for text in named(row))
        assert not minutes or int(minutes[1]) == sum(int(head[1]) for head in heads if head), row


def test_plans_fill_their_time():
    two_hours = PAGE.split("## Two hours")[1].split("## A day")[0]
    assert sum(map(int, re.findall(r"^\| (\d+) \|", two_hours, re.M))) == 120
    day = PAGE.split("## A day")[1].split("## A term")[0]
    assert sum(map(int, re.findall(r"^\| (\d+) ", day, re.M))) == 360


def test_sections_that_are_shown_or_left_out_are_in_their_lecture():
    found = 0
    for row in ROWS:
        titles = re.findall(r"\*([A-Z][^*]+)\*", row)
        heads = re.findall(r"^##+ (.*)", "\n".join(named(row)), re.M)
        assert set(titles) <= set(heads), (titles, heads)
        found += len(titles)
    assert found > 12


def test_every_level_is_used_and_is_there():
    linked = set(re.findall(r"index\.html#(\w+)", PAGE))
    assert linked == set(LEVELS)


def test_a_library_table_passes_only_as_text():
    """Was: 00-2, 00-3, 01-3 and 02-4 took `make(...)`."""
    tables = {"00-2": ("gpipe", 3, 1), "00-3": ("gpipe", 2, 2), "01-3": ("gpipe", 3, 2)}
    tables |= {"02-4": ("pipedream_flush", 3, 4), "06-1": ("pipedream_flush", 3, 5)}
    for name, table in tables.items():
        assert "that is the library's" in teach.check(name, make(*table)).text
        assert teach.check(name, make(*table).grid()).passed


def test_a_handout_has_the_tasks_but_no_outputs_and_solutions():
    """Blanks the lines of a solution, so that what follows it in its cell stays."""
    command = ["make", "-o", ".venv/.ready", "handout", f"BIN={Path(sys.executable).parent}"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    for path in BOOKS:
        handed = ROOT / "build" / "handout" / "notebooks" / path.name
        assert not any(cell.outputs for cell in cells(handed, "code"))
        text, whole = text_of(handed), text_of(path)
        kept = re.sub(r"<details><summary>Solution.*?</details>", "", whole, flags=re.S)
        assert text.split() == kept.split()
