"""The glossary: its form, links to it, and a link wherever a word of it comes first."""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import nbformat
import pytest

from tests.house.books import BOOKS, FOLDER, book, text_of

ROOT = Path(__file__).parents[2]
GLOSSARY = FOLDER / "glossary.md"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
LINK = re.compile(r"\]\((?:[\w./]*/)?glossary\.md(?:#([^)]*))?\)")
OTHER_MEANINGS = (
    r"error messages?|links? to|as a link|a tick stays"  # phrases in which a word is no term
)

# In what a term is not looked for.
NO_PROSE = (
    r"^(```|~~~).*?^\1",  # code
    r"^(?: {4}|\t)[^\n]*",
    r"\$\$.*?\$\$",  # formulas
    r"(?<![\\$])\$[^$\n]+\$",
    r"^#[^\n]*",  # headings
    r"^<[^\n]*(?:\n(?!\n)[^\n]+)*",  # HTML up to an empty line, in which Markdown is not read
    r"!\[[^\]]*\]\([^)]*\)",  # pictures
    r"\[[^\]]*\]\([^)]*\)",  # links
    r"<[^>\n]+>",
    rf"\b(?:{OTHER_MEANINGS})\b",
)


class Term(NamedTuple):
    """An entry: its anchor, the words that mean it (those in backticks as code), its text."""

    anchor: str
    words: list[str]
    text: str


def terms():
    """The glossary's entries, in its order."""
    found = []
    for entry in re.split(r"^## ", GLOSSARY.read_text(), flags=re.M)[1:]:
        title, text = entry.split("\n", 1)
        name = re.match(r"\s*\*\*([^*]+)\*\*", text)
        also = re.search(r"Also: (.*?)\.(?:\s|$)", text, re.S)
        others = re.findall(r"(?<=\*)[^*,]+(?=\*)|`[^`]+`", also[1]) if also else []
        found.append(Term(title.replace(" ", "-"), [name[1] if name else title, *others], text))
    return found


def blank(text, kind):
    """The text with spaces for what matches, so that places stay what they are."""
    return re.sub(kind, lambda found: re.sub(r"[^\n]", " ", found[0]), text, flags=re.S | re.M)


@cache
def prose_and_code(source):
    """Markdown with what is no prose as spaces, and the same with pieces of code in the lines."""
    for kind in NO_PROSE:
        source = blank(source, kind)
    return blank(source, r"`[^`\n]*`"), source


def markdown(lecture):
    """(number, source) of a lecture's cells of text."""
    numbered = enumerate(book(lecture).cells)
    return [(n, cell.source) for n, cell in numbered if cell.cell_type == "markdown"]


def pattern(word):
    """Of a word: any number, with a hyphen or without; capitals count where it has some."""
    if word.startswith("`"):
        return re.escape(word)
    body = re.sub(r"[- ]+", r"[-_\\s]+", word)
    return rf"(?:{body}|{body.capitalize()})(?:e?s)?" if word.islower() else rf"{body}s?"


def places(source, words):
    """Where words of a term stand in the Markdown of a cell, in order, outside links and code."""
    prose, code = prose_and_code(source)
    found = []
    for word in words:
        text = code if word.startswith("`") else prose
        found += re.finditer(rf"(?<![\w/-]){pattern(word)}(?![\w/-]|\.\w)", text)
    return sorted((match.span() for match in found), key=lambda span: (span[0], -span[1]))


def first_use(lectures, term):
    """(lecture, cell, start, end, linked) of the first use of a term in Markdown; None without one.

    A link to the entry counts as a use, whatever its words.
    """
    for lecture in lectures:
        for number, source in markdown(lecture):
            links = [m.span() for m in LINK.finditer(source) if m[1] == term.anchor]
            uses = [(span, True) for span in links]
            uses += [(span, False) for span in places(source, term.words)]
            if uses:
                (start, end), linked = min(uses)
                return lecture, number, start, end, linked
    return None


def unlinked(lectures):
    """What is missing: first uses that are no link, and entries that no link leads to."""
    entries = terms()
    for term in entries:
        found = first_use(lectures, term)
        if found and not found[-1]:
            yield f"{term.anchor}: first used in {found[0].name}, cell {found[1]}, without a link"
        elif not found and not any(f"](#{term.anchor})" in other.text for other in entries):
            yield f"{term.anchor}: used in no lecture, and no other entry leads to it"


def test_entries_are_sorted_short_and_addressed_alike_everywhere():
    found = terms()
    titles = [term.anchor for term in found]
    assert 60 <= len(titles) <= 110
    assert titles == sorted(set(titles))
    for term in found:  # small letters and hyphens: JupyterLab and Sphinx then make the same anchor
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", term.anchor), term.anchor
        assert 12 <= len(term.text.split()) <= 90, term.anchor
        assert re.search(r"\[Lecture \d+\]\(\d\d_\w+\.ipynb\)", term.text), term.anchor


def test_a_word_means_one_term():
    words = [word.lower() for term in terms() for word in term.words]
    assert sorted(words) == sorted(set(words))


def test_the_glossarys_own_links_lead_to_lectures_of_that_number_and_to_entries():
    text = GLOSSARY.read_text()
    for number, name in re.findall(r"\[Lecture (\d+)\]\(([^)]*)\)", text):
        assert (FOLDER / name).exists() and int(name[:2]) == int(number), name
    assert set(re.findall(r"\]\(#([^)]*)\)", text)) <= {term.anchor for term in terms()}


@pytest.mark.parametrize("path", [*BOOKS, *PAGES], ids=str)
def test_links_to_the_glossary_lead_to_an_entry(path):
    anchors = {term.anchor for term in terms()}
    text = path.read_text()
    if path in BOOKS:
        text = text_of(path)
    assert {anchor for anchor in LINK.findall(text) if anchor} <= anchors


def test_every_term_is_linked_where_it_is_first_used():
    missing = list(unlinked(BOOKS))
    assert not missing, "\n".join(missing)


def test_where_a_term_is_found_and_where_not(tmp_path):
    words = ["all-reduce", "`psum`"]
    text = "# All-reduce\n\n`all-reduce` $all-reduce$ [all-reduce](x) `lax.psum` and All-reduces"
    assert [text[a:b] for a, b in places(text, words)] == ["All-reduces"]
    text += " or `psum`"
    assert [text[a:b] for a, b in places(text, words)] == ["All-reduces", "`psum`"]
    assert places("<details>all-reduce\nall-reduce</details>", words) == []
    assert places("zero, ZeRO-like", ["ZeRO"]) == [] and places("a ZeRO", ["ZeRO"]) == [(2, 6)]
    assert places("over-ideal or an error message", ["ideal", "message"]) == []

    term = Term("all-reduce", words, "")
    for text, linked in (("an all-reduce", False), ("a [sum](glossary.md#all-reduce)", True)):
        cells = [nbformat.v4.new_markdown_cell(words) for words in ("none", text)]
        lecture = tmp_path / f"{linked}.ipynb"
        nbformat.write(nbformat.v4.new_notebook(cells=cells), lecture)
        where, cell, start, _, found = first_use([lecture], term)
        assert (where, cell, found) == (lecture, 1, linked) and start > 0
    assert first_use([lecture], Term("mesh", ["mesh"], "")) is None
