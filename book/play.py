"""The playground in a folder of the book, with what it needs from npm and PyPI."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nbformat
from markdown_it import MarkdownIt
from pages import BOOK, ROOT

from minivllm.entrypoints.playground.exercise import LESSONS, MODEL
from minivllm.entrypoints.playground.site import assemble

CHECK = re.compile(r'with check\("([^"]+)"')

WASM_PYTHON = ["--platform", "pyemscripten_2026_0_wasm32", "--python-version", "3.14", "--implementation", "cp", "--abi", "cp314"]
"""That of the pinned Pyodide."""


def build_playground(folder: Path, scratch: Path) -> None:
    """Fetch what is missing, and write the playground to a folder. Files on the way lie in `scratch`.

    Raises:
        SystemExit: Node.js is not installed.
        CalledProcessError: Something could not be fetched or compiled; npm, pip or Node.js has said what.
    """
    packages, bundle = BOOK / "node_modules", scratch / "codemirror.js"
    try:
        installed = packages / ".package-lock.json"  # npm's own note of what it has installed
        if not installed.exists() or installed.stat().st_mtime < (BOOK / "package-lock.json").stat().st_mtime:
            subprocess.run(["npm", "ci", "--silent", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=BOOK, check=True)
        options = ["--bundle", "--format=esm", "--minify", "--log-level=warning", f"--outfile={bundle}"]
        subprocess.run(["npx", "--no", "esbuild", "codemirror.js", *options], cwd=BOOK, check=True)
        wheels = [fetch_wheel("msgspec", scratch, WASM_PYTHON), fetch_wheel("tqdm", scratch, [])]
        assemble(folder, packages / "pyodide", bundle, wheels)
        subprocess.run(["node", str(BOOK / "bytecode.mjs"), str(folder)], check=True)
    except FileNotFoundError as error:
        if error.filename not in ("npm", "npx", "node"):
            raise
        sentence = (
            f"{error.filename} was not found, and the playground needs Pyodide and CodeMirror: install Node.js, 20 or newer."
        )
        raise SystemExit(sentence) from None
    (folder / "licenses.txt").write_text(licenses(packages), encoding="utf-8")
    write_exercises(folder)


def licenses(packages: Path) -> str:
    """The licences of what is shipped with the playground, but for the wheels, which have theirs inside."""
    python = Path(os.__file__).parent / "LICENSE.txt"
    of_python = python.read_text(encoding="utf-8") if python.exists() else "https://docs.python.org/3/license.html"
    parts = [
        f"Pyodide has CPython and its standard library in it, PSF-2.0, https://github.com/python/cpython. "
        f"Here, some modules of the library are replaced by their bytecode, and Pyodide's list of packages is empty.\n{of_python}"
    ]
    names = ["pyodide", "codemirror", "@codemirror/lang-python"]
    for name in names:  # which grows: the editor is a bundle of its dependencies, too
        package = json.loads((packages / name / "package.json").read_text(encoding="utf-8"))
        if name == "pyodide":  # its package has no text of its licence, and axe's has the same
            text = (packages / "axe-core/LICENSE").read_text(encoding="utf-8")
            assert package["license"] == "MPL-2.0" and text.startswith("Mozilla Public License, version 2.0")
        else:
            names += [other for other in package.get("dependencies", {}) if other not in names]
            text = (packages / name / "LICENSE").read_text(encoding="utf-8")
        parts.append(f"{name} {package['version']}, {package['license']}, {address(package)}\n{text}")
    return f"\n{'=' * 80}\n".join(parts)


def address(package: dict[str, Any]) -> str:
    """Where a package's source is."""
    repository = package["repository"]
    return repository if isinstance(repository, str) else repository["url"]


def fetch_wheel(package: str, folder: Path, options: list[str]) -> Path:
    """The wheel of a package, of the version that is installed here."""
    pattern = f"{package}-{version(package)}-*.whl"
    if not list(folder.glob(pattern)):
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
        subprocess.run([*pip, *options, f"{package}=={version(package)}"], check=True)
    return next(folder.glob(pattern))


def write_exercises(folder: Path) -> None:
    """The exercises that can be done in the browser, as JSON: texts as HTML, cells to write, checks with their points."""
    markdown = MarkdownIt("commonmark", {"html": True}).enable("table")
    for number in LESSONS:
        (path,) = (ROOT / "exercises").glob(f"{number}_*.ipynb")
        cells, title = [], ""
        for cell in nbformat.read(path, 4).cells:
            if cell.cell_type == "markdown":
                title = title or cell.source.split("\n")[0].removeprefix("# ")
                cells.append({"kind": "text", "html": markdown.render(link_to_site(cell.source))})
            elif "show_results(" not in cell.source:
                cells.append(describe_cell(cell))
        content = json.dumps(
            {"title": title, "cells": [cell for cell in cells if not (cell["kind"] == "given" and cell["needs_model"])]}
        )
        (folder / f"exercise_{number}.json").write_text(content, encoding="utf-8")


def describe_cell(cell: nbformat.NotebookNode) -> dict[str, Any]:
    """A cell of code: what is given, what is to be written, or a check."""
    grader = cell.metadata.get("nbgrader", {})
    found: dict[str, Any] = {"kind": "given", "name": cell.id, "source": cell.source, "needs_model": MODEL in cell.source}
    if grader.get("grade"):
        found |= {"kind": "check", "points": grader["points"], "title": CHECK.search(cell.source)[1]}
    elif grader.get("solution"):
        found["kind"] = "answer"
    return found


def link_to_site(text: str) -> str:
    """Markdown whose links lead to the book's pages."""
    return re.sub(r"(?<=\]\()([\w./-]+)\.(?:md|ipynb)(?=[#)])", r"\1.html", text)
