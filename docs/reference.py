"""Docstrings for Sphinx: they are written to be read in a terminal, not in its markup."""

import re
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from sphinx.application import Sphinx

ITEM = re.compile(r"(?P<name>\S+(?: \S+)*) {2,}(?P<text>\S.*)")  # a name, a gap, what it is
CODE = re.compile(r"(`[^`]+`)")


def prose(line: str) -> str:
    """A line of text, with its `code` as code and without any other markup."""
    parts = CODE.split(line)
    for i, part in enumerate(parts):
        parts[i] = f"`{part}`" if i % 2 else re.sub(r"([*_|\\])", r"\\\1", part)
    return "\\ ".join(parts)  # an escaped space is none, and lets code end within a word


def definitions(lines: list[str]) -> Iterator[str]:
    """A paragraph of names in a first column and what they are in a second one."""
    for line in lines:
        item = ITEM.fullmatch(line)
        if item:
            yield from ("", f"``{item['name']}``")
        yield f"    {prose(item['text'] if item else line.strip())}"


def is_table(lines: list[str]) -> bool:
    """Whether a paragraph has two columns, where only the second is continued on further lines."""
    first = ITEM.fullmatch(lines[0])
    if not first:
        return False
    column = first.start("text")
    return all(
        ITEM.fullmatch(line) if line[0] != " " else len(line) - len(line.lstrip()) == column
        for line in lines
    )


def paragraph(lines: list[str]) -> Iterator[str]:
    """One paragraph in reStructuredText."""
    if lines[0].startswith(">>>"):
        yield from lines
    elif is_table(lines):
        yield from definitions(lines)
    elif lines[0] == "Args:":  # as the command line's help reads it
        yield from definitions([re.sub(r"^    (\w+): ", r"\1  ", line) for line in lines[1:]])
    elif re.match(r"- |\d\. ", lines[0]):
        yield from map(prose, lines)
    elif any(line[0] == " " for line in lines):
        yield from ("::", "", *(f"    {line}" for line in lines))
    else:
        yield from map(prose, lines)


def translate(*event: Any) -> None:
    """Rewrite a docstring in place, as Sphinx wants it."""
    lines, found = event[-1], []
    for is_text, group in groupby(lines, key=lambda line: bool(line.strip())):
        if is_text:
            found += [*paragraph(list(group)), ""]
    lines[:] = found


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", translate)
    return {"parallel_read_safe": True}
