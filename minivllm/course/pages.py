"""The lessons as web pages: `minivllm course html FOLDER`.

A cell whose output JupyterLab shows folded (`outputs_hidden` in its metadata), because it answers a prediction, is folded here too.
"""

from __future__ import annotations

import re
from pathlib import Path

from minivllm.course.exercise_cells import read_notebook
from minivllm.course.folds import uncover_answers
from minivllm.errors import CourseError

GLOSSARY = "glossary.md"
"""The glossary, next to the lessons. It becomes a page too, and links to it lead there."""

_TEMPLATE = """\
{%- extends 'index.html.j2' -%}
{% block output_group %}
{% if cell.metadata.get('jupyter', {}).get('outputs_hidden') %}
<details class="folded-output"><summary>Show the output</summary>
{{ super() }}
</details>
{% else %}
{{ super() }}
{% endif %}
{% endblock output_group %}
{% block html_head_css %}
{{ super() }}
<style>
body > main { max-width: 62rem; margin: 0 auto; }
details > summary { cursor: pointer; padding: 0.4rem 0; }
.folded-output > summary { margin-left: calc(var(--jp-cell-prompt-width) + 1rem); color: var(--jp-content-link-color, #1a56b0); }
</style>
{% endblock html_head_css %}
"""


def export_pages(lessons: Path, folder: Path) -> list[Path]:
    """Write a page for each lesson, and one for the glossary, and return their paths. Links between them lead to pages.

    Args:
        lessons: The folder of the lessons' notebooks.
        folder: Where the pages go; made if it does not exist.

    Raises:
        CourseError: There are no lessons, or nbconvert is not installed.
    """
    paths = sorted(lessons.glob("*.ipynb"))
    if not paths:
        raise CourseError(f"There are no notebooks in {lessons}: name the folder of the lessons with --lessons.")
    try:
        import nbformat
        from jinja2 import DictLoader
        from nbconvert import HTMLExporter
    except ModuleNotFoundError as error:
        raise CourseError(f'Making pages needs {error.name}: `pip install "minivllm[course]"`.') from None
    notebooks = {path.name: read_notebook(path) for path in paths}
    if (lessons / GLOSSARY).is_file():
        text = (lessons / GLOSSARY).read_text(encoding="utf-8")
        notebooks[GLOSSARY] = nbformat.v4.new_notebook(cells=[nbformat.v4.new_markdown_cell(text, id="glossary")])
    exporter = HTMLExporter(template_name="lab", extra_loaders=[DictLoader({"lesson.html.j2": _TEMPLATE})])
    exporter.template_file = "lesson.html.j2"
    folder.mkdir(parents=True, exist_ok=True)
    pages = []
    for name, notebook in notebooks.items():
        uncover_answers(notebook)
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = _link_to_pages(cell.source, notebooks)
        page, _ = exporter.from_notebook_node(notebook, {"metadata": {"name": Path(name).stem}})
        pages.append(folder / _page_name(name))
        pages[-1].write_text(page, encoding="utf-8")
    return pages


def _page_name(name: str) -> str:
    return f"{Path(name).stem}.html"


def _link_to_pages(text: str, names: dict[str, object]) -> str:
    """Markdown whose links to these files lead to their pages."""

    def replace(match: re.Match[str]) -> str:
        return f"]({_page_name(match[1])}" if match[1] in names else match[0]

    return re.sub(r"\]\(([\w.-]+)(?=[#)])", replace, text)
