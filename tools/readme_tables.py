"""Puts the texts of measurements into the README, from the JSON files that the measurements wrote.

    python tools/readme_tables.py

What stands between `<!-- FILE -->` and `<!-- end -->` is replaced by the command, its time and its text, as they are in FILE.
tests/project/test_readme.py checks that nobody has typed anything there.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLACE = re.compile(r"(<!-- (benchmarks/results/\S+\.json) -->\n).*?(<!-- end -->)", flags=re.DOTALL)


def fill(text: str) -> str:
    """The text with every place filled anew."""
    return PLACE.sub(lambda place: f"{place[1]}{render(ROOT / place[2])}{place[3]}", text)


def render(file: Path) -> str:
    """A measurement as Markdown."""
    report = json.loads(file.read_text(encoding="utf-8"))
    return "\n".join(["```text", f"$ {report['command']}", f"{report['time'][:10]}", "", *report["text"], "```", ""])


def main() -> None:
    """Writes the README if it changes."""
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(fill(text), encoding="utf-8")


if __name__ == "__main__":
    main()
