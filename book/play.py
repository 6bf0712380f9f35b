"""The playground in a folder of the book, with what it needs from npm and PyPI."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from pages import BOOK

from minivllm.entrypoints.playground.site import assemble

WASM_PYTHON = ["--platform", "pyemscripten_2026_0_wasm32", "--python-version", "3.14", "--implementation", "cp", "--abi", "cp314"]
"""That of the pinned Pyodide."""


def build_playground(folder: Path, scratch: Path) -> None:
    """Fetch what is missing, and write the playground to a folder. Files on the way lie in `scratch`.

    Raises:
        SystemExit: npm is not installed.
        CalledProcessError: Something could not be fetched; npm and pip have said what.
    """
    packages = BOOK / "node_modules"
    try:
        if not (packages / "pyodide/pyodide.mjs").exists():
            subprocess.run(["npm", "ci", "--silent", "--ignore-scripts", "--no-audit", "--no-fund"], cwd=BOOK, check=True)
        bundle = scratch / "codemirror.js"
        options = ["--bundle", "--format=esm", "--minify", "--log-level=warning", f"--outfile={bundle}"]
        subprocess.run(["npx", "--no", "esbuild", "codemirror.js", *options], cwd=BOOK, check=True)
    except FileNotFoundError:
        raise SystemExit("npm was not found, and the playground needs Pyodide and CodeMirror from it: install Node.js.") from None
    wheels = [fetch_wheel("msgspec", scratch, WASM_PYTHON), fetch_wheel("tqdm", scratch, [])]
    assemble(folder, packages / "pyodide", bundle, wheels)


def fetch_wheel(package: str, folder: Path, options: list[str]) -> Path:
    """The wheel of a package, of the version that is installed here."""
    pattern = f"{package}-{version(package)}-*.whl"
    if not list(folder.glob(pattern)):
        pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
        subprocess.run([*pip, *options, f"{package}=={version(package)}"], check=True)
    return next(folder.glob(pattern))
