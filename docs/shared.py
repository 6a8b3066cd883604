"""What a link to a page shows elsewhere: a description and a picture, in the page's head."""

import html
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

PICTURE = Path(__file__).parents[1] / "images" / "overview.png"
ABOUT = (
    "Pipeline parallelism, taught and done: a course that plays in the page, and the library that "
    "runs what it explains, every gradient checked."
)
LONGEST = 200  # characters that others show


def described(doctree: nodes.document | None) -> str:
    """What one can do after a lecture, or else a page's first paragraph that says something."""
    paragraphs = [*doctree.findall(nodes.paragraph)] if doctree else []
    texts = [" ".join(node.astext().split()) for node in paragraphs]
    for node, text in zip(paragraphs, texts, strict=True):
        aims = node.next_node(nodes.bullet_list, descend=False, siblings=True)
        if text == "After this you can" and aims:
            return cut(f"{text} {' '.join(aims.astext().split())}")
    says = (text for text in texts if len(text) > 80 and "minutes. Needs" not in text)
    return cut(next(says, ABOUT))


def cut(text: str) -> str:
    """The text as long as others show it, to the end of a sentence or a word."""
    if len(text) <= LONGEST:
        return text
    sentence = text[:LONGEST].rpartition(". ")[0]
    return f"{sentence}." if len(sentence) > 60 else f"{text[:LONGEST].rpartition(' ')[0]} …"


def add_tags(
    app: Sphinx, page: str, _template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Before a page is written."""
    text = described(doctree)
    if page == app.config.root_doc:
        text, context["title"] = ABOUT, "Pipeline parallelism, taught and done"
    picture = f"{app.config.html_baseurl}_static/{PICTURE.name}"
    tags = {
        "og:title": html.unescape(context.get("title", "pipelab")),
        "og:description": text,
        "og:type": "website",
        "og:image": picture
        if app.config.html_baseurl
        else context["pathto"](f"_static/{PICTURE.name}", 1),
        "og:image:alt": "Four micro-batches on four devices by four schedules",
    }
    lines = [f'<meta name="description" content="{html.escape(text)}">']
    lines += [f'<meta property="{key}" content="{html.escape(x)}">' for key, x in tags.items()]
    context["metatags"] = context.get("metatags", "") + "\n".join(lines)


def finish(app: Sphinx, failed: Exception | None) -> None:
    """After Sphinx has written its pages."""
    if not failed and app.builder.format == "html":
        shutil.copy(PICTURE, Path(app.outdir) / "_static")


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("html-page-context", add_tags)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True}
