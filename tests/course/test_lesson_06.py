"""Lesson 06's checks, in both languages: the solution passes, an untouched exercise fails at each, other right solutions pass, mistakes fail where they belong.

`tests/support/mutate_lesson.py 06` makes many more mistakes, small ones.
"""

from __future__ import annotations

import json
import linecache
import subprocess
import sys
import textwrap

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import assert_close, attention_cases
from lesson_cells import Cell, edited, in_language, read_cells, run_cells, untouched
from lesson_checks import LessonChecks

pytest.importorskip("numba")
pytest.importorskip("triton")  # there is none for macOS; what a learner does then is tested below

from minivllm.course.grading.observe import find_difference
from minivllm.course.lessons.paged_kernels import launch_decode, launch_prefill, launch_write
from minivllm.kernels import reference

CELLS = read_cells("06")
PIECES, MERGE, WRITE, DECODE, PREFILL, BACKEND = "pieces", "merge", "write", "decode", "prefill", "backend"
NAMES = {
    PIECES: "each piece is seen once, and the state is that of the whole context",
    MERGE: "parts count by their own maximum and total",
    WRITE: "new keys and values are in their slots, and nothing else is touched",
    DECODE: "each query walks over its own blocks, to its own end",
    PREFILL: "each new token sees its context up to itself",
    BACKEND: "a layer's call: written first, then attended",
}
"""The checks, by the cell of the answer."""
ENGINE = "the engine writes the same text on your backend"
LOOPS, KERNEL = "numba", "triton"


class TestChecks(LessonChecks):
    number = "06"
    every = 47
    fewest = 10

    def cells_for(self, answer):
        """An answer in one of two languages says which."""
        about, _, language = answer.about.removesuffix(")").partition(" (")
        return cells_of(about, language or LOOPS), NAMES[about]


def cells_of(answer, language):
    """The cells that an answer needs, in one of the two languages."""
    own = [answer]
    if answer == BACKEND:
        own = [cell.name for cell in CELLS if cell.kind == "answer" or cell.name.startswith("choose")]
    check = "check-forward" if answer == BACKEND else f"check-{answer}"
    if answer in (WRITE, DECODE, PREFILL):
        own = [f"{answer}-loops", f"{answer}-kernel"]
    wanted = {"setup", *own, f"choose-{answer}", check}
    return in_language([cell for cell in CELLS if cell.name in wanted], language)


@pytest.mark.parametrize("language", [LOOPS, KERNEL])
def test_an_untouched_exercise_fails_at_its_checks_and_nowhere_else(language):
    cells = [Cell(cell.name, untouched(cell.source), cell.kind) if cell.kind == "answer" else cell for cell in CELLS]
    outcome = run_cells(in_language(cells, language))
    assert (outcome.points, outcome.broken, outcome.failed) == (0, {}, list(NAMES.values()))
    assert {type(error) for error in outcome.checks.values()} == {NotImplementedError}


@pytest.mark.slow
@pytest.mark.long
def test_the_grader_sees_the_same_in_both_languages():
    loops, kernels = (run_cells(in_language(CELLS, language), seed=3) for language in (LOOPS, KERNEL))
    assert loops.failed == kernels.failed == []
    assert [name for name, seen in loops.seen.items() if find_difference(json.dumps(seen), json.dumps(kernels.seen[name]))] == []


@pytest.mark.slow
@pytest.mark.parametrize("answer", [WRITE, DECODE, PREFILL])
def test_loops_need_not_be_compiled(answer):
    """Plain Python with NumPy is slow, and right."""
    cells = [Cell(cell.name, cell.source.replace("@njit(boundscheck=True)\n", ""), cell.kind) for cell in cells_of(answer, LOOPS)]
    outcome = run_cells(cells)
    assert (outcome.failed, outcome.broken) == ([], {})


@pytest.mark.slow
@pytest.mark.long
def test_the_engine_writes_the_same_on_triton():
    cells = [cell for cell in CELLS if cell.name != "write-text" and (cell.kind != "check" or cell.name == "check-engine")]
    outcome = run_cells(in_language(cells, KERNEL), with_model=True)
    assert (outcome.failed, outcome.broken, outcome.points) == ([], {}, 2)


@pytest.mark.slow
def test_the_engine_would_notice_a_wrong_backend():
    old, new = "if not metadata.is_decode:", "self.scale = 0.1\n        if not metadata.is_decode:"
    wrong = edited(in_language([cell for cell in CELLS if cell.name != "write-text"], LOOPS), old, new)
    assert ENGINE in run_cells(wrong, with_model=True).failed


@pytest.mark.slow
@pytest.mark.parametrize("language", [LOOPS, KERNEL])
@settings(max_examples=settings().max_examples // 10, deadline=None)
@given(data=st.data())
def test_the_kernels_pass_the_cases_of_the_packages_own(language, data):
    """Block sizes, shared blocks, dtypes and groups as the package's kernels are tested with."""
    space = namespace_of(language)
    decode = data.draw(st.booleans())
    case = data.draw(attention_cases("cpu", decode=decode, cpu=language == LOOPS, windows=False))
    head_dim, block_size = case.query.shape[2], case.key_cache.tensor.shape[1]
    if language == KERNEL and (head_dim & (head_dim - 1) or block_size & (block_size - 1)):
        return  # the lesson's kernels are for powers of 2
    if decode:
        arguments = [x.contiguous() if isinstance(x, torch.Tensor) else x for x in case.args]
        states = launch_decode(space["decode"], *arguments, part_len=block_size * data.draw(st.integers(1, 4)))
        output, expected = space["merge"](*states).to(case.query.dtype), reference.paged_decode_attention(*case.reference_args)
    else:
        arguments = [x.contiguous() if isinstance(x, torch.Tensor) else x for x in case.ragged_args]
        output, expected = (
            launch_prefill(space["prefill"], *arguments),
            reference.paged_prefill_attention(*case.ragged_reference_args),
        )
    assert_close(output, expected)


_spaces: dict[str, dict] = {}


def namespace_of(language):
    """What the solution defines."""
    if language not in _spaces:
        space = {"__name__": "__main__"}
        for cell in in_language(CELLS, language):
            if cell.kind == "answer" or cell.name == "setup" or cell.name.startswith("choose"):
                file = f"<06 {language} {cell.name}>"
                linecache.cache[file] = (len(cell.source), None, cell.source.splitlines(keepends=True), file)
                exec(compile(cell.source, file, "exec"), space)
        _spaces[language] = space
    return _spaces[language]


def test_16_bit_caches_are_written_by_loops_too():
    caches = [torch.zeros(3, 4, 2, 8, dtype=torch.bfloat16) for _ in range(2)]
    key, slots = torch.randn(2, 2, 8, dtype=torch.bfloat16), torch.tensor([5, -1])
    launch_write(namespace_of(LOOPS)["write"], key, key + 1, *caches, slots)
    assert torch.equal(caches[0].flatten(0, 1)[5], key[0]) and torch.equal(caches[1].flatten(0, 1)[5], key[0] + 1)
    assert int((caches[0] != 0).any(dim=(2, 3)).sum()) == 1


@pytest.mark.slow
@pytest.mark.long
def test_without_triton_the_loops_earn_all_points():
    """As on macOS: importing Triton fails, and the kernels' cells can be run all the same."""
    code = textwrap.dedent(
        """
        import sys
        sys.modules["triton"] = None
        sys.path[:0] = ["tests/support"]
        from lesson_cells import in_language, read_cells, run_cells
        outcome = run_cells(in_language(read_cells("06"), "numba"))
        print(outcome.failed, outcome.broken, outcome.points)
        told = run_cells(in_language(read_cells("06"), "triton")).checks
        print({str(error).splitlines()[-1] for error in told.values() if error})
        """
    )
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.splitlines()[0] == "[] {} 18"
    assert "Triton is not available on this system: write the loops" in printed.splitlines()[1]
