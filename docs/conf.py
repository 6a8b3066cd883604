"""The course as a site, for Sphinx with MyST-NB: `make site`.

The sources are where they always were: this folder adds a front page and the reference, the
lectures come from notebooks/ with the outputs stored there, the measurements from benchmarks/.
Nothing is run, and the pages ask the network for nothing.
"""

import sys
from pathlib import Path

# The checker of notebooks that MyST-NB loads would build a parser of web addresses: 3 s.
sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "notebooks")]

# Such as "https://github.com/OWNER/pipelab": each page then gets a button to edit it, and each
# lecture others that open it in Binder (which reads environment.yml) and in Colab, and download it.
# While it is empty no page shows any.
REPOSITORY = ""

project = "pipelab"
author = "the authors of pipelab"
language = "en"
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "notebooks/**",
    "benchmarks/*.md",
    "benchmarks/gpu/*.md",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
]
exclude_patterns = [".*", "**/.*", "build", "images", "pipelab", "tests", "**/__pycache__"]

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "browser",
    "front_page",
    "lectures",
    "mathml",
    "reference",
    "shared",
]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
nb_execution_mode = "off"
nb_merge_streams = True
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"
html_math_renderer = "mathml"

html_title = "pipelab"
OWNER = REPOSITORY.removeprefix("https://github.com/").partition("/")[0]
html_baseurl = f"https://{OWNER}.github.io/pipelab/" if OWNER else ""  # of what others link to
html_theme = "sphinx_book_theme"
html_static_path = ["static"]
html_favicon = "static/icon.svg"
html_css_files = ["site.css"]
html_extra_path = ["root"]
html_copy_source = bool(REPOSITORY)  # what the download button gives
html_domain_indices = False
html_show_sourcelink = False
html_context = {"default_mode": "auto"}
html_theme_options = {
    "navbar_start": [],
    "navbar_center": [],
    "navbar_end": [],
    "navbar_persistent": [],
    "repository_url": REPOSITORY,
    "repository_branch": "main",
    "use_repository_button": bool(REPOSITORY),
    "use_edit_page_button": bool(REPOSITORY),
    "use_download_button": bool(REPOSITORY),
    "path_to_docs": "",
    "launch_buttons": {
        "binderhub_url": "https://mybinder.org",
        "colab_url": "https://colab.research.google.com",
        "notebook_interface": "jupyterlab",
    }
    if REPOSITORY
    else {},
    "show_toc_level": 2,
}
