"""A lesson asks before it tells: where it says "Predict", nothing that stands below gives the answer away, and guesses are compared.

The output of the cells that answer is folded (`outputs_hidden`); so is the text that comments on it, up to what is not the answer.
"""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from minivllm.course import predict
from minivllm.course.folds import cover_answers, is_folded, uncover_answers

ROOT = Path(__file__).parents[2]
LESSONS = sorted((ROOT / "notebooks").glob("*.ipynb"))

TELLS_NOTHING = {
    ("07_the_scheduler", "cost-intro"),  # explains the loop, not how many steps it takes
    ("07_the_scheduler", "four-text"),  # first says how to read the figure
}
"""(lesson, cell) of the texts below a prediction that need no fold, because they do not say what the answer is."""


def find_spoilers(cells, lesson=""):
    """What gives an answer away, as a list of (cell, why). Cells are looked at from each prediction to the next text or beyond."""
    spoilers, answering = [], False
    for cell in cells:
        if cell.cell_type == "code":
            if answering and cell.outputs and not is_folded(cell):
                spoilers.append((cell.id, "its output is not folded"))
            elif is_folded(cell) and (line := shown_in_its_place(cell.outputs)):
                spoilers.append(
                    (cell.id, f"JupyterLab shows {line!r} in place of its output: run minivllm.course.pictures on it")
                )
            continue
        if answering and not begins_folded(cell.source) and (lesson, cell.id) not in TELLS_NOTHING:
            spoilers.append((cell.id, "the text after the prediction starts without a fold or a heading"))
        answering = False
        for after in texts_after_predictions(cell.source):
            answering = not after
            if after and not begins_folded(after):
                spoilers.append((cell.id, "text follows the prediction in the same cell"))
    return spoilers


def shown_in_its_place(outputs):
    """What JupyterLab shows in place of a folded output: the first line of the first one, if that is text."""
    if not outputs:
        return None
    first = outputs[0]
    text = first.get("text") or next((first.get("data", {})[kind] for kind in TEXTS if kind in first.get("data", {})), "")
    return next((line for line in text.split("\n") if line), None)


TEXTS = ("text/html", "image/svg+xml", "application/pdf", "text/markdown", "text/plain")


def texts_after_predictions(source):
    """For each block quote that begins with "Predict", the text that follows it in the cell."""
    quotes = re.finditer(r"^> \*\*Predict.*(?:\n>.*)*", source, flags=re.MULTILINE)
    return [source[quote.end() :].strip() for quote in quotes]


def begins_folded(text):
    """Whether a text begins with a fold, or with a new section."""
    return text.lstrip().startswith(("<details>", "#"))


@pytest.mark.parametrize("path", LESSONS, ids=[path.stem for path in LESSONS])
def test_no_answer_is_seen_before_the_guess(path):
    assert find_spoilers(nbformat.read(path, as_version=4).cells, path.stem) == []


@pytest.mark.parametrize("path", LESSONS, ids=[path.stem for path in LESSONS])
def test_only_answers_are_folded(path):
    """A fold in a section that has asked nothing is a nuisance."""
    folded_without_question, answering = [], False
    for cell in nbformat.read(path, as_version=4).cells:
        if cell.cell_type == "markdown":
            section = re.split(r"^## ", cell.source, flags=re.MULTILINE)
            answering = bool(texts_after_predictions(section[-1])) or (answering and len(section) == 1)
        elif is_folded(cell) and not answering:
            folded_without_question.append(cell.id)
    assert folded_without_question == []


def test_every_lesson_asks_for_predictions():
    assert [path.stem for path in LESSONS if "> **Predict" not in path.read_text(encoding="utf-8")] == []


def test_folds_are_closed():
    for path in LESSONS:
        for cell in nbformat.read(path, as_version=4).cells:
            if cell.cell_type == "markdown":
                assert cell.source.count("<details>") == cell.source.count("</details>") == cell.source.count("<summary>"), (
                    cell.id
                )
                # Without the empty line, Markdown in the fold is not rendered.
                assert len(re.findall(r"<details><summary>.+</summary>\n\n", cell.source)) == cell.source.count("<details>"), (
                    cell.id
                )


PREDICTION = "Some text.\n\n> **Predict.** How many?\n> (Of all.)"
FOLD = "<details><summary>How many</summary>\n\nTwo.\n\n</details>\n\nGo on."


def cells_of(question, hidden, comment):
    metadata = {"jupyter": {"outputs_hidden": True}} if hidden else {}
    outputs = [new_output("display_data", {})] * hidden + [new_output("stream", text="2\n")]
    code = new_code_cell("print(2)", id="code", outputs=outputs, metadata=metadata)
    return [new_markdown_cell(question, id="question"), code, new_markdown_cell(comment, id="comment")]


def test_a_spoiled_prediction_is_found():
    assert find_spoilers(cells_of(PREDICTION, True, FOLD)) == []
    assert find_spoilers(cells_of(PREDICTION, True, "## Next")) == []
    assert find_spoilers(cells_of("No question.", False, "Two.")) == []
    assert [cell for cell, _ in find_spoilers(cells_of(PREDICTION, False, FOLD))] == ["code"]
    assert [cell for cell, _ in find_spoilers(cells_of(PREDICTION, True, "Two."))] == ["comment"]
    assert [cell for cell, _ in find_spoilers(cells_of(f"{PREDICTION}\n\nTwo.", False, "Two."))] == ["question"]
    assert find_spoilers(cells_of(f"{PREDICTION}\n\n{FOLD}", False, "Two.")) == []


def test_an_answer_is_covered_once_and_uncovered():
    output = new_output("stream", text="2\n")
    folded = new_code_cell("print(2)", outputs=[output], metadata={"jupyter": {"outputs_hidden": True}})
    silent = new_code_cell("pass", metadata={"jupyter": {"outputs_hidden": True}})
    notebook = new_notebook(cells=[folded, silent, new_code_cell("print(2)", outputs=[output]), new_markdown_cell("Text.")])
    assert [cell for cell, _ in find_spoilers(notebook.cells)] == [folded.id]
    for _ in range(2):
        cover_answers(notebook)
        assert [len(cell.outputs) for cell in notebook.cells[:3]] == [2, 0, 1]
        nbformat.validate(notebook)
    assert find_spoilers(notebook.cells) == []
    uncover_answers(notebook)
    assert [cell.outputs for cell in notebook.cells[:3]] == [[output], [], [output]]


# -- what a learner predicts -----------------------------------------------------------------------------------------


def test_a_guess_stands_next_to_its_answer(capsys):
    predict(steps=12, blocks=3, memory_read=2.0, tokens_lost=5, empty=0, share=44.0).compare(
        steps=17, blocks=3, memory_read=1.93, tokens_lost=0, empty=7, share=43.97
    )
    rows = capsys.readouterr().out.splitlines()
    assert [re.split(r"  +", row) for row in rows[1:]] == [
        ["steps", "12", "17", "too low by a factor of 1.4"],
        ["blocks", "3", "3", "right"],
        ["memory read", "2", "1.93", "close, a little high"],
        ["tokens lost", "5", "0", "too high"],
        ["empty", "0", "7", "too low"],
        ["share", "44", "44", "right"],
    ]


def test_without_a_guess_the_answer_comes_with_a_word_on_how_to_make_one(capsys):
    predict(steps=None, blocks=3).compare(steps=12345, blocks=3)
    assert "12,345" in (said := capsys.readouterr().out) and "in place of None" in said
    predict(steps=4).compare(steps=4)
    assert "None" not in capsys.readouterr().out


def test_a_guess_that_is_no_number_and_an_answer_to_another_question_are_refused():
    for guess in ("twelve", True, [3]):
        with pytest.raises(TypeError, match="Write a number, such as steps=12, in place of"):
            predict(steps=guess)
    with pytest.raises(ValueError, match="Predicted were steps, but the answers are blocks"):
        predict(steps=3).compare(blocks=3)
