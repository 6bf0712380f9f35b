"""Copies measured tables into README.md and docs/*.md, from the JSON files that the benchmarks wrote.

    python tools/readme_tables.py

What stands between `<!-- FILE -->` and `<!-- end -->` is replaced by the command, its date and its text, as stored in FILE.
tests/project/test_readme.py checks that nobody has typed anything there.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PLACE = re.compile(r"(<!-- (benchmarks/results/\S+\.json) -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def fill(text: str) -> str:
    """The text with every table filled in anew."""
    return PLACE.sub(lambda place: f"{place[1]}{render(ROOT / place[2])}{place[3]}", text)


def render(file: Path) -> str:
    """A measurement as Markdown."""
    report = json.loads(file.read_text(encoding="utf-8"))
    return "\n".join(["```text", f"$ {report['command']}", f"{report['time'][:10]}", "", *report["text"], "```", ""])


def main() -> None:
    """Rewrite the tables of every page."""
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
