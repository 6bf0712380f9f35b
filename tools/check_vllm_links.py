"""Checks what lessons and pages say about vLLM's source against that source: `make check-vllm-links VLLM=FOLDER_OR_WHEEL`.

Each file of vLLM that they name must exist in the version they name, each name in the file it is said to be in, and each quoted line too:

    (0.32.0, `schedule` in `vllm/v1/core/sched/scheduler.py`)                a name
    vLLM 0.32.0: `self.running.pop()` in `vllm/v1/core/sched/scheduler.py`   a quoted line

The version is the last one named in the same cell or section before the file, or else the first after it in the paragraph. A file without
one is a problem. Statements about versions whose source was not given are counted, not checked.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACES = ("notebooks/*.ipynb", "notebooks/*.md", "solutions/*.ipynb", "docs/*.md", "README.md", "CONTRIBUTING.md")
_FILE = r"`(vllm/[\w./-]+\.\w+)`"
_FILES = re.compile(_FILE)
_CLAIM = re.compile(rf"((?:`[^`\n]+`(?:, | and |, and ))*`[^`\n]+`)\s+in\s+{_FILE}")
_VERSION = re.compile(r"(?:\bvLLM |\()(\d+\.\d+\.\d+)\b")


@dataclass(frozen=True)
class Statement:
    """What a page says: that a file exists in a version of vLLM, and that something stands in it (None: only the file)."""

    place: str
    version: str | None
    file: str
    text: str | None = None


@dataclass(frozen=True)
class Source:
    """A version of vLLM, and a function that reads one of its files, or gives None where there is none."""

    version: str
    read: Callable[[str], str | None]


def open_source(path: Path) -> Source:
    """The source in a wheel, or in a folder that has the folder `vllm` in it or is it.

    Raises:
        ValueError: There is no vLLM.
    """
    if path.is_file() and zipfile.is_zipfile(path):
        archive = zipfile.ZipFile(path)
        names = set(archive.namelist())

        def read(name: str) -> str | None:
            return archive.read(name).decode("utf-8", errors="replace") if name in names else None
    else:
        folder = path.parent if path.name == "vllm" else path

        def read(name: str) -> str | None:
            return (folder / name).read_text(encoding="utf-8", errors="replace") if (folder / name).is_file() else None

    found = re.search(
        r"__version__ = (?:version = )?['\"](\d+\.\d+\.\d+)", read("vllm/_version.py") or read("vllm/version.py") or ""
    )
    if found is None:
        raise ValueError(
            f"{path} is no wheel of vLLM and no folder with its source: there is no vllm/_version.py that names a version."
        )
    return Source(found[1], read)


def read_sections(page: Path) -> Iterator[tuple[str, str]]:
    """The text of a page, cell by cell or heading by heading, each with its place."""
    text, name = page.read_text(encoding="utf-8"), page.relative_to(ROOT) if page.is_relative_to(ROOT) else page
    if page.suffix == ".ipynb":
        for number, cell in enumerate(json.loads(text)["cells"]):
            if cell["cell_type"] == "markdown":
                yield f"{name}, cell {cell.get('id', number)}", "".join(cell["source"])
    else:
        for section in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
            yield f"{name}, {section.splitlines()[0].lstrip('# ') if section else ''}", section


def find_statements(place: str, section: str) -> Iterator[Statement]:
    """What a section says about vLLM's files, in order."""
    claims = {found.start(2): re.findall(r"`([^`\n]+)`", found[1]) for found in _CLAIM.finditer(section)}
    versions = list(_VERSION.finditer(section))
    for found in _FILES.finditer(section):
        before = [item[1] for item in versions if item.start() < found.start()]
        end = section.find("\n\n", found.end())
        after = [item[1] for item in versions if found.end() <= item.start() < (end if end >= 0 else len(section))]
        version = before[-1] if before else after[0] if after else None
        yield Statement(place, version, found[1])
        for text in claims.get(found.start(1), ()):
            yield Statement(place, version, found[1], text)


def problem_with(statement: Statement, source: Source) -> str | None:
    """What is wrong with a statement about this source, or None."""
    code = source.read(statement.file)
    if code is None:
        return f"there is no {statement.file} in vLLM {source.version}"
    if statement.text is None or stands_in(statement.text, code):
        return None
    return f"`{statement.text}` is not in {statement.file} of vLLM {source.version}"


def stands_in(text: str, code: str) -> bool:
    """Whether a name is defined or assigned in the code (each part of it, if it has dots), or a quoted line stands there, however it is broken."""
    if re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\(\))?", text):
        parts = text.removesuffix("()").split(".")
        return all(
            re.search(rf"\b(?:class|def) {part}\b|\b{part}\b(?:: [^=\n]+)?\s*=[^=]|^\s*{part}:", code, re.MULTILINE)
            for part in parts
        )
    return _plain(text) in _plain(code)


def _plain(text: str) -> str:
    """Code or a comment without line breaks, indentation and comment signs."""
    return " ".join(re.sub(r"^\s*#+ ?", "", text, flags=re.MULTILINE).split())


def check(pages: list[Path], sources: list[Source]) -> tuple[list[str], int, Counter[str]]:
    """Check all statements of these pages.

    Returns:
        The problems, how many statements were checked, and how many were not, by version.
    """
    by_version = {source.version: source for source in sources}
    problems, checked, left_out = [], 0, Counter[str]()
    for page in pages:
        for place, section in read_sections(page):
            for statement in find_statements(place, section):
                if statement.version is None:
                    problems.append(f"{place}: {statement.file} is named without a version of vLLM")
                elif statement.version not in by_version:
                    left_out[statement.version] += 1
                else:
                    checked += 1
                    problem = problem_with(statement, by_version[statement.version])
                    if problem is not None:
                        problems.append(f"{place}: {problem}")
    return problems, checked, left_out


def main(argv: list[str] | None = None) -> int:
    """Print what is wrong; 1 if anything is, or if no statement could be checked."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "vllm", nargs="+", type=Path, metavar="VLLM", help="a source folder of vLLM, or a wheel; several for several versions"
    )
    arguments = parser.parse_args(argv)
    try:
        sources = [open_source(path) for path in arguments.vllm]
    except ValueError as error:
        parser.error(str(error))
    problems, checked, left_out = check(sorted(page for place in PLACES for page in ROOT.glob(place)), sources)
    for problem in problems:
        print(problem)
    print(
        f"Against vLLM {', '.join(source.version for source in sources)}: {checked} statements checked, {len(problems)} problems."
    )
    for version, count in sorted(left_out.items()):
        print(f"Not checked: {count} about vLLM {version}. Give its source too.")
    if not checked:
        print("No statement is about a version that was given.")
    return 1 if problems or not checked else 0


if __name__ == "__main__":
    sys.exit(main())
