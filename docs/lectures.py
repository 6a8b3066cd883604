"""What the lectures need on a page: their pictures in words, their widgets without a kernel."""

import json
import re
from typing import Any

from sphinx.application import Sphinx

WIDGET = "application/vnd.jupyter.widget-view+json"
CODE_LINK = re.compile(r"\[([^\]]*)\]\(pipelab/[^)]*\)")  # the site has the reference instead
NO_KERNEL = "\n(This page has no kernel: open the lecture in JupyterLab.)"
LONGEST = 300  # characters of a picture's words: a screen reader cannot skip within them


def sentences(text: str) -> list[str]:
    """The sentences of Markdown text as plain words: no markup, formulas, tables or links."""
    text = re.sub(r"```.*?```|<details>.*?</details>|\$\$.*?\$\$|<[^>]*>", "", text, flags=re.S)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)|^[#|].*$", "", text, flags=re.M)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = " ".join(re.sub(r"[*`$\\{}]|^\d\. |^- ", "", text, flags=re.M).split())
    return [found.strip() for found in re.split(r"(?<=[.:?!]) (?=[A-Z])", text) if found.strip()]


def described(cell: dict[str, Any], before: str) -> str:
    """The words for a cell's pictures: its own, else what it printed, else what announces it."""
    printed = "".join(
        "".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream"
    )
    said = " ".join(printed.split())
    title = re.search(r"title=f?\"([^\"]*)\"", "".join(cell["source"]))
    announced = sentences(before)[-1:]
    words = " ".join([*announced, *([title[1] + "."] if title else []), said]).strip()
    return f"Figure. {words[:LONGEST].rstrip()}"


def prepare(notebook: dict[str, Any]) -> None:
    """Words for every picture that a cell made; a widget's words in place of the widget."""
    notebook["metadata"].pop("widgets", None)
    before = ""
    for cell in notebook["cells"]:
        if cell["cell_type"] == "markdown":
            before = "".join(cell["source"])
            continue
        for output in cell["outputs"]:
            if output.get("data", {}).pop(WIDGET, None):
                output["data"]["text/plain"] = [*output["data"]["text/plain"], NO_KERNEL]
        if any("image/png" in output.get("data", {}) for output in cell["outputs"]):
            image = cell["metadata"].setdefault("mystnb", {}).setdefault("image", {})
            image.setdefault("alt", described(cell, before))


def read(_app: Sphinx, name: str, source: list[str]) -> None:
    """Before Sphinx reads a page."""
    if name.startswith("notebooks/") and source[0].startswith("{"):
        notebook = json.loads(source[0])
        prepare(notebook)
        source[0] = json.dumps(notebook)
    elif name == "README":
        source[0] = CODE_LINK.sub(r"\1", source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("source-read", read)
    return {"parallel_read_safe": True}
