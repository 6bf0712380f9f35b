"""Makes the files of a lesson: `minivllm course new 11_async_engine`. They hold a small lesson that works, with one check: replace it.

What belongs in them is in docs/writing_a_lesson.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from minivllm.course.exercise_cells import GIVEN, SCHEMA_VERSION
from minivllm.course.last_cell import renew_last_cell
from minivllm.errors import CourseError

_KERNEL = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_WALKTHROUGH = [
    ("title", "markdown", "# {number} · {title}\n\n**The question that this lesson answers.**\n\nWhat there is to see, in two or three sentences. Terms link to the [glossary](glossary.md) where they first appear: the cache of a text is made of [blocks](glossary.md#block)."),
    ("ask", "markdown", "## How many blocks\n\nA block holds 16 tokens.\n\n> **Predict.** How many blocks does a text of 33 tokens need?"),
    ("guess", "code", "from minivllm.course import predict\n\nguess = predict(blocks=None)  # your number in place of None"),
    ("answer", "code", "guess.compare(blocks=-(-33 // 16))"),
    ("end-text", "markdown", "## What you have\n\nWhat the learner knows now, and where it is in the package: `num_blocks_for` in `minivllm/core/block_space_manager.py`.\n\n## Three questions to think over\n\n1. What if a block held one token?\n2. And if it held all of them?\n3. Who pays for the empty part of the last one?\n\n## To read\n\n- Kwon et al., 2023, \"Efficient Memory Management for Large Language Model Serving with PagedAttention\"."),
]  # fmt: skip
_SOLUTION = [
    ("title", "markdown", "# {number} · {title}: the exercise\n\n**What you build, in a sentence.**\n\nReplace `write this` with your code; the check below tells you whether it holds."),
    ("setup", "code", "from minivllm.course import check\nfrom minivllm.course.lessons import lesson_{number}"),
    ("count-task", "markdown", "## Blocks of a text\n\n`count_blocks(num_tokens, block_size)` returns how many blocks hold this many tokens. The last one may be partly full.\n\n<details><summary>Hint 1 for <code>count_blocks</code></summary>\n\nHow many blocks does one token need? And one more than fills a block?\n\n</details>\n<details><summary>Hint 2 for <code>count_blocks</code></summary>\n\nA division that rounds up is a division by `//` that rounds down, of the negative number.\n\n</details>"),
    ("count", "answer", 'def count_blocks(num_tokens, block_size):\n    """How many blocks hold these tokens."""\n    ### BEGIN SOLUTION\n    return -(-num_tokens // block_size)\n    ### END SOLUTION'),
    ("check-count", "check", 'with check("the last block may be partly full", points=2):\n    lesson_{number}.check_count_blocks(count_blocks)'),
    ("end-text", "markdown", "## What you have\n\nWhere the package has it: `num_blocks_for` in `minivllm/core/block_space_manager.py`."),
]  # fmt: skip
_POINTS = 2
_FILES = {
    "minivllm/course/lessons/lesson_{number}/__init__.py": '''"""The checks of lesson {number}."""

from minivllm.course.lessons.lesson_{number}.counting import check_count_blocks
''',
    "minivllm/course/lessons/lesson_{number}/counting.py": '''"""The checks of lesson {number} for blocks that are counted."""

from __future__ import annotations

from typing import Any

from minivllm.course.observations import expect, rounds


def check_count_blocks(count_blocks: Any) -> None:
    """One more block for each token that does not fit the last one."""
    for rng in rounds("count", 40):
        num_tokens, block_size = rng.randrange(60), rng.choice((1, 4, 16))
        said, expected = f"count_blocks({num_tokens}, {block_size}).", len(range(0, num_tokens, block_size))
        expect(said, "blocks", expected, count_blocks(num_tokens, block_size), "the last block: it may be partly full")
''',
    "tests/course/test_lesson_{number}.py": '''"""Lesson {number}'s checks: the solution passes, a stub fails, and a mistake fails where it belongs and is named."""

from __future__ import annotations

from lesson_checks import LessonChecks


class TestChecks(LessonChecks):
    number = "{number}"
    points = 2
    says = ("Expected", "Got", "Look at")
''',
    "tests/course/answers/{number}_wrong.diff": """# the last block may be partly full

@@ a partly full block is forgotten
-return -(-num_tokens // block_size)
+return num_tokens // block_size

@@ one block too many
? it may be partly full
-return -(-num_tokens // block_size)
+return num_tokens // block_size + 1
""",
}


def make_lesson(name: str, root: Path) -> list[Path]:
    """Write the files of a new lesson.

    Args:
        name: Such as "11_async_engine".
        root: The project's folder.

    Returns:
        The paths of the files, the walkthrough and the solution first.

    Raises:
        CourseError: The name has another form, there is a lesson of this number, or the folder is not that of the project.
    """
    import nbformat

    if not re.fullmatch(r"\d\d(_[a-z0-9]+)+", name):
        raise CourseError(f"A lesson's name is two digits and words, such as 11_async_engine, but this one is {name!r}.")
    number, title = name[:2], name[3:].replace("_", " ").capitalize()
    for folder in ("notebooks", "solutions"):
        if not (root / folder).is_dir():
            raise CourseError(f"There is no folder {root / folder}: make lessons in a copy of the repository.")
        for there in (root / folder).glob(f"{number}_*.ipynb"):
            raise CourseError(f"There is a lesson {number} already: {there}.")
    written = []
    for folder, cells in (("notebooks", _WALKTHROUGH), ("solutions", _SOLUTION)):
        made = [_make_cell(cell_id, kind, _fill(source, number, title), folder == "solutions") for cell_id, kind, source in cells]
        notebook = nbformat.v4.new_notebook(cells=made, metadata=_KERNEL)
        renew_last_cell(notebook)
        written.append(root / folder / f"{name}.ipynb")
        nbformat.write(notebook, written[-1])
    for path, text in _FILES.items():
        written.append(root / _fill(path, number, title))
        written[-1].parent.mkdir(parents=True, exist_ok=True)
        written[-1].write_text(_fill(text, number, title), encoding="utf-8")
    return written


def _fill(text: str, number: str, title: str) -> str:
    return text.replace("{number}", number).replace("{title}", title)


def _make_cell(cell_id: str, kind: str, source: str, graded: bool) -> Any:
    import nbformat

    make = nbformat.v4.new_markdown_cell if kind == "markdown" else nbformat.v4.new_code_cell
    cell = make(source, id=cell_id)
    if graded:
        marks = {"answer": {"solution": True, "locked": False}, "check": {"grade": True, "points": _POINTS}}.get(kind, {})
        cell.metadata["nbgrader"] = GIVEN | {"grade_id": cell_id, "schema_version": SCHEMA_VERSION} | marks
    return cell
