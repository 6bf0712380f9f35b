"""Copies measured tables into README.md and docs/*.md, from the JSON files that the benchmarks wrote.

    python tools/readme_tables.py

The text between `<!-- FILE -->` and `<!-- end -->` is replaced by the command, its date and its table, as stored in FILE.
tests/project/test_readme.py checks that nobody has edited it by hand.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PLACE = re.compile(r"(<!-- (benchmarks/results/\S+\.json) -->\n).*?(<!-- end -->)", flags=re.DOTALL)
SCRIPT = re.compile(r"python (benchmarks/\S+\.py)")
LAST_COMMIT = "01d59da"
"""The last one with the scripts that have been deleted."""


def fill(text: str) -> str:
    """The text with every table renewed."""
    return PLACE.sub(lambda place: f"{place[1]}{render(ROOT / place[2])}{place[3]}", text)


def render(file: Path) -> str:
    """A measurement as Markdown. If its script has been deleted, the commit that has it is named; if it never had one, its method is."""
    report = json.loads(file.read_text(encoding="utf-8"))
    origin = f"$ {report['command']}" if "command" in report else report["method"]
    script = SCRIPT.search(origin)
    if script and not (ROOT / script[1]).exists():
        origin += f"    # git show {LAST_COMMIT}:{script[1]}"
    return "\n".join(["```text", origin, report["time"][:10], "", *report["text"], "```", ""])


def main() -> None:
    """Rewrite the tables of every page."""
    for page in PAGES:
        page.write_text(fill(page.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
