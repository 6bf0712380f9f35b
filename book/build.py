"""Builds the book as a static site: `make book`."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path

from pages import BOOK, ROOT, prepare
from play import build_playground
from sphinx.cmd.build import main as sphinx_build

FOR_SCREEN_READERS = {
    '<p class="caption" role="heading">': '<p class="caption" role="heading" aria-level="2">',
    '<summary aria-label="Toggle hidden content">': "<summary>",
    "<pre>": '<pre tabindex="0">',
    "<pre style": '<pre tabindex="0" style',
    '<div class="cell_output docutils container">': '<div class="cell_output docutils container" tabindex="0">',
}
"""What the theme and MyST-NB write, and what axe asks for: a heading has a level, a button the name that it shows, and what scrolls can have the focus."""

UNSEEN = re.compile(r'<span class="[npw]">([^<]*)</span>')
"""Names, punctuation and space in code, which have the colour of code without a class: a fifth of all bytes of the pages."""
SYMBOL = re.compile(r'<symbol id="([\w-]+)".*?</symbol>\s*', re.DOTALL)
PICTURE = re.compile(r"(?<=_images/)[\w.-]+")


def main() -> int:
    """Build it. Any warning is an error, at the end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "out/book", metavar="FOLDER", help="where it goes (default: out/book)"
    )
    output = parser.parse_args().output.resolve()  # esbuild runs in another folder
    prepare(output / "source")
    html = output / "html"
    for folder in (html, output / "doctrees"):  # of an earlier build, perhaps of pages that no longer exist
        shutil.rmtree(folder, ignore_errors=True)
    options = ["-b", "html", "-j", "auto", "-W", "--keep-going", "-q"]
    status = sphinx_build([*options, "-c", str(BOOK), "-d", str(output / "doctrees"), str(output / "source"), str(html)])
    same = merge_pictures(html / "_images")
    for page in html.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        for old, new in FOR_SCREEN_READERS.items():
            text = text.replace(old, new)
        head, article, rest = text.partition("<article")  # before it, Furo's menu and symbols, much of it indentation
        text = slim(head, text) + article + rest
        text = PICTURE.sub(lambda name: same.get(name[0], name[0]), UNSEEN.sub(r"\1", text))
        page.write_text(text, encoding="utf-8")
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        notebook = json.loads(path.read_text(encoding="utf-8"))
        compact = json.dumps(notebook, ensure_ascii=False, separators=(",", ":"))
        (html / "notebooks" / path.name).write_text(compact, encoding="utf-8")
    for path in (html / "_static").rglob("*.map"):  # of Furo's scripts and styles, for its developers
        path.unlink()
    build_playground(html / "playground", output)
    if status == 0:
        print(f"The book is in {html / 'index.html'}. The playground needs a web server: python -m http.server -d {html}")
    return status


def slim(head: str, page: str) -> str:
    """What is before a page's article, without indentation, and without symbols that the page does not use."""
    return SYMBOL.sub(lambda symbol: symbol[0] if f'href="#{symbol[1]}"' in page else "", re.sub(r"\n\s+", "\n", head))


def merge_pictures(folder: Path) -> dict[str, str]:
    """Delete copies of pictures, and return the name under which each is still there."""
    first: dict[bytes, str] = {}
    names = {path.name: first.setdefault(path.read_bytes(), path.name) for path in sorted(folder.glob("*"))}
    for name in names.keys() - first.values():
        (folder / name).unlink()
    return names


if __name__ == "__main__":
    raise SystemExit(main())
