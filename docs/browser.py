"""Python in the site's pages: Pyodide and the library beside them, and widgets that stand in pages.

`make site` has Pyodide from npm, as one archive whose integrity is pinned here, and keeps it in
build/. Where that fails the pages say so and show what is stored.
"""

import base64
import hashlib
import html
import json
import posixpath
import re
import shutil
import subprocess
import tarfile
import zipfile
from array import array
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from pipelab.editor.puzzle import LEVELS
from pipelab.show import palette
from pipelab.widgets.explorer import SIZES

ROOT = Path(__file__).parents[1]
VERSION = "314.0.7"
INTEGRITY = (  # sha512, as npm gives it
    "0YvXxEhfEdpLfb/XkM2BFAeMROq0iMUX2bzzH9pOttyMcWkwq+HbE5uyuGD82LN7y2q+SNvi/6V5JEsOlD2R1A=="
)
FILES = (
    *("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm"),
    *("python_stdlib.zip", "pyodide-lock.json", "package.json"),
)
# Of the library, what a page can use: no torch, no JAX, no matplotlib.
ROOMS = ("gpu", "pipeshard", "peers", "models", "cli", "plot", "training", "runtime/torch", "jax")
WITHOUT = tuple(f"pipelab/{room}/" for room in ROOMS)
PLACE = "_static/play"
logger = logging.getLogger(__name__)


# ---- what lies beside the pages


@cache
def pyodide() -> Path | None:
    """The folder with Pyodide's core, fetched once; None where npm cannot give it."""
    folder = ROOT / "build" / "pyodide" / VERSION
    if all((folder / name).is_file() for name in FILES):
        return folder
    if not (npm := shutil.which("npm")):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    command = [npm, "pack", f"pyodide@{VERSION}", "--silent", "--pack-destination", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    archive = folder / f"pyodide-{VERSION}.tgz"
    if done.returncode or not archive.is_file():
        return None
    found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if found != INTEGRITY:
        archive.unlink()
        raise ValueError(f"pyodide {VERSION} has the integrity {found}, expected: {INTEGRITY}")
    with tarfile.open(archive) as opened:
        for name in FILES:
            member = opened.extractfile(f"package/{name}")
            assert member is not None, name
            (folder / name).write_bytes(member.read())
    archive.unlink()
    return folder


def library(path: Path) -> None:
    """Write what a page can use of pipelab, and the course's answers, as an archive: always the
    same bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for home, folder in ((ROOT, "pipelab"), (ROOT / "notebooks", "teach")):
            for file in sorted((home / folder).rglob("*")):
                name = file.relative_to(home).as_posix()
                if file.suffix in (".py", ".js", ".css") and not name.startswith(WITHOUT):
                    archive.writestr(zipfile.ZipInfo(name), file.read_bytes(), zipfile.ZIP_DEFLATED)


def finish(app: Sphinx, failed: Exception | None) -> None:
    """After Sphinx has written its pages."""
    if failed or app.builder.format != "html":
        return
    from pipelab.widgets import Editor, Explorer
    from widgets.derivation import HERE, Derivation

    place = Path(app.outdir) / PLACE
    place.mkdir(parents=True, exist_ok=True)
    (place / "explorer.js").write_text(Explorer._esm)
    (place / "editor.js").write_text(Editor._esm)
    (place / "derivation.js").write_text(Derivation._esm)
    # The editor's begins with the explorer's.
    (place / "widgets.css").write_text(Editor._css + (HERE / "derivation.css").read_text())
    library(place / "pipelab.zip")
    draw_first(Path(app.outdir))
    if folder := pyodide():
        shutil.copytree(folder, place / "pyodide", dirs_exist_ok=True)
    else:
        logger.info(
            "npm gave no Pyodide: widgets and exercises of the site stay as they are stored"
        )


@cache
def made() -> str:
    """A word for what draws widgets: pictures that a browser kept are of the same."""
    word = hashlib.sha256()
    for room in ("widgets", "editor", "predict", "show", "schedules", "table"):
        for file in sorted((ROOT / "pipelab" / room).rglob("*.[pjc][ys]*")):
            word.update(file.read_bytes())
    return word.hexdigest()[:12]


LINK = re.compile(r"explorer\.html#([^\"]*schedule=[^\"]*)\"")


def draw_first(folder: Path) -> None:
    """Draw what every link to the explorer and every level shows before Python is there."""
    pages = [path.read_text() for path in folder.rglob("*.html") if "_modules" not in path.parts]
    links = {html.unescape(link) for page in pages for link in LINK.findall(page)}
    states = {f"explorer-{link}": explorer_state(settings_of(link)) for link in links}
    states |= {f"editor-{name}": editor_state(name) for name in LEVELS}
    (folder / PLACE / "first.json").write_text(json.dumps(states))


# ---- a widget in a page


def placed(
    kind: str, state: dict[str, Any], page: str, how: str = "", still: tuple[str, str] = ("", "")
) -> str:
    """A widget's HTML: its state, which its front end draws, and a picture for who runs no scripts.

    page   the page's name, from which links are counted
    how    "page": the page is the widget's own, and its address holds what is set
    still  of a derivation, its words and its picture
    """
    home = posixpath.relpath(f"docs/play/{kind}.html", posixpath.dirname(page))
    data = json.dumps(state).replace("<", "\\u003c")
    if kind == "derivation":
        shown, image = still[0], f"png;base64,{still[1]}"
        words = "With JavaScript you go through it step by step."
    else:
        rows, shown = (_explored if kind == "explorer" else _edited)(state)
        words = html.escape(f"{shown} With JavaScript it can be changed here; else in JupyterLab.")
        image = f"svg+xml;base64,{base64.b64encode(picture(rows).encode()).decode()}"
    python, own = "yes" if pyodide() else "no", f" data-{how}=yes" if how else ""
    return (
        f'<div class="pipelab-play" data-kind="{kind}" data-home="{home}" '
        f'data-python="{python}" data-made="{made()}"{own}>'
        f'<script type="application/json">{data}</script>'
        f'<noscript><img alt="{html.escape(shown)}" src="data:image/{image}">'
        f"<p>{words}</p></noscript></div>\n"
    )


Box = tuple[float, float, str, str, str]  # from, until, colour, its text and that one's colour


def picture(rows: Iterable[tuple[str, list[Box]]]) -> str:
    """An SVG: a lane for each row, with boxes in it."""
    rows = [*rows]
    scale = 700 / max((until for _, boxes in rows for _, until, *_ in boxes), default=1.0)
    height = 26 * len(rows) + 8
    parts = []
    for y, (name, boxes) in enumerate(rows):
        parts.append(f'<text x="4" y="{26 * y + 19}">{html.escape(name)}</text>')
        for start, until, colour, text, ink in boxes:
            x, wide = 80 + start * scale, (until - start) * scale
            parts.append(
                f'<rect x="{x:.1f}" y="{26 * y + 4}" width="{max(wide - 1, 0.5):.1f}" height="21" '
                f'fill="{colour}"/>'
            )
            if wide > 8 * len(text):
                middle = x + wide / 2
                parts.append(
                    f'<text x="{middle:.1f}" y="{26 * y + 18}" fill="{ink}" '
                    f'text-anchor="middle">{text}</text>'
                )
    size = f'width="800" height="{height}" viewBox="0 0 800 {height}"'
    style = 'font-family="sans-serif" font-size="11"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>{"".join(parts)}</svg>'


def _explored(state: dict[str, Any]) -> tuple[list[tuple[str, list[Box]]], str]:
    """The rows of an explorer's timelines, and a sentence for them."""
    rows, drawing = [], state["drawing"]
    for t in drawing["timelines"]:
        numbers = array("f", base64.b64decode(t["data"]))
        many = len(numbers) // len(t["columns"])
        column = {name: numbers[k * many : (k + 1) * many] for k, name in enumerate(t["columns"])}
        for d, (first, last) in enumerate(zip(t["bounds"], t["bounds"][1:], strict=False)):
            boxes: list[Box] = []
            for i in range(first, last):
                colour, ink = t["colours"][int(column["colour"][i])]
                text = str(int(column["microbatch"][i]))
                boxes.append((column["start"][i], column["end"][i], colour, text, ink))
            rows.append((f"device {d}", [box for box in boxes if box[1] > box[0]]))
    return rows, " Compared with: ".join(t["summary"] for t in drawing["timelines"])


def _edited(state: dict[str, Any]) -> tuple[list[tuple[str, list[Box]]], str]:
    """The rows of an editor, with what is left to place side by side where nothing is placed."""
    rows = []
    for row in state["view"]["rows"]:
        boxes = [
            (c["from"], c["until"], c["colours"][0], c["text"], c["colours"][1])
            for c in row["cells"]
            if "action" in c
        ]
        if not boxes:
            for k, c in enumerate(row["left"]):
                mild = palette.to_hex(palette.with_white(palette.from_hex(c["colours"][0]), 0.6))
                boxes.append((k, k + 0.9, mild, c["text"], "black"))
        rows.append((row["name"], boxes))
    level = state["view"]["level"]
    return rows, f"A table to make by hand; pale is what is left to place. {level['text']}".strip()


def settings_of(text: str) -> dict[str, Any]:
    """The settings in an address: schedule=gpipe&devices=4."""
    pairs = (pair.split("=") for pair in text.split("&"))
    return {key: int(x) if x.isdigit() and key in SIZES else unquote(x) for key, x in pairs}


def explorer_state(settings: dict[str, Any]) -> dict[str, Any]:
    """What a page stores of an explorer with these settings."""
    from pipelab.widgets import Explorer

    shown = Explorer()
    shown.settings = shown.settings | settings
    if shown.error:
        raise ValueError(shown.error)
    return {name: getattr(shown, name) for name in ("choices", "settings", "drawing", "error")}


def editor_state(table: str, help: str = "legal") -> dict[str, Any]:
    """What a page stores of an editor with a level or a link."""
    from pipelab.widgets import Editor

    return {"view": Editor(table, help=help).view}


class Play(SphinxDirective):
    """A widget in a page: `explorer` with settings such as "schedule=gpipe&devices=4", `editor`
    with a level, `derivation` with its name."""

    required_arguments = 2
    option_spec = {"page": directives.flag}  # noqa: RUF012 (as Sphinx has it)

    def run(self) -> list[nodes.Node]:
        kind, text = self.arguments
        still = "", ""
        if kind == "derivation":
            from widgets import derivations

            made = getattr(derivations, text)()
            state = {"shown": made.shown}
            still = repr(made), base64.b64encode(made.still()).decode()
        elif kind == "explorer":
            state = explorer_state(settings_of(text))
        else:
            state = editor_state(text)
        found = placed(kind, state, self.env.docname, "".join(self.options), still)
        return [nodes.raw("", found, format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_directive("play", Play)
    app.add_js_file("play/play.js", type="module")
    app.add_css_file("play/widgets.css")
    app.add_css_file("play/page.css")
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True}
