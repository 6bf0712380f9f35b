"""The playground's files in one folder, which any web server can serve, offline."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from pathlib import Path

from minivllm.entrypoints.playground.exercise import LESSONS

PACKAGE = Path(__file__).resolve().parents[2]
STATIC = Path(__file__).parent / "static"
LIVE_PAGE = Path(__file__).parents[1] / "dashboard/static"
DRAWING = ("batch.js", "block_map.js", "curves.js", "palette.js", "queues.js", "state.js", "style.css", "icon.svg")
"""Files of the live page that the playground uses as they are."""
PARTS = (
    "*.py", "bench/*.py", "core/*.py", "data_parallel/__init__.py", "data_parallel/routing.py", "engine/*.py", "executor/*.py", "simulation/*.py",
    "entrypoints/__init__.py", "entrypoints/dashboard/__init__.py", "entrypoints/dashboard/step_view.py", "entrypoints/playground/*.py",
    "course/__init__.py", "course/checks.py", "course/observations.py", "course/predictions.py", "course/results.py", "course/sources.py", "course/lessons/__init__.py", "course/lessons/block_tables.py", "course/lessons/budget.py",
    *(f"course/lessons/lesson_{number}/*.py" for number in LESSONS), "viz/__init__.py",
)  # fmt: skip
"""The package's files that the simulated engine and the exercises import, with those around them."""
EDITABLE = {"scheduler": "core/scheduler.py", "block_space_manager": "core/block_space_manager.py"}
"""What the reader can begin to edit."""
EMBEDDED = '<link rel="stylesheet" href="embedded.css"><script type="module" src="embedded.js"></script>'
FOLD = '<details id="fold" class="wide"><summary>Settings</summary><div id="fields">'


def assemble(folder: Path, pyodide: Path, editor: Path, wheels: list[Path]) -> None:
    """Write the playground to a folder.

    Args:
        folder: Made if it does not exist.
        pyodide: The folder of the npm package.
        editor: CodeMirror, bundled as a module.
        wheels: What the package imports and the browser's Python lacks.
    """
    (folder / "pyodide").mkdir(parents=True, exist_ok=True)
    (folder / "code").mkdir(exist_ok=True)
    for path in [
        *(LIVE_PAGE / name for name in DRAWING),
        *STATIC.glob("*.js"),
        STATIC / "boot.mjs",
        *STATIC.glob("*.css"),
        STATIC / "exercise.html",
        *wheels,
    ]:
        shutil.copy(path, folder)
    shutil.copy(editor, folder / "codemirror.js")
    for name in ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip"):
        shutil.copy(pyodide / name, folder / "pyodide")
    lock = json.loads((pyodide / "pyodide-lock.json").read_text(encoding="utf-8"))  # which lists packages that could be fetched
    (folder / "pyodide/pyodide-lock.json").write_text(json.dumps(lock | {"packages": {}}), encoding="utf-8")
    for name, path in EDITABLE.items():
        shutil.copy(PACKAGE / path, folder / f"code/{name}.py")
    with zipfile.ZipFile(folder / "minivllm.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted({path for part in PARTS for path in PACKAGE.glob(part)}):
            archive.write(path, f"minivllm/{path.relative_to(PACKAGE)}")
    names = ["minivllm.zip", *(path.name for path in wheels)]
    (folder / "files.json").write_text(json.dumps(names), encoding="utf-8")
    (folder / "index.html").write_text(make_page(), encoding="utf-8")
    (folder / "embedded.html").write_text(make_embedded_page(), encoding="utf-8")


def make_page() -> str:
    """The live page with settings and a player in place of its prompt box, and without replicas."""
    page = (LIVE_PAGE / "index.html").read_text(encoding="utf-8")
    controls = (STATIC / "controls.html").read_text(encoding="utf-8").rstrip()
    hint = "<p>Nothing runs. Press <strong>Play</strong>, or <strong>One step</strong>.</p>"
    changes = [
        (r'<section id="ask".*?</section>', controls),
        (r'<section id="replicas".*?</section>\s*', ""),
        (r'<p id="status".*?</button>\s*<dl id="facts"></dl>', "<p>the playground</p>"),
        (r'(<div id="batch-empty" class="empty">).*?(</div>)', rf"\1{hint}\2"),
        (r"dashboard/main\.js", "playground.js"),
        (r"dashboard/(icon\.svg|style\.css)", r"\1"),
        (r"<title>.*?</title>", "<title>The minivllm playground</title>"),
        (r"(\s*)(<script)", r'\1<link rel="stylesheet" href="playground.css">\1\2'),
        (r">The last minute<", ">The last minute of the engine’s clock<"),
    ]
    return change(page, changes)


def make_embedded_page() -> str:
    """The page in a frame of the book: without its header, and with the settings folded but for the situation."""
    changes = [
        (r"<header>.*?</header>\s*", ""),
        (r'(<p id="preset-text".*?</p>)(.*?)(</form>)', rf"\1{FOLD}\2</div></details>\3"),
        (r"(\s*)(<script)", rf"\1{EMBEDDED}\1\2"),
    ]
    return change(make_page(), changes)


def change(page: str, changes: list[tuple[str, str]]) -> str:
    """A page with each pattern replaced, which must be there."""
    for pattern, replacement in changes:
        page, count = re.subn(pattern, replacement, page, flags=re.DOTALL)
        assert count, pattern
    return page
