"""Sphinx's settings for the book. `python book/build.py` prepares the pages and runs Sphinx on them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).resolve().parent))

import minivllm

project = "minivllm"
author = "the minivllm authors"
version = release = minivllm.__version__
html_title = "How vLLM works, by building it"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
nb_execution_mode = "off"
nb_ipywidgets_js = {}  # widgets have a picture beside them, and nothing is fetched from elsewhere
nb_code_prompt_show = "Show the output"
nb_code_prompt_hide = "Hide the output"
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
myst_heading_slug_func = "pages.slug"
suppress_warnings = ["misc.highlighting_failure"]  # commands like %matplotlib
napoleon_use_ivar = True
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"


def setup(app: Sphinx) -> None:
    """Keep Napoleon from taking the first words of an attribute's docstring for a type, because a colon follows them."""

    def replace(old: str, new: str) -> Callable[..., None]:
        def process(app: Sphinx, what: str, name: str, item: object, options: object, lines: list[str]) -> None:
            if what == "attribute":
                lines[:] = [line.replace(old, new) for line in lines]

        return process

    app.connect("autodoc-process-docstring", replace(": ", "\ue000"), priority=400)
    app.connect("autodoc-process-docstring", replace("\ue000", ": "), priority=600)


html_theme = "furo"
html_favicon = "../minivllm/entrypoints/dashboard/static/icon.svg"
html_static_path = [str(Path(__file__).resolve().parent / "_static")]
html_css_files = ["book.css"]
html_js_files = [("book.js", {"defer": ""})]
html_show_sourcelink = False
html_sidebars = {
    f"{folder}/**": [] for folder in ("minivllm", "tests", "benchmarks")
}  # pages of code: their menus would weigh more than they
html_copy_source = False
