"""Builds the book as a static site in out/book: `make book`."""

from __future__ import annotations

import argparse
from pathlib import Path

from pages import BOOK, ROOT, prepare
from sphinx.cmd.build import main as sphinx_build


def main() -> int:
    """Build it. Any warning is an error, at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=ROOT / "out/book", metavar="FOLDER", help="where it goes (default: out/book)")
    output = parser.parse_args().output
    prepare(output / "source")
    status = sphinx_build(
        ["-b", "html", "-c", str(BOOK), "-j", "auto", "-W", "--keep-going", "-q", "-d", str(output / "doctrees")]
        + [str(output / "source"), str(output / "html")]
    )
    if status == 0:
        print(f"The book is in {output / 'html' / 'index.html'}.")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
