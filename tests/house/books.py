"""The lectures as they are stored, each read once."""

from functools import cache
from pathlib import Path

import nbformat

FOLDER = Path(__file__).parents[2] / "notebooks"
BOOKS = sorted(FOLDER.glob("*.ipynb"))
# The others are to play with.
LECTURES = {path.stem[:2]: path for path in BOOKS if path.stem < "90"}


@cache
def book(path):
    return nbformat.read(path, as_version=4)


def cells(path, kind):
    return [cell for cell in book(path).cells if cell.cell_type == kind]


def text_of(path):
    """All of its Markdown."""
    return "\n".join(cell.source for cell in cells(path, "markdown"))
