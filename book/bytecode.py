"""Runs in the playground's Python: see bytecode.mjs."""

from __future__ import annotations

import importlib
import json
import pkgutil
import py_compile
import sys
import warnings
import zipfile
from importlib.util import cache_from_source
from pathlib import Path

from minivllm.entrypoints.playground.exercise import LESSONS
from minivllm.entrypoints.playground.session import call

SOURCE, BYTECODE = Path("/tmp/module.py"), Path("/tmp/module.pyc")
LIBRARY = next(path for path in sys.path if path.endswith(".zip"))
"""Where Python has found its standard library."""


def compile_all(library: str, package: str, folder: str) -> None:
    """Compile the modules that a run, a race and the exercises load.

    Args:
        library: A zip with the standard library. The modules that were loaded from it are replaced by their bytecode.
        package: A zip that is unpacked in `folder`. The bytecode of modules there is added.
        folder: Where the packages are.
    """
    load_everything()
    modules = [module for module in list(sys.modules.values()) if getattr(module, "__file__", None)]
    files = {Path(module.__file__) for module in modules if module.__spec__.origin != "frozen"}
    replace_sources(Path(library), {path.relative_to(LIBRARY).as_posix() for path in files if path.is_relative_to(LIBRARY)})
    with zipfile.ZipFile(package, "a", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for path in sorted(path for path in files if path.is_relative_to(folder) and path.suffix == ".py"):
            info = zipfile.ZipInfo(Path(cache_from_source(str(path))).relative_to(folder).as_posix())
            archive.writestr(info, compiled(path.read_bytes(), str(path)), zipfile.ZIP_DEFLATED, 9)


def load_everything() -> None:
    """Load what is loaded late: by a race, and by exercises."""
    warnings.simplefilter("ignore")  # tqdm warns that it can start no thread here
    run = {"name": "a run", "settings": {}, "code": ""}
    for message in ({"begin": {}}, {"advance": 1}, {"race": [run, run], "number": 1}, {"look": 1, "number": 1}, {"check": []}):
        answer = json.loads(call(json.dumps(message)))
        assert "error" not in answer, answer["error"]
    from minivllm.course import lessons

    for module in pkgutil.iter_modules(lessons.__path__):
        if module.name in {f"lesson_{number}" for number in LESSONS} or not module.ispkg:
            importlib.import_module(f"{lessons.__name__}.{module.name}")


def replace_sources(library: Path, loaded: set[str]) -> None:
    """Put bytecode in the place of some modules of a zip."""
    with zipfile.ZipFile(library) as archive:
        contents = [(entry, archive.read(entry)) for entry in archive.infolist()]
    with zipfile.ZipFile(library, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for entry, content in contents:
            if entry.filename in loaded and entry.filename.endswith(".py"):
                info = zipfile.ZipInfo(entry.filename + "c", entry.date_time)
                archive.writestr(info, compiled(content, f"{LIBRARY}/{entry.filename}"), zipfile.ZIP_DEFLATED, 9)
            else:
                archive.writestr(entry, content, entry.compress_type, 9)


def compiled(source: bytes, name: str) -> bytes:
    """The bytecode of a module, which is used without a look at its source."""
    SOURCE.write_bytes(source)
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(SOURCE), str(BYTECODE), dfile=name, doraise=True, invalidation_mode=unchecked)
    return BYTECODE.read_bytes()
