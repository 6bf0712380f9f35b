"""The tests that every lesson's checks have, run over tables of answers: wrong ones fail where they are wrong, other right ones pass.

The tables are `tests/course/answers/NN_wrong.diff` and `NN_right.diff`, in which a line begins with

    #   the check that is the first to fail, for all entries up to the next such line (lessons 05 and 06: the answer that is changed)
    @@  the name of an entry
    ?   words of the message
    -   what stands once in the solution's answers
    +   what stands there instead

A part of a line may be given, without its indentation. An entry with several changes has an empty line between them.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from lesson_cells import Cell, Outcome, edited, read_cells, run_cells, untouched, without_earlier_checks
from mutate_lesson import WANTED, find_survivors
from nightly import NIGHTLY

from minivllm.course.grading.observe import find_difference

ANSWERS = Path(__file__).parents[1] / "course" / "answers"


@dataclass
class Answer:
    """Changes of a solution, the check or the answer that they are about, and words of the message if they are wrong."""

    name: str
    about: str = ""
    words: str = ""
    changes: list[tuple[str, str]] = field(default_factory=list)

    def make(self, cells: list[Cell]) -> list[Cell]:
        """The solution's cells with the changes."""
        for old, new in self.changes:
            cells = edited(cells, old, new)
        return cells


def read_answers(number: str, kind: str) -> list[Answer]:
    """The "wrong" or the "right" answers of a lesson; none if it has no such file.

    Raises:
        ValueError: A line begins with something else.
    """
    path, answers, about = ANSWERS / f"{number}_{kind}.diff", [], ""
    parts: list[tuple[list[str], list[str]]] = []
    words: list[str] = []

    def finish() -> None:
        if answers:
            answers[-1].words = "\n".join(words)
            answers[-1].changes = [("\n".join(old), "\n".join(new)) for old, new in parts if old]

    for line in path.read_text().splitlines() if path.exists() else []:
        mark, text = (line[:3], line[3:]) if line.startswith("@@ ") else (line[:1], line[1:])
        if mark == "#":
            about = text.strip()
        elif mark == "@@ ":
            finish()
            answers.append(Answer(text, about))
            parts, words = [([], [])], []
        elif mark == "?":
            words.append(text[1:])
        elif mark == "-":
            parts[-1][0].append(text)
        elif mark == "+":
            parts[-1][1].append(text)
        elif mark == "":
            parts.append(([], []))
        else:
            raise ValueError(f"{path.name} has a line that begins with none of # @@ ? - +: {line!r}")
    finish()
    return answers


def find_answer(number: str, name: str) -> Answer:
    """A wrong answer of a lesson."""
    return next(answer for answer in read_answers(number, "wrong") if answer.name == name)


def combine(answers: list[Answer], cells: list[Cell]) -> list[Answer]:
    """As few answers as can be, in each of which several change different passages of the whole notebook: every run of all checks takes long."""
    combined: list[Answer] = []
    for answer in answers:
        for other in combined:
            if answer.about or other.about:
                continue
            both = Answer(f"{other.name}, {answer.name}", changes=other.changes + answer.changes)
            try:
                both.make(cells)
            except ValueError:
                continue
            combined[combined.index(other)] = both
            break
        else:
            combined.append(answer)
    return combined


@functools.cache
def solve(cells: tuple[Cell, ...], seed: int | None) -> Outcome:
    """What the checks see of a solution."""
    return run_cells(cells, seed=seed)


class LessonChecks:
    """The tests themselves: a lesson's test class inherits them, and says what is different about the lesson."""

    number: ClassVar[str]
    """Two digits."""
    points: ClassVar[int | None] = None
    """What the solution earns without a model, if that is tested here; notebooks are run by nbval."""
    says: ClassVar[tuple[str, ...]] = ()
    """Patterns that every failed assertion matches, whatever the mistake."""
    raises: ClassVar[type[BaseException]] = BaseException
    """What a failed check may raise."""
    fewest: ClassVar[int] = 12
    """How many small mistakes must be tried at the least."""
    with_other_input: ClassVar[frozenset[str]] = frozenset()
    """The checks on a real model that have random input, too, and so need no other to stand in for them."""
    every_wrong: ClassVar[int] = 5
    every_right: ClassVar[int] = 3
    """Every how many of the wrong and of the right answers one is tried without --long."""
    every: ClassVar[int | None] = None
    """Every how many of the small mistakes that `mutate_lesson.py` makes one is tried; None if the lesson has another test of them."""
    tries_mistakes_at_night: ClassVar[bool] = False
    """Whether they are tried at night alone, because it takes a minute or more."""

    def __init_subclass__(cls) -> None:
        if cls.points is None:
            cls.test_the_solution_earns_all_points = None
        if cls.every is None or (cls.tries_mistakes_at_night and not NIGHTLY):
            cls.test_a_sample_of_small_mistakes_is_caught = None
        if not read_answers(cls.number, "right"):
            cls.test_another_right_answer_passes = None

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        for kind in ("wrong", "right"):
            if kind in metafunc.fixturenames:
                answers = read_answers(self.number, kind)
                if kind == "right":
                    answers = combine(answers, read_cells(self.number))
                often = self.every_wrong if kind == "wrong" else self.every_right
                marks = [pytest.mark.long if place % often else () for place in range(len(answers))]
                metafunc.parametrize(
                    kind, [pytest.param(answer, marks=mark, id=answer.name) for answer, mark in zip(answers, marks, strict=True)]
                )

    def cells_for(self, answer: Answer) -> tuple[list[Cell], str]:
        """The solution's cells that an answer needs, and the check that is about it."""
        return read_cells(self.number), answer.about

    def run(self, answer: Answer, **options: Any) -> Outcome:
        """Run the cells with an answer, from where it differs on."""
        cells, _ = self.cells_for(answer)
        return run_cells(without_earlier_checks(cells, answer.make(cells)), **options)

    def look_from_outside(self, wrong: Answer, outcome: Outcome, check: str) -> None:
        """What the check saw of a wrong answer is not what it sees of the solution: the grader would notice, whatever the check says."""
        seen = outcome.seen[check]
        expected = solve(tuple(self.cells_for(wrong)[0]), None).seen[check]
        is_error = not isinstance(outcome.checks[check], AssertionError)
        assert is_error or find_difference(json.dumps(expected[: len(seen)]), json.dumps(seen)), "what is wrong was not recorded"

    def test_another_check_stands_in_for_each_that_loads_a_model(self):
        lesson = importlib.import_module(f"minivllm.course.lessons.lesson_{self.number}")
        checks = {cell.name: cell.needs_a_model for cell in read_cells(self.number) if cell.kind == "check"}
        stand_ins = getattr(lesson, "STAND_INS", {})
        assert stand_ins.keys() == {name for name, needs_a_model in checks.items() if needs_a_model} - self.with_other_input
        assert [name for name in stand_ins.values() if checks[name]] == []

    @pytest.mark.long
    @pytest.mark.slow
    def test_the_grader_sees_each_check_in_other_situations(self):
        cells = tuple(read_cells(self.number))
        usual, other = solve(cells, None), solve(cells, 7)
        assert other.failed == [] and [name for name, seen in usual.seen.items() if seen == other.seen[name]] == []

    def test_an_untouched_exercise_fails_at_its_checks_and_nowhere_else(self):
        outcome = run_cells([Cell(cell.name, untouched(cell.source), cell.kind) for cell in read_cells(self.number)])
        assert outcome.failed == list(outcome.checks) and outcome.broken == {} and outcome.points == 0
        assert {type(error) for error in outcome.checks.values()} == {NotImplementedError}

    def test_all_checks_are_exported_and_used(self):
        lesson = importlib.import_module(f"minivllm.course.lessons.lesson_{self.number}")
        used = "\n".join(cell.source for cell in read_cells(self.number))
        exported = [
            name for name, value in vars(lesson).items() if getattr(value, "__module__", "").startswith(f"{lesson.__name__}.")
        ]
        assert [name for name in exported if f"lesson_{self.number}.{name}(" not in used] == [] and exported

    def test_the_solution_earns_all_points(self):
        outcome = solve(tuple(read_cells(self.number)), None)
        assert outcome.failed == [] and outcome.broken == {}
        assert outcome.points == outcome.most_points == self.points

    @pytest.mark.slow
    def test_a_wrong_answer_fails_where_it_is_wrong_and_hears_why(self, wrong):
        _, check = self.cells_for(wrong)
        outcome = self.run(wrong, stop_at_failure=True)
        assert outcome.failed == [check]
        assert outcome.broken == {}
        error = outcome.checks[check]
        self.look_from_outside(wrong, outcome, check)
        assert isinstance(error, self.raises)
        assert wrong.words in str(error)
        if isinstance(error, AssertionError):
            assert [pattern for pattern in self.says if not re.search(pattern, str(error))] == []

    @pytest.mark.slow
    def test_another_right_answer_passes(self, right, pytestconfig):
        seed = 7 if pytestconfig.getoption("--long") else None  # the grader has another, too
        outcome = self.run(right, seed=seed)
        assert outcome.failed == [] and outcome.broken == {}
        expected = solve(tuple(self.cells_for(right)[0]), seed).seen
        assert {
            name: find_difference(json.dumps(expected[name]), json.dumps(seen)) for name, seen in outcome.seen.items()
        } == dict.fromkeys(outcome.seen)

    @pytest.mark.long
    @pytest.mark.slow
    def test_a_sample_of_small_mistakes_is_caught(self):
        count, survivors = find_survivors(self.number, every=self.every)
        assert count >= self.fewest
        assert len(survivors) <= (1 - WANTED) * count, [mutant.change for mutant in survivors]
