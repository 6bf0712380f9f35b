"""Sphinx's settings for the book. `python book/build.py` prepares the pages and runs Sphinx on them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import minivllm

project = "minivllm"
author = "the minivllm authors"
version = release = minivllm.__version__
html_title = "How vLLM works, by building it"

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
nb_execution_mode = "off"
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]
myst_enable_extensions = ["attrs_block", "colon_fence", "dollarmath"]
myst_heading_anchors = 4
myst_heading_slug_func = "pages.slug"
suppress_warnings = ["misc.highlighting_failure"]  # commands like %matplotlib
napoleon_use_ivar = True
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"

html_theme = "furo"
html_static_path = [str(Path(__file__).resolve().parent / "_static")]
html_css_files = ["book.css"]
html_show_sourcelink = False
html_copy_source = False
