"""What the lectures need on a page: their pictures in words, their widgets and exercises alive."""

import ast
import html
import json
import re
from collections.abc import Iterator
from typing import Any

from sphinx.application import Sphinx

from browser import editor_state, explorer_state, placed, pyodide
from exercises import ASKED, answerable
from pipelab import plot
from pipelab.optimize.cut import plots as plots_of_cuts
from widgets import meshes

# By the name that lectures import them by.
PLOTS = {"plot": [plot], "plots": [plots_of_cuts], "meshes": [meshes]}

WIDGET = "application/vnd.jupyter.widget-view+json"
STATES = "application/vnd.jupyter.widget-state+json"
NO_KERNEL = "\n(This page has no kernel: open the lecture in JupyterLab.)"
GUESSED = "Guess first: replace None, then press Check."
TRIED = "Not attempted yet: replace None, then press Check."
# Links to code: the site has the reference instead.
CODE_LINK = re.compile(r"\[([^\]]*)\]\((?:\.\./)?pipelab/[^)]*\)")


def sentences(text: str) -> list[str]:
    """The sentences of Markdown text as plain words: no markup, formulas, tables or folds."""
    text = re.sub(r"```.*?```|<details>.*?</details>|\$\$.*?\$\$|<[^>]*>", "", text, flags=re.S)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)|^[#|].*$", "", text, flags=re.M)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = " ".join(re.sub(r"[*`$\\{}]|^\d\. |^- ", "", text, flags=re.M).split())
    return [found for found in re.split(r"(?<=[.:?!]) (?=[A-Z])", text) if found]


def text_of(node: ast.AST | None) -> str:
    """A text constant; the empty text for anything else."""
    return str(node.value) if isinstance(node, ast.Constant) else ""


def drawn(call: ast.Call) -> Iterator[str]:
    """What a call of a plot draws: its docstring's first line, and the names given."""
    function = call.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        rooms = PLOTS.get(function.value.id, [])
        found = [getattr(room, function.attr) for room in rooms if hasattr(room, function.attr)]
        if not found:
            return
        yield found[0].__doc__.splitlines()[0]
        names = [
            text_of(key)
            for argument in call.args
            for key in (argument.keys if isinstance(argument, ast.Dict) else [])
        ]
        if any(names):
            yield f"{'; '.join(filter(None, names))}."


def pictured(source: str) -> list[str]:
    """What the figures of a cell show, read off its code: kinds of plots, titles, axes."""
    code = "\n".join(line for line in source.splitlines() if not line.startswith(("%", "!")))
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    found = [part for call in calls for part in drawn(call)]
    labels = [keyword for call in calls for keyword in call.keywords]
    across, up, titles = (
        [text_of(label.value) for label in labels if label.arg == name and text_of(label.value)]
        for name in ("xlabel", "ylabel", "title")
    )
    found += [f"{y} over {x}." for x, y in zip(across, up, strict=False)]
    found += [f"{title}." for title in titles]
    return list(dict.fromkeys(found))


def described(cell: dict[str, Any], before: str, section: str) -> str:
    """The words for a cell's pictures: what it draws and the text before, or else the section."""
    printed = ["".join(output["text"]) for output in cell["outputs"] if "text" in output]
    announced = [text for text in sentences(before)[-1:] if text[-1] != "?"]
    said = announced or sentences(" ".join(printed))[:1]
    shown = [*pictured("".join(cell["source"])), *said] or [f"of the section {section!r}."]
    return " ".join(["Figure:", *shown])


def widget(model: dict[str, Any], page: str, data: dict[str, Any]) -> str:
    """The HTML of a stored widget; "" for one that a page cannot show."""
    state = model.get("state", {})
    if "shown" in state:
        still = "".join(data["text/plain"]), "".join(data["image/png"]).strip()
        return placed("derivation", {"shown": state["shown"]}, page, still=still)
    if "drawing" in state:
        return placed("explorer", explorer_state(state["settings"]), page)
    if "view" in state:
        return placed("editor", editor_state(state["view"]["link"], state["view"]["help"]), page)
    return ""


def asked(cell: dict[str, Any]) -> str:
    """The HTML below a cell that checks an answer or a guess; "" for any other cell."""
    found = ASKED.search("".join(cell["source"]))
    if not found:
        return ""
    exercise = answerable()[found[1]]
    if lacks := exercise["lacks"] or not pyodide():
        why = f"needs {lacks}" if lacks is not True else "needs Python"
        said = f'<p class="said">This check {why}: answer it in JupyterLab.</p>'
        return f'<div class="pipelab-exercise">{said}</div>'
    words = GUESSED if "teach.guess" in found[0] else TRIED
    data = json.dumps({"before": exercise["before"], "cell": exercise["cell"]})
    data = data.replace("<", "\\u003c")
    return (
        f'<div class="pipelab-exercise" data-name="{found[1]}" data-python="yes">'
        f'<script type="application/json">{data}</script>'
        f'<p class="said">{html.escape(words)}</p></div>'
    )


def prepare(notebook: dict[str, Any], page: str = "") -> None:
    """Words for every picture that a cell made; widgets and exercises that a page can show.

    A cell's own words win: `{"mystnb": {"image": {"alt": ...}}}` in its metadata.
    """
    models = notebook["metadata"].pop("widgets", {}).get(STATES, {}).get("state", {})
    before = section = ""
    for cell in notebook["cells"]:
        for output in cell.get("outputs", []):
            if shown := output.get("data", {}).pop(WIDGET, None):
                if live := widget(models.get(shown["model_id"], {}), page, output["data"]):
                    output["data"] = {"text/html": [live]}
                else:
                    output["data"]["text/plain"] = [*output["data"]["text/plain"], NO_KERNEL]
        if cell["cell_type"] == "code" and (below := asked(cell)):
            cell["outputs"][-1]["data"] = {"text/html": [below]}
        if any("image/png" in output.get("data", {}) for output in cell.get("outputs", [])):
            image = cell["metadata"].setdefault("mystnb", {}).setdefault("image", {})
            image.setdefault("alt", described(cell, before, section))
        before = "".join(cell["source"]) if cell["cell_type"] == "markdown" else ""
        section = (re.findall(r"^#+ (.*)", before, re.M) or [section])[-1]


def read(_app: Sphinx, name: str, source: list[str]) -> None:
    """Before Sphinx reads a page."""
    if name.startswith("notebooks/") and source[0].startswith("{"):
        notebook = json.loads(source[0])
        prepare(notebook, name)
        source[0] = json.dumps(notebook)
    else:
        source[0] = CODE_LINK.sub(r"\1", source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("source-read", read)
    return {"parallel_read_safe": True}
