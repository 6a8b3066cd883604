"""The site's front page: a level to play at once, one file that asks for nothing before Python."""

import json
from pathlib import Path
from string import Template
from typing import Any

from sphinx.application import Sphinx

import pipelab.editor
from pipelab.editor.puzzle import LEVELS, Level, task_data
from pipelab.show import palette

HERE = Path(__file__).parent / "front"
RULES = Path(pipelab.editor.__file__).with_name("rules.js")


def level_data(level: Level) -> dict[str, Any]:
    """What the page knows of a level: its texts, its task, and colours by stage and kind ("0F")."""
    task = level.task
    stages, kinds = task.table.stages, sorted({a.kind for a in task.needs})
    return task_data(task) | {
        "title": level.title,
        "text": level.text,
        "par": level.par,
        "stages": stages,
        "colours": {
            f"{stage}{kind.name}": palette.box_colours(kind, stage, task.devices, stages)
            for stage in range(stages)
            for kind in kinds
        },
    }


def page(address: str = "") -> str:
    """The page's text; `address` is where the site will be, for a link's picture."""
    levels = {name: level_data(level) for name, level in LEVELS.items()}
    return Template((HERE / "front.html").read_text()).substitute(
        css=(HERE / "front.css").read_text(),
        data=json.dumps(levels, separators=(",", ":")).replace("<", "\\u003c"),
        image=f"{address}_static/overview.png",
        script=RULES.read_text() + (HERE / "front.js").read_text(),
    )


def finish(app: Sphinx, failed: Exception | None) -> None:
    """After Sphinx has written its pages."""
    if not failed and app.builder.format == "html":
        (Path(app.outdir) / "index.html").write_text(page(app.config.html_baseurl))


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True}
