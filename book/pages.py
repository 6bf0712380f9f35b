"""The book's pages as Sphinx reads them, made from the project's notebooks and documents as they are stored.

They lie in one folder with the layout of the repository, so that links between them are right as they stand. A file of code that a page
links to becomes a page, too.
"""

from __future__ import annotations

import ast
import inspect
import re
import shutil
from base64 import b64decode
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import nbformat

from minivllm.course.folds import is_folded, uncover_answers
from minivllm.course.progress import minutes_to_read
from minivllm.entrypoints.playground.exercise import LESSONS

ROOT = Path(__file__).resolve().parent.parent
BOOK = ROOT / "book"
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s#]+)((?:#[^)\s]*)?)(?=\))")
TERM = re.compile(r'<a id="([\w-]+)"></a>\n\*\*(.+?)\*\*: ')
VLLM_FILE = re.compile(r"`(vllm/[\w./-]+\.\w+)`")
SITUATION = re.compile(r'name: "([^"]+)",\s*text: "[^"]*\(Lesson (\d\d)\)"(?:,\s*widget: "([^"]+)")?')
WIDGET = "application/vnd.jupyter.widget-view+json"
LANGUAGES = {".py": "python", ".c": "c", ".sh": "sh"}
LARGEST_PAGE = 2**17  # bytes of code; a larger file can be downloaded instead


def prepare(folder: Path) -> None:
    """Write all pages to a folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    lessons = sorted((ROOT / "notebooks").glob("*.ipynb"))
    for path in [*lessons, *sorted((ROOT / "exercises").glob("*.ipynb"))]:
        notebook = nbformat.read(path, 4)
        if path in lessons:
            prepare_lesson(notebook, path)
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = link_to_pages(cell.source, path, folder)
        write(folder, path, nbformat.writes(notebook))
    for path in [
        *sorted((ROOT / "docs").glob("*.md")),
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    ]:
        write(folder, path, link_to_pages(path.read_text(encoding="utf-8"), path, folder))
    glossary = ROOT / "notebooks/glossary.md"
    write(folder, glossary, link_to_pages(TERM.sub(r"## \2\n\n", glossary.read_text(encoding="utf-8")), glossary, folder))
    for path in BOOK.glob("*.md"):
        shutil.copy(path, folder)
    write_reference(folder / "reference", lessons)
    write_figures(folder / "figures", lessons)


def write(folder: Path, path: Path, text: str) -> None:
    """Write a page to where its file is in the repository."""
    target = folder / path.relative_to(ROOT)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")


def prepare_lesson(notebook: nbformat.NotebookNode, path: Path) -> None:
    """Fold what JupyterLab folds, leave out widgets, which have a picture beside them, put a button over those that the playground can
    take the place of, and say below the title what belongs to the lesson.
    """
    uncover_answers(notebook)
    widgets = {widget: number for number, _, widget in situations(path.name[:2])}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            if is_folded(cell):
                cell.metadata.setdefault("tags", []).append("hide-output")
            for output in cell.outputs:
                output.get("data", {}).pop(WIDGET, None)
            if cell.id in widgets:
                cell.outputs.insert(0, nbformat.v4.new_output("display_data", {"text/html": play_here(widgets[cell.id])}))
    notebook.cells.insert(1, nbformat.v4.new_markdown_cell(about(notebook, path)))


def play_here(number: int) -> str:
    """A button that puts a situation of the playground in the place of the picture below it, for `book.js` to show."""
    link = f'<a href="../playground/index.html#{number}">Open it on a page of its own</a>'
    return f'<p class="play-here" hidden><button type="button">Play with it here</button> {link}</p>'


def about(notebook: nbformat.NotebookNode, path: Path) -> str:
    """How long a lesson takes, how to run it, its exercise, its situations in the playground, and the files of vLLM that it speaks of."""
    parts = [
        f"**About {minutes_to_read(notebook)} minutes** to read and run",
        f"**Run it**: [open it in JupyterLab](http://localhost:8888/lab/tree/notebooks/{path.name}) while `make lab` runs, or"
        f' <a href="{path.name}" download>download the notebook</a>',
    ]
    if (ROOT / "exercises" / path.name).exists():
        browser = (
            f' (<a href="../playground/exercise.html#{path.name[:2]}">in the browser</a>)' if path.name[:2] in LESSONS else ""
        )
        parts.append(f"**[Exercise](../exercises/{path.name})**{browser}")
    files = sorted({name for cell in notebook.cells if cell.cell_type == "markdown" for name in VLLM_FILE.findall(cell.source)})
    if plays := situations(path.name[:2]):
        links = ", ".join(f'<a href="../playground/index.html#{number}">{name}</a>' for number, name, _ in plays)
        parts.append(f"**Play** with the engine, in the browser: {links}")
    if files:
        parts.append("**In vLLM**: " + ", ".join(f"`{name}`" for name in files))
    return "\n".join([":::{container} about", *(f"- {part}" for part in parts), ":::"])


def situations(lesson: str) -> list[tuple[int, str, str]]:
    """Numbers and names of the playground's situations from a lesson, and the cells of the widgets that show them."""
    text = (ROOT / "minivllm/entrypoints/playground/static/presets.js").read_text(encoding="utf-8")
    found = SITUATION.findall(text)
    assert len(found) == text.count("name: "), "each situation names its lesson, on the same line as its text"
    return [(number, name, widget) for number, (name, of_lesson, widget) in enumerate(found) if of_lesson == lesson]


def link_to_pages(text: str, path: Path, folder: Path) -> str:
    """Markdown whose links to files of code lead to pages with them, which are written now."""

    def replace(match: re.Match[str]) -> str:
        target = (path.parent / match[1]).resolve()
        if not target.is_relative_to(ROOT) or target.suffix in (".md", ".ipynb"):
            return match[0]
        name = target.relative_to(ROOT)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            files = "\n".join(f"- `{file.name}`" for file in sorted(target.iterdir()))
            (folder / name).mkdir(exist_ok=True)
            (folder / name / "index.md").write_text(f"---\norphan: true\n---\n# {name}\n\n{files}\n", encoding="utf-8")
            return f"{match[1]}/index.md"
        if target.suffix not in LANGUAGES or target.stat().st_size > LARGEST_PAGE:
            shutil.copy(target, folder / name)
            return match[0]
        code = f"# {name}\n\n`````{LANGUAGES[target.suffix]}\n{target.read_text(encoding='utf-8').rstrip()}\n`````\n"
        (folder / f"{name}.md").write_text(f"---\norphan: true\n---\n{code}", encoding="utf-8")
        return f"{match[1]}.md"

    return LINK.sub(replace, text)


def write_figures(folder: Path, lessons: list[Path]) -> None:
    """A page for each function of `minivllm.viz` that lessons draw with: its first picture there, what it says of itself, and where it is used."""
    folder.mkdir()
    shown: dict[str, dict[str, None]] = {}
    for path in lessons:
        notebook = nbformat.read(path, 4)
        known = {name: module for module, name in imports(notebook) if module.startswith("minivllm.viz.")}
        for cell in notebook.cells:
            pictures = [output.data["image/png"] for output in cell.get("outputs", []) if "image/png" in output.get("data", {})]
            called = [name for name in known if re.search(rf"\b{name}\(", cell.source)]
            if pictures and called:
                name = called[-1]  # the others make what it draws
                if name not in shown:
                    (folder / f"{name}.png").write_bytes(b64decode(pictures[0]))
                    write_figure(folder, name, getattr(import_module(known[name]), name))
                shown.setdefault(name, {})[path.name] = None
    for name, names in shown.items():
        links = ", ".join(f"[{name[:2]}](../notebooks/{name})" for name in names)
        with (folder / f"{name}.md").open("a", encoding="utf-8") as page:
            page.write(f"\nIn lessons {links}.\n")
    cards = "\n".join(f"- [![{name}]({name}.png)]({name}.md)\n\n  `{name}`" for name in shown)
    text = (
        f"# Figures\n\nWhat the package draws, each as it first stands in a lesson.\n\n:::{{container}} figures\n{cards}\n:::\n"
    )
    (folder / "index.md").write_text(text, encoding="utf-8")


def write_figure(folder: Path, name: str, function: Any) -> None:
    """The page of a figure."""
    module = function.__module__
    (folder / f"{name}.md").write_text(
        f"---\norphan: true\n---\n# `{name}`\n\n![What {name} draws]({name}.png)\n\n```{{eval-rst}}\n.. autofunction:: {module}.{name}\n   :no-index:\n```\n",
        encoding="utf-8",
    )


def write_reference(folder: Path, lessons: list[Path]) -> None:
    """A page for each subpackage of which lessons import something, with those classes and functions."""
    folder.mkdir()
    pages: dict[str, set[tuple[str, str]]] = {}
    for path in lessons:
        for module, name in imports(nbformat.read(path, 4)):
            item = getattr(import_module(module), name)
            if inspect.isclass(item) or inspect.isfunction(item):
                package = ".".join(item.__module__.split(".")[:2])
                pages.setdefault(package, set()).add((item.__module__, item.__name__))
    for package, names in pages.items():
        lines = [f"# `{package}`", "", "```{eval-rst}"]
        for module, name in sorted(names):
            is_class = inspect.isclass(getattr(import_module(module), name))
            lines += [f".. auto{'class' if is_class else 'function'}:: {module}.{name}", *["   :members:"] * is_class, ""]
        (folder / f"{package}.md").write_text("\n".join([*lines, "```", ""]), encoding="utf-8")
    toctree = "\n".join(sorted(pages))
    intro = "The classes and functions of the package that lessons use."
    (folder / "index.md").write_text(
        f"# Reference\n\n{intro}\n\n```{{toctree}}\n:maxdepth: 1\n\n{toctree}\n```\n", encoding="utf-8"
    )


def imports(notebook: nbformat.NotebookNode) -> Iterator[tuple[str, str]]:
    """Modules of the package and the names that cells import from them."""
    for cell in notebook.cells:
        if cell.cell_type == "code":
            code = "\n".join(line for line in cell.source.splitlines() if not line.lstrip().startswith(("%", "!")))
            for node in ast.walk(ast.parse(code)):
                if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("minivllm"):
                    yield from ((str(node.module), alias.name) for alias in node.names)


def slug(title: str) -> str:
    """The id of a heading: that of a glossary's term, or what GitHub makes of the title."""
    return TERM_IDS.get(title) or re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


TERM_IDS = {term: anchor for anchor, term in TERM.findall((ROOT / "notebooks/glossary.md").read_text(encoding="utf-8"))}
