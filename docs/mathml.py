"""Formulas as MathML, which browsers draw by themselves: no script and no fonts to fetch."""

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

# Brackets of a size given by hand, such as \Big( and \Big), which the converter does not know.
OPENING = re.compile(r"\\[bB]igg?[lr]?(?=\(|\[|\\\{|\\l[a-z]+)")
CLOSING = re.compile(r"\\[bB]igg?[lr]?(?=\)|\]|\\\}|\\r[a-z]+)")
LIMITS = re.compile(r"\\(min|max)_")


def to_mathml(formula: str, display: str) -> str:
    """A formula of LaTeX in MathML; ValueError where something in it is not known."""
    formula = CLOSING.sub(r"\\right", OPENING.sub(r"\\left", formula))
    if display == "block":
        formula = LIMITS.sub(r"\\\1\\limits_", formula)
    found = convert(formula, display=display)
    if "\\" in found:
        raise ValueError(f"a formula has something that cannot be shown: {formula}")
    return found


def visit_inline(translator: HTML5Translator, node: nodes.math) -> None:
    """A formula in a line of text."""
    translator.body.append(to_mathml(node.astext(), "inline"))
    raise nodes.SkipNode


def visit_block(translator: HTML5Translator, node: nodes.math_block) -> None:
    """A formula on lines of its own, which scrolls by itself where it is too wide for a phone."""
    formula = to_mathml(node.astext(), "block")
    translator.body.append(f'<div class="formula" tabindex="0">{formula}</div>\n')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.add_html_math_renderer("mathml", (visit_inline, None), (visit_block, None))
    return {"parallel_read_safe": True}
